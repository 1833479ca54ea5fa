"""Trees of parameters in every form that libraries give them, and what is mistaken for one."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict

import muonjax
from muonjax._names.routes import routes
from tests.tools.views import leaf


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(50, 16, rngs=rngs)
        self.pos_embedding = nnx.Param(jnp.ones((9, 16)))
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.lm_head = nnx.Linear(32, 50, rngs=rngs)


STATE = nnx.state(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), nnx.Param)
PURE = nnx.as_pure(STATE)
FORMS = {
    "dictionary of tuples, boxed": lambda: dict(nnx.to_flat_state(STATE)),
    "flatten_dict": lambda: flatten_dict(nnx.to_pure_dict(STATE)),
    "flatten_dict with slashes": lambda: flatten_dict(nnx.to_pure_dict(STATE), sep="/"),
}


@pytest.mark.parametrize("form", FORMS)
def test_flat_trees_are_read_by_path(form):
    expected = routes(PURE)
    to_muon = [path for path, answer in expected.items() if answer.numbers]
    assert to_muon == ["up/kernel"]
    assert routes(FORMS[form]()) == expected


@pytest.mark.parametrize("pairs", [
    list(flatten_dict(nnx.to_pure_dict(STATE)).items()),
    jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(STATE)),
])  # fmt: skip
def test_pairs_of_a_path_and_an_array_are_no_tree(pairs):
    with pytest.raises(TypeError, match="for the array '0"):
        routes(pairs)


def test_a_flat_state_is_refused():
    with pytest.raises(TypeError, match="FlatState has no names: give the nested"):
        muonjax.muon(1e-3).init(nnx.to_flat_state(STATE))


def test_an_equinox_embedding_is_a_table():
    """Whatever its field is called."""

    def make(key):
        return {
            "items": eqx.nn.Embedding(30, 8, key=key),
            "up": eqx.nn.Linear(8, 16, key=key),
            "down": eqx.nn.Linear(16, 8, key=key),
        }

    model = eqx.filter_eval_shape(make, jax.random.key(0))
    found = routes(eqx.filter(model, lambda x: hasattr(x, "dtype")))
    assert found["items/weight"].numbers is None
    assert found["up/weight"].numbers is not None


@pytest.mark.parametrize("by", ["names", "program"])
def test_an_nnx_module_is_a_tree_to_optax(by):
    """Flax's modules are trees of JAX: without `nnx.Optimizer`, gradients and updates are modules too."""
    model = nnx.Dict(
        up=nnx.Linear(8, 16, rngs=nnx.Rngs(0)),
        out=nnx.Linear(16, 1, rngs=nnx.Rngs(0)),
    )
    x = jnp.ones((2, 8))

    def loss(model, x):
        return (model.out(jnp.tanh(model.up(x))) ** 2).mean()

    tx = muonjax.muon(1e-2, None if by == "names" else muonjax.inspect(loss, model, x))
    updates, _ = tx.update(jax.grad(loss)(model, x), tx.init(model), model)
    assert loss(optax.apply_updates(model, updates), x) < loss(model, x)


@pytest.mark.parametrize(
    "call",
    [muonjax.dimension_numbers, muonjax.tabulate, lambda p: muonjax.muon(1e-3).init(p)],
)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (nn.Dense(3), r"got Dense for.*model.init\(key, x\)\['params'\]"),
        (optax.adam(1e-3), "got function for the array 'init'"),
    ],
)
def test_what_is_no_tree_of_parameters(call, given, message):
    with pytest.raises(TypeError, match=message):
        call(given)


@pytest.mark.parametrize(
    "numbers", [None, lambda tree: jax.tree.map(lambda _: None, tree)]
)
def test_an_optimizer_warns_once(numbers):
    variables = {
        "params": {"Dense_0": {"kernel": jnp.ones((4, 5))}},
        "batch_stats": {"mean": jnp.ones(4)},
    }
    tx = muonjax.muon(1e-3, numbers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = tx.init(variables)
        tx.update(variables, state, variables)
    found = [
        str(warning.message)
        for warning in caught
        if "batch_stats" in str(warning.message)
    ]
    assert len(found) == 1
    assert found[0].startswith("The parameters have batch_stats too")


COINCIDENCE = {
    f"Dense_{i}": {"kernel": leaf(n, 100)} for i, n in enumerate((784, 100, 100))
}
VARIABLES = {
    "params": {"Dense_0": {"kernel": leaf(4, 5)}},
    "batch_stats": {"mean": leaf(4)},
}
IN_KERAS: dict = {"__name__": "keras.src.trainers"}
exec(
    compile("def build(call, params): return call(params)", "trainers.py", "exec"),
    IN_KERAS,
)


@pytest.mark.parametrize("params", [COINCIDENCE, VARIABLES])
@pytest.mark.parametrize(
    "call",
    [
        muonjax.dimension_numbers,
        muonjax.tabulate,
        lambda p: jax.eval_shape(muonjax.muon(1e-3).init, p),
        lambda p: jax.eval_shape(
            optax.chain(optax.clip(1.0), muonjax.muon(1e-3)).init, p
        ),
        lambda p: IN_KERAS["build"](muonjax.tabulate, p),
    ],
)
def test_a_warning_points_at_the_line_that_called(call, params):
    with pytest.warns(UserWarning, match="output head|batch_stats") as caught:
        call(params)
    assert {warning.filename for warning in caught} == {__file__}
