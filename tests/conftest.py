"""Eight virtual CPU devices for every test, so that meshes are tested where there is no machine with eight."""

import jax

# Before anything asks for a device. Not XLA_FLAGS: the examples' processes would inherit them.
jax.config.update("jax_num_cpu_devices", 8)
