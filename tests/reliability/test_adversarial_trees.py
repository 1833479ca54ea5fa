"""Any tree, any axes, any settings: a right answer or an error of ours, found before anything runs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given
from hypothesis import strategies as st

import muonjax
from muonjax import FusedDimensionNumbers, MuonDimensionNumbers, NewtonSchulz
from tests.reliability.adversarial import names_its_call
from tests.tools.tiers import examples
from tests.tools.views import matrix_view

AXIS = st.one_of(
    st.integers(-6, 6),
    st.integers(-3, 3).map(np.int64),
    st.sampled_from([None, 1.0, "rows"]),
)
AXES = st.one_of(
    AXIS, st.lists(AXIS, max_size=4).map(tuple), st.lists(AXIS, max_size=3)
)
DIMENSION_NUMBERS = st.one_of(
    st.builds(MuonDimensionNumbers, AXES, AXES),
    st.builds(
        FusedDimensionNumbers, AXES, AXES, st.integers(-1, 4), st.integers(-4, 4)
    ),
)


def attempt(call):
    """What `call` returns, or None where it raised an error that names a call of ours."""
    try:
        return call()
    except Exception as error:
        if not names_its_call(error):
            raise
        return None


def matrices_of(x, numbers):
    """[batch, fan_in, fan_out], index by index: the slow and plain meaning of dimension numbers."""
    if isinstance(numbers, FusedDimensionNumbers):
        pieces = np.split(x, numbers.parts, axis=numbers.axis)
        plain = MuonDimensionNumbers(numbers.reduction_axis, numbers.output_axis)
        return np.concatenate([matrices_of(piece, plain) for piece in pieces])
    reduction, output = (np.atleast_1d(axes).astype(int) % x.ndim for axes in numbers)
    sizes = [math.prod(x.shape[axis] for axis in axes) for axes in (reduction, output)]
    batch = [axis for axis in range(x.ndim) if axis not in [*reduction, *output]]
    found = []
    for index in np.ndindex(*(x.shape[axis] for axis in batch)):
        matrix = np.empty(sizes, x.dtype)
        for i, row in enumerate(np.ndindex(*(x.shape[axis] for axis in reduction))):
            for j, column in enumerate(np.ndindex(*(x.shape[axis] for axis in output))):
                place = dict(
                    zip(
                        [*batch, *reduction, *output],
                        [*index, *row, *column],
                        strict=True,
                    )
                )
                matrix[i, j] = x[tuple(place[axis] for axis in range(x.ndim))]
        found.append(matrix)
    return np.stack(found)


@examples(18)
@given(shape=st.lists(st.integers(0, 4), max_size=5), numbers=DIMENSION_NUMBERS)
def test_any_axes_make_the_matrices_that_they_say(shape, numbers):
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    view = attempt(lambda: matrix_view(x, numbers, call="orthogonalize"))
    if view is not None:
        y = view.to_matrices(x)
        np.testing.assert_array_equal(view.to_leaf(y), x)
        assert sorted(map(np.ndarray.tobytes, y)) == sorted(
            map(np.ndarray.tobytes, matrices_of(x, numbers))
        )


WHOLE = st.integers(-2, 8)


def settings_of(draw):
    """One of the functions that take settings, and arguments of the right types but any value."""
    number = st.floats()
    return draw(
        st.one_of(
            st.tuples(
                st.just(NewtonSchulz),
                st.fixed_dictionaries(
                    {},
                    optional={
                        "coefficients": st.lists(
                            st.tuples(number, number, number), max_size=3
                        ),
                        "deflation": WHOLE,
                        "form": st.sampled_from(["auto", "standard", "gram", "fast"]),
                        "normalization": st.sampled_from(
                            ["schatten", "frobenius", "trace"]
                        ),
                        "compute_dtype": st.sampled_from(
                            ["float32", "bfloat16", "int8", "complex64"]
                        ),
                    },
                ),
            ),
            st.tuples(
                st.just(muonjax.polar_express),
                st.fixed_dictionaries(
                    {"num_steps": WHOLE},
                    optional={
                        "lower": number,
                    },
                ),
            ),
        )
    )


@examples(10)
@given(data=st.data())
def test_any_settings_are_taken_or_refused_by_name(data):
    function, arguments = settings_of(data.draw)
    made = attempt(lambda: function(**arguments))
    if function is NewtonSchulz and made is not None:
        assert hash(made) == hash(NewtonSchulz(**arguments))
        schedules = [rows for rows in made.steps if rows is not None]
        assert all(math.isfinite(x) for rows in schedules for row in rows for x in row)
    if isinstance(made, tuple):  # a schedule
        assert np.isfinite(made).all()
        assert len(made) == arguments["num_steps"]


NAMES = [
    "attention",
    "query",
    "key",
    "out",
    "mlp",
    "kernel",
    "bias",
    "scale",
    "embedding",
]
NAMES += ["w", "blocks", "head"]
LEAVES = st.builds(
    jax.ShapeDtypeStruct,
    st.lists(st.sampled_from([0, 1, 2, 3, 8]), max_size=4).map(tuple),
    st.sampled_from(
        [jnp.float32] * 4 + [jnp.bfloat16, jnp.float16, jnp.int32, jnp.complex64]
    ),
)
TREES = st.recursive(
    LEAVES,
    lambda node: st.dictionaries(st.sampled_from(NAMES), node, min_size=1, max_size=3),
    max_leaves=5,
)


@examples(3)
@given(params=TREES, numbers=st.one_of(st.none(), DIMENSION_NUMBERS))
def test_any_tree_is_optimized_or_refused_by_name(params, numbers):
    tx = muonjax.muon(1e-3, numbers)

    def step(params):
        updates, state = tx.update(params, tx.init(params), params)
        return optax.apply_updates(params, updates), state

    shapes = attempt(lambda: jax.eval_shape(step, params))
    if shapes is not None:
        assert shapes[0] == params
