"""TPUs: compiled for one without it, and ready to run on one."""
