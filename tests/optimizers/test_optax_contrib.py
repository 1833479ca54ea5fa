"""`muonjax.optax_contrib` against the Optax that is installed: arguments, results, state; and where it is better."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import muonjax
from muonjax import MuonDimensionNumbers, optax_contrib
from tests.mesh.layouts import make_mesh, put, under
from tests.tools import oracles
from tests.tools.oracles import normal, normal_tree
from tests.tools.tiers import thorough

pytestmark = pytest.mark.skipif(
    "preconditioning" not in inspect.signature(optax.contrib.muon).parameters,
    reason=f"the Muon of Optax {optax.__version__} has other arguments than that of 0.2.8",
)

# The five steps multiply what is small, such as rounding errors, by the product of their slopes at zero.
ROUNDING = float(jnp.finfo(jnp.float32).eps) * muonjax.JORDAN[0][0] ** 5


def params(dtype=jnp.float32):
    shapes = {
        "wide": (6, 16),
        "tall": (16, 6),
        "same": (6, 16),
        "stack": (2, 4, 6),
        "bias": (5,),
    }
    return {"block": normal_tree(shapes, dtype=dtype), "scale": jnp.ones((), dtype)}


def gradients(step, tree):
    # Steps have different sizes, so that the momentum's scale counts.
    return jax.tree.map(lambda g: 0.5**step * g, oracles.gradients(step, tree))


def trajectory(tx, tree, steps=3, state=None):
    state = tx.init(tree) if state is None else state

    def step(carry, grads):
        tree, state = carry
        updates, state = tx.update(grads, state, tree)
        return (optax.apply_updates(tree, updates), state), updates

    grads = [gradients(i, tree) for i in range(steps)]
    grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
    (tree, state), updates = jax.jit(lambda carry: jax.lax.scan(step, carry, grads))(
        (tree, state)
    )
    return tree, state, updates


def assert_near(ours, theirs, tolerance=ROUNDING):
    """Relative to the largest entry of each leaf."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (
            np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)
            for x in (a, b)
        )
        assert np.max(np.abs(a - b)) <= tolerance * max(np.max(np.abs(b)), 1e-30)


def blocks(tree):
    del tree  # Optax calls it with masked leaves too
    numbers = dict.fromkeys(
        ("wide", "tall", "same", "stack"), MuonDimensionNumbers(-2, -1)
    )
    return {"block": {**numbers, "bias": None}, "scale": None}


def mask(tree):
    return jax.tree.map(lambda x: x.ndim == 2, tree)


ALL = {
    "learning_rate": optax.linear_schedule(0.1, 0.01, 4), "ns_coeffs": tuple(muonjax.YOU), "ns_steps": 6,
    "beta": 0.8, "eps": 0.3, "weight_decay": 0.2, "weight_decay_mask": mask, "mu_dtype": jnp.bfloat16,
    "nesterov": False, "adaptive": True, "preconditioning": "aol", "adam_b1": 0.7, "adam_b2": 0.8,
    "adam_eps_root": 1e-3, "adam_weight_decay": 0.3, "adam_learning_rate": 0.05,
    "muon_weight_dimension_numbers": blocks, "consistent_rms": 0.4,
}  # fmt: skip


@pytest.mark.parametrize("name", ["muon", "scale_by_muon"])
def test_arguments_are_those_of_optax_and_a_distribution(name):
    theirs, ours = (
        {
            p.name: (p.kind, p.default)
            for p in inspect.signature(getattr(m, name)).parameters.values()
        }
        for m in (optax.contrib._muon, optax_contrib)
    )
    assert ours.pop("distribution")[1] is None
    assert list(ours.items()) == list(theirs.items())


def test_every_argument_has_a_case():
    assert set(ALL) == set(inspect.signature(optax.contrib.muon).parameters)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        thorough(ALL),
        *(
            thorough({name: value})
            for name, value in ALL.items()
            if name != "learning_rate"
        ),
        thorough({"preconditioning": "spectral"}),
        {"preconditioning": "schatten", "eps": 1e3},  # which Optax does not pass on
        thorough({"preconditioning": "aol", "eps": 1e3}),
        thorough({"ns_coeffs": "dion"}),
        thorough({"ns_coeffs": "standard", "ns_steps": 2}),
        thorough(
            {"ns_coeffs": tuple(muonjax.YOU[:2])}
        ),  # two rows run twice, whatever ns_steps says
        {
            "muon_weight_dimension_numbers": {
                "block": MuonDimensionNumbers(-1, -2),
                "scale": None,
            }
        },
    ],
    ids=lambda s: "all" if s is ALL else "-".join(s) or "defaults",
)
def test_three_steps_equal_those_of_optax(settings):
    settings = {"learning_rate": 0.1, **settings}
    tree = params()
    if isinstance(settings.get("muon_weight_dimension_numbers"), dict):
        del tree["block"]["bias"]
    ours, theirs = (
        trajectory(m.muon(**settings), tree) for m in (optax_contrib, optax.contrib)
    )
    # A rounding to bfloat16 may differ.
    assert_near(ours, theirs, ROUNDING if "mu_dtype" not in settings else 2e-2)


@pytest.mark.parametrize(
    "preconditioning", ["frobenius", thorough("spectral"), thorough("aol")]
)
def test_complex_matrices_equal_those_of_optax(preconditioning):
    def matrix(*shape):
        return jax.lax.complex(normal(*shape, seed=1), normal(*shape, seed=2))

    numbers = {"w": MuonDimensionNumbers(1, 2)}
    settings = {"preconditioning": preconditioning, "weight_dimension_numbers": numbers}
    tree = {"w": matrix(2, 5, 9)}
    ours, theirs = (
        jax.jit(lambda x, tx=tx: tx.update(x, tx.init(x))[0])(tree)
        for tx in (
            m.scale_by_muon(muonjax.YOU, **settings)
            for m in (optax_contrib, optax.contrib)
        )
    )
    assert_near(ours, theirs)


def test_the_coefficients_of_a_state_are_those_that_run():
    tree = params()
    state = optax.contrib.muon(0.1, ns_coeffs=(2.0, -1.5, 0.5)).init(tree)
    ours, theirs = (
        trajectory(m.muon(0.1), tree, state=state)
        for m in (optax_contrib, optax.contrib)
    )
    assert_near(ours, theirs)


def test_hyperparameters_may_be_traced():
    tree = {"w": normal(6, 16)}
    injected = optax.inject_hyperparams(
        optax_contrib.muon, static_args=("consistent_rms",)
    )
    tx = injected(learning_rate=0.1, ns_steps=4, eps=0.1, beta=0.8, consistent_rms=0.2)
    plain = optax.contrib.muon(0.1, ns_steps=4, eps=0.1, beta=0.8, consistent_rms=0.2)
    assert_near(trajectory(tx, tree)[2], trajectory(plain, tree)[2])


@pytest.mark.parametrize("axis_type", [thorough(AxisType.Auto), AxisType.Explicit])
def test_a_mesh_changes_nothing(axis_type):
    """With its matrices cut along both axes; Optax raises for these where the axis types are explicit."""
    tree = {
        "w": normal(16, 64),
        "v": normal(64, 16, seed=1),
        "stack": normal(4, 16, 64, seed=2),
    }
    specs = {
        "w": P("fsdp", "tensor"),
        "v": P("tensor", "fsdp"),
        "stack": P("fsdp", None, "tensor"),
    }
    numbers = MuonDimensionNumbers(-2, -1)
    mesh = make_mesh(axis_type, fsdp=2, tensor=2)
    explicit = axis_type is AxisType.Explicit
    settings = {
        "preconditioning": "schatten",
        "muon_weight_dimension_numbers": dict.fromkeys(tree, numbers),
    }
    expected, *_ = trajectory(optax.contrib.muon(0.1, **settings), tree, 2)
    distribution = None if explicit else muonjax.Distribution(mesh, specs)
    tx = optax_contrib.muon(0.1, **settings, distribution=distribution)

    @jax.jit
    def two_steps(tree, first, second):
        state = tx.init(tree)
        for grads in (first, second):
            updates, state = tx.update(grads, state, tree)
            tree = optax.apply_updates(tree, updates)
        return tree

    with under(mesh):
        found = two_steps(
            *(
                put(x, specs, mesh)
                for x in (tree, gradients(0, tree), gradients(1, tree))
            )
        )
    assert_near(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, expected))


def test_equal_matrices_share_a_loop():
    tree = {f"layer_{i}": jnp.ones((8, 16) if i % 2 else (16, 8)) for i in range(12)}

    def products(module):
        tx = module.muon(0.1)
        return str(jax.make_jaxpr(lambda x: tx.update(x, tx.init(x), x))(tree)).count(
            "dot_general"
        )

    assert products(optax_contrib) * 6 <= products(optax.contrib)


@pytest.mark.parametrize("preconditioning", ["frobenius", "schatten", thorough("aol")])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_zero_gives_zero(dtype, preconditioning):
    tree = {"w": jnp.zeros((4, 8), dtype)}
    tx = optax_contrib.muon(0.1, preconditioning=preconditioning)
    updates, _ = jax.jit(tx.update)(tree, tx.init(tree), tree)
    assert not updates["w"].any()


def test_a_large_gradient_is_no_zero():
    """Optax's norm overflows, and its update is zero."""
    x = normal(4, 8)
    tx = optax_contrib.muon(1.0, weight_decay=0.0)
    run = jax.jit(lambda g: tx.update({"w": g}, tx.init({"w": x}), {"w": x})[0]["w"])
    np.testing.assert_allclose(run(x * 1e25), run(x), atol=1e-5)


def test_a_row_of_zeros_in_a_large_gradient_stays_zero():
    """Optax's least norm of a row, 1e-8, scaled as the gradient is, would be no number of float32."""
    x = {"w": normal(4, 8).at[1].set(0) * 1e17}
    tx = optax_contrib.scale_by_muon(preconditioning="aol")
    update = jax.jit(tx.update)(x, tx.init(x))[0]["w"]
    assert jnp.isfinite(update).all()
    assert not update[1].any()


def test_the_momentum_keeps_its_dtype():
    """bfloat16 parameters with float32 gradients: Optax's state becomes float32, which no scan accepts."""
    tree = {"w": jnp.ones((4, 8), jnp.bfloat16)}
    tx = optax_contrib.scale_by_muon()
    _, state = tx.update({"w": normal(4, 8)}, tx.init(tree))
    assert state.mu["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: optax_contrib.muon(0.1, ns_coeffs="muon"),
            "choose one of .'standard', 'dion'",
        ),
        (
            lambda: optax_contrib.scale_by_muon(preconditioning="none"),
            "choose one of .'frobenius'",
        ),
        (
            lambda: optax_contrib.scale_by_muon((1.0, 2.0)).init({}),
            r"^scale_by_muon: ns_coeffs must have shape.*got \(2,\)",
        ),
        (
            lambda: optax_contrib.scale_by_muon(muonjax.YOU, 3).init({}),
            "^scale_by_muon: Not enough coeffs to perform 3 steps",
        ),
        (
            lambda: optax_contrib.muon(0.1, ns_steps=0),
            r"^optax_contrib.muon\(ns_steps=0\).*positive",
        ),
    ],
)
def test_mistakes_say_what_to_give(call, message):
    with pytest.raises(ValueError, match=message):
        call()
