"""What is put together of one part is that part."""

import jax
import jax.numpy as jnp

import muonjax


def test_a_stack_of_one_kernel_is_read_as_the_kernel():
    def loss(params, x):
        kernels = jnp.stack([params["up"]])
        return jnp.sum(jnp.tanh(x @ kernels[0]) @ params["out"])

    params = {"up": jax.ShapeDtypeStruct((8, 16), "float32"), "out": jax.ShapeDtypeStruct((16, 4), "float32")}
    program = muonjax.inspect(loss, params, jax.ShapeDtypeStruct((4, 8), "float32"))
    assert program.dimension_numbers() == {"up": muonjax.MuonDimensionNumbers(0, 1), "out": None}
