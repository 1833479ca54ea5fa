"""Pallas's GPU interpreter calls back from inside a computation: on one core XLA's one thread waits for itself."""

import os

cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
if cores == 1:
    os.environ.setdefault("NPROC", "4")  # threads of XLA's pool, read when the backend starts
