import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import muonjax
from muonjax import NewtonSchulz
from muonjax._matrices import matrix_view
from tests.tools import oracles
from tests.tools.oracles import (
    SHORT,
    normal,
    normal_tree,
    on_device,
    queries_and_keys,
    trained,
)
from tests.tools.tiers import quick, thorough

JORDAN5 = NewtonSchulz(
    coefficients=5 * muonjax.JORDAN, normalization="frobenius", deflation=0
)
needs_consistent_rms = pytest.mark.skipif(
    "consistent_rms" not in inspect.signature(optax.contrib.muon).parameters,
    reason=f"the Muon of Optax {optax.__version__} has no consistent_rms",
)


def params(dtype=jnp.float32):
    projection = {"kernel": (8, 2, 4), "bias": (2, 4)}
    shapes = {
        "embed": {"embedding": (11, 8)},
        "attention": {
            "query": projection,
            "key": projection,
            "out": {"kernel": (2, 4, 8)},
        },
        "mlp": {"kernel": (32, 8), "bias": (8,)},
    }
    return normal_tree(shapes, dtype=dtype)


def gradients(step, dtype=jnp.float32):
    return oracles.gradients(100 + step, params(dtype))


def run(tx, tree, steps=3, jit=True, **extra):
    state = tx.init(tree)
    update = jax.jit(tx.update) if jit else tx.update
    for step in range(steps):
        updates, state = update(gradients(step), state, tree, **extra)
        tree = optax.apply_updates(tree, updates)
    return tree, state


def matrices(rng=0):
    gen = np.random.default_rng(rng)
    return {
        k: gen.standard_normal(s)
        for k, s in {"wide": (12, 40), "tall": (40, 12), "square": (12, 12)}.items()
    }


def trajectory(tx, start, steps=10):
    trees = start, *(matrices(step + 1) for step in range(steps))
    tree, *grads = jax.tree.map(on_device, trees)
    return trained(tx, tree, grads)[0]


@pytest.mark.parametrize("nesterov", [True, False])
def test_ten_steps_equal_the_float64_oracle(nesterov):
    start = matrices()
    ours = trajectory(
        muonjax.muon(0.01, nesterov=nesterov, newton_schulz=JORDAN5), start
    )
    for name, weight in start.items():
        expected = oracles.muon_steps(
            weight,
            [matrices(step + 1)[name] for step in range(10)],
            rows=5 * muonjax.JORDAN,
            learning_rate=0.01,
            nesterov=nesterov,
        )[-1]
        assert_allclose(ours[name], expected, atol=2e-5)


@needs_consistent_rms
def test_ten_steps_equal_optax():
    """Optax averages its momentum and corrects the bias; without Nesterov that is a factor, which msign discards.

    With Nesterov it corrects the two terms of its look-ahead by different powers, so the first directions differ.
    """
    start = matrices()
    theirs = optax.contrib.muon(
        0.01, weight_decay=0.1, nesterov=False, consistent_rms=0.2
    )
    ours = muonjax.muon(0.01, nesterov=False, newton_schulz=JORDAN5)
    chex.assert_trees_all_close(
        trajectory(ours, start), trajectory(theirs, start), atol=2e-5
    )


def test_defaults():
    """Any other default is off by ten times as much: the momentum in bfloat16 by 7e-5, an RMS of 0.201 by 2e-4."""
    start = matrices()
    ours = trajectory(muonjax.muon(0.01), start)
    for name, weight in start.items():
        expected = oracles.muon_steps(
            weight,
            [matrices(step + 1)[name] for step in range(10)],
            rows=muonjax.polar_express(8, lower=1e-4),  # of small matrices
            learning_rate=0.01,
        )[-1]
        assert_allclose(ours[name], expected, atol=5e-6)
    large = {"kernel": jax.random.normal(jax.random.key(0), (96, 96))}
    balanced = muonjax.NewtonSchulz.balanced()
    chex.assert_trees_all_equal(
        trained(muonjax.muon(0.01), large, [large])[0],
        trained(muonjax.muon(0.01, newton_schulz=balanced), large, [large])[0],
    )


@pytest.mark.interop
def test_ten_steps_equal_torch():
    torch = pytest.importorskip(
        "torch", reason="torch.optim.Muon: pip install -e '.[interop]'"
    )
    start = matrices()
    weights = {k: torch.nn.Parameter(torch.tensor(v)) for k, v in start.items()}
    # PyTorch averages (lerp) its momentum: a factor again. It rounds to bfloat16 inside, hence the tolerance.
    theirs = torch.optim.Muon(
        list(weights.values()),
        lr=0.01,
        weight_decay=0.1,
        momentum=0.95,
        nesterov=True,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(10):
        for name, gradient in matrices(step + 1).items():
            weights[name].grad = torch.tensor(gradient)
        theirs.step()
    ours = trajectory(muonjax.muon(0.01, newton_schulz=JORDAN5), start)
    for name, weight in weights.items():
        assert_allclose(ours[name], weight.detach().numpy(), atol=0.03)


@pytest.mark.thorough
def test_adamw_and_not_nadamw_takes_the_rest():
    tree, _ = run(muonjax.muon(0.01, newton_schulz=SHORT), params())
    adamw = optax.adamw(
        0.01,
        b2=0.95,
        weight_decay=0.1,
        mask={"embed": True, "attention": False, "mlp": False},
    )
    expected, _ = run(adamw, params())
    assert_allclose(
        tree["embed"]["embedding"], expected["embed"]["embedding"], rtol=1e-5
    )
    assert_allclose(
        tree["attention"]["query"]["bias"],
        expected["attention"]["query"]["bias"],
        rtol=1e-5,
    )
    assert not np.allclose(tree["mlp"]["kernel"], expected["mlp"]["kernel"], atol=1e-3)


def test_a_given_adam_is_used_as_it_is():
    tree, _ = run(
        muonjax.muon(0.01, adam=optax.sgd(0.5), newton_schulz=SHORT), params(), steps=1
    )
    assert_allclose(
        tree["mlp"]["bias"], params()["mlp"]["bias"] - 0.5 * gradients(0)["mlp"]["bias"]
    )


@pytest.mark.thorough
def test_rms_none_is_the_width_rule():
    for rms, scale in ((None, 1.0), (0.2, 0.2 * 32**0.5)):
        tx = muonjax.muon(
            1.0, rms=rms, weight_decay=0.0, newton_schulz=NewtonSchulz.accurate()
        )
        tree = {"kernel": normal(32, 8)}
        updates, _ = tx.update({"kernel": normal(32, 8, seed=1)}, tx.init(tree), tree)
        assert_allclose(np.linalg.norm(updates["kernel"], 2), scale, rtol=1e-4)


@pytest.mark.thorough
def test_weight_decay_mask_covers_both_halves():
    mask = {"embed": False, "attention": False, "mlp": False}
    zero = jax.tree.map(jnp.zeros_like, params())
    for given, moves in ((mask, False), (None, True)):
        tx = muonjax.muon(0.1, weight_decay_mask=given, newton_schulz=SHORT)
        updates, _ = tx.update(zero, tx.init(params()), params())
        for leaf in (updates["embed"]["embedding"], updates["mlp"]["kernel"]):
            assert bool(jnp.any(leaf != 0)) is moves
        assert not np.any(updates["mlp"]["bias"])


def test_only_arrays_that_change_are_state():
    _, before = run(muonjax.muon(0.01, newton_schulz=SHORT), params(), steps=1)
    _, after = run(muonjax.muon(0.01, newton_schulz=SHORT), params(), steps=2)
    same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), before, after)
    assert not any(jax.tree.leaves(same))


@pytest.mark.parametrize("decay", [0.95, 0.99, 0.995])
def test_momentum_in_bfloat16_decays_as_it_should(decay):
    """bfloat16 rounds 0.99 to 0.98828 and 0.995 to 0.99609: the momentum would shrink to 0.85 or grow to 1.28."""
    tx = muonjax.trace(decay)
    gradients = np.random.default_rng(0).normal(size=(2000, 64)) + 0.5

    def final(dtype):
        def step(state, gradient):
            return tx.update({"w": gradient}, state)[1], None

        given = jnp.asarray(gradients, dtype)
        return (
            jax.lax.scan(step, tx.init({"w": given[0]}), given)[0]
            .trace["w"]
            .astype(jnp.float32)
        )

    found = jnp.linalg.norm(final(jnp.bfloat16))
    expected = jnp.linalg.norm(final(jnp.float32))
    assert abs(found / expected - 1) < 0.01


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, *map(thorough, [jnp.float32, jnp.float16])]
)
def test_parameters_keep_their_dtype(dtype):
    tree = params(dtype)
    tx = muonjax.muon(0.01, newton_schulz=SHORT)
    updates, _ = jax.jit(tx.update)(gradients(0, dtype), tx.init(tree), tree)
    assert all(u.dtype == dtype for u in jax.tree.leaves(updates))
    assert all(
        np.isfinite(np.asarray(u, np.float32)).all() for u in jax.tree.leaves(updates)
    )
    single, _ = jax.jit(tx.update)(gradients(0), tx.init(params()), params())
    error = np.linalg.norm(
        np.asarray(updates["mlp"]["kernel"], np.float32) - single["mlp"]["kernel"]
    )
    assert error < 0.05 * np.linalg.norm(single["mlp"]["kernel"])


def test_gradients_in_bfloat16_leave_the_updates_of_float32_weights_in_float32():
    """As Optax does, also where no weight decay widens them."""
    tree = params()
    tx = muonjax.muon(0.01, newton_schulz=SHORT, weight_decay=0.0)
    updates, _ = tx.update(gradients(0, jnp.bfloat16), tx.init(tree), tree)
    assert {u.dtype.name for u in jax.tree.leaves(updates)} == {"float32"}


def test_a_float16_matrix_leaves_the_update_of_a_float32_bias():
    """Its leaf's eps, 6e-5, would divide the update of a gradient of 1e-6 by 60."""
    wide = {"dense": {"kernel": jnp.eye(8), "bias": jnp.zeros(8)}}
    grads = jax.tree.map(lambda w: jnp.full_like(w, 1e-6), wide)
    narrow = {"dense": wide["dense"] | {"kernel": jnp.eye(8, dtype=jnp.float16)}}
    tx = muonjax.muon(0.01, newton_schulz=SHORT)
    updates, _ = tx.update(grads, tx.init(narrow), narrow)
    assert_allclose(updates["dense"]["bias"], -0.01 / (1 + 1e-2), rtol=1e-4)


# Where an optimizer lives.


def test_extra_arguments_pass_through():
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(extra)
        return updates, state

    adam = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )
    run(
        muonjax.muon(0.01, adam=adam, newton_schulz=SHORT),
        params(),
        steps=1,
        jit=False,
        value=1.0,
    )
    assert seen == [{"value": 1.0}]


def test_one_trace_over_many_steps():
    traces = []
    tx = muonjax.muon(optax.linear_schedule(0.1, 0.0, 10), newton_schulz=SHORT)

    @jax.jit
    def step(tree, state, grads):
        traces.append(1)
        updates, state = tx.update(grads, state, tree)
        return optax.apply_updates(tree, updates), state

    tree = params()
    state = tx.init(tree)
    for i in range(4):
        tree, state = step(tree, state, gradients(i))
    assert len(traces) == 1


@pytest.mark.parametrize("make", [
    muonjax.muon, muonjax.normuon, functools.partial(muonjax.muonh, adam_learning_rate=1e-3),
    muonjax.optax_contrib.muon,
])  # fmt: skip
def test_the_matrices_of_a_tree_are_found_once(make, monkeypatch):
    """By `init`, and not again by the members of the chain nor by `update`."""
    trees = []
    resolve = matrix_view.resolve_dimension_numbers

    def counted(numbers, tree, **call):
        trees.append(tree)
        return resolve(numbers, tree, **call)

    monkeypatch.setattr(matrix_view, "resolve_dimension_numbers", counted)
    tx = make(1e-2)
    jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params())
    assert len(trees) == 1


@pytest.mark.parametrize("jit", [False, True])
def test_a_tree_is_routed_once_and_its_chain_is_built_once(jit, monkeypatch):
    routed = []
    built = []

    def numbers(tree):
        routed.append(tree)
        return muonjax.dimension_numbers(tree)

    def orthogonalize(**settings):
        built.append(settings)
        return muonjax.orthogonalize(**settings)

    tx = muonjax.muonclip(
        0.01, muonjax.mha_site(), dimension_numbers=numbers, newton_schulz=SHORT
    )
    monkeypatch.setattr("muonjax._optimizers.muon.orthogonalize", orthogonalize)
    statistics = {"attention": jnp.asarray([400.0, 1.0])}
    expected, _ = run(tx, params(), steps=1, jit=jit, max_logits=statistics)
    assert (len(routed), len(built)) == (1, 1)
    # Another tree is another decision, and so is the first one after it.
    other = {"attention": params()["attention"]}
    tx.update(other, tx.init(other), other, max_logits=statistics)
    found, _ = run(tx, params(), steps=1, jit=jit, max_logits=statistics)
    assert (len(routed), len(built)) == (3, 3)
    jax.tree.map(assert_array_equal, found, expected)


@pytest.mark.parametrize(("make", "rates"), [
    (muonjax.muon, {"learning_rate": 0.01}), (muonjax.muonh, {"learning_rate": 0.01, "adam_learning_rate": 1e-3})
])  # fmt: skip
def test_inject_hyperparams(make, rates):
    tx = optax.inject_hyperparams(make)(newton_schulz=SHORT, **rates)
    tree, state = run(tx, params(), steps=2)
    plain, _ = run(make(newton_schulz=SHORT, **rates), params(), steps=2)
    assert_allclose(tree["mlp"]["kernel"], plain["mlp"]["kernel"], rtol=1e-5, atol=1e-6)
    state.hyperparams.update(dict.fromkeys(rates, jnp.asarray(0.0)))
    updates, _ = tx.update(gradients(5), state, tree)
    assert max(np.abs(u).max() for u in jax.tree.leaves(updates)) < 1e-6


@quick("muonclip")
@pytest.mark.parametrize("optimizer", [muonjax.muonclip, muonjax.adamclip])
def test_inject_hyperparams_into_the_clipped(optimizer):
    tree = {"attention": queries_and_keys(8, 2, 4)}
    logits = {"attention": jnp.array([400.0, 50.0])}
    injected = optax.inject_hyperparams(optimizer)
    tx, plain = (
        f(learning_rate=0.01, program=muonjax.mha_site()) for f in (injected, optimizer)
    )
    updates, state = tx.update(tree, tx.init(tree), tree, max_logits=logits)
    expected, _ = plain.update(tree, plain.init(tree), tree, max_logits=logits)
    chex.assert_trees_all_close(updates, expected, rtol=1e-5, atol=1e-6)
    state.hyperparams["threshold"] = jnp.asarray(1e3)
    _, state = tx.update(tree, state, tree, max_logits=logits)
    assert muonjax.metrics(state)["qk_clip/num_clipped"] == 0


def test_every_setting_of_the_parts_reaches_the_clipped():
    """By name: what `muon`, `optax.adamw` and `qk_clip` take, with the same defaults."""

    def settings(f):
        return {n: p.default for n, p in inspect.signature(f).parameters.items()}

    clip = {
        n: v
        for n, v in settings(muonjax.qk_clip).items()
        if n not in ("threshold", "sites")
    }
    own = {"learning_rate", "program", "threshold", "dimension_numbers", *clip}
    for clipped, part in (
        (muonjax.muonclip, muonjax.muon),
        (muonjax.adamclip, optax.adamw),
    ):
        found = settings(clipped)
        assert {n: found[n] for n in clip} == clip | {"every_k": None}
        given = {
            n: v
            for n, v in settings(part).items()
            if n not in ("learning_rate", "program")
        }
        assert {n: v for n, v in found.items() if n not in own} == given


def test_adamclip_is_adamw_then_the_clip():
    statistics = {"attention": jnp.asarray([400.0, 1.0])}
    tree, _ = run(
        muonjax.adamclip(0.01, [muonjax.mha_site()]),
        params(),
        steps=1,
        max_logits=statistics,
    )
    plain, _ = run(optax.adamw(0.01), params(), steps=1)
    query = np.asarray(plain["attention"]["query"]["kernel"])
    assert_allclose(
        tree["attention"]["query"]["kernel"][:, 0], query[:, 0] / 2, rtol=1e-5
    )
    assert_array_equal(tree["attention"]["query"]["kernel"][:, 1], query[:, 1])


def test_a_program_says_which_stacked_leaves_are_vectors_and_do_not_decay():
    """Gains and shifts of a scan's layers, under names that say nothing."""

    def loss(p, x):
        def layer(x, w):
            return x + jnp.tanh(x * w["g"] @ w["u"] + w["c"]) @ w["d"], None

        return jnp.mean((jax.lax.scan(layer, x, p["layers"])[0] @ p["out"]) ** 2)

    shapes = {"g": (3, 16), "u": (3, 16, 32), "c": (3, 32), "d": (3, 32, 16)}
    params = {
        "layers": {n: jnp.ones(s) for n, s in shapes.items()},
        "out": jnp.ones((16, 4)),
    }
    assert decayed(loss, params, jnp.ones((5, 16))) == {
        "layers": {"g": 0.0, "u": 0.5, "c": 0.0, "d": 0.5},
        "out": 0.5,
    }


def decayed(loss, params, x):
    """How far weight decay alone moves each leaf of ones."""
    tx = muonjax.muon(1.0, muonjax.inspect(loss, params, x), weight_decay=0.5)
    gradients = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(gradients, tx.init(params), params)
    return jax.tree.map(lambda u: float(jnp.mean(-u)), updates)


def test_biases_of_heads_and_experts_do_not_decay_and_positions_do():
    """A bias lies along columns of a layer alone, whatever its name is and however many axes it has."""

    def loss(p, x):
        x = x @ p["in"] + p["b"] + p["positions"]
        y = jnp.tanh(jnp.einsum("td,edf->tef", x, p["experts"]) + p["c"])
        return jnp.mean((x + jnp.einsum("tef,efd->td", y, p["out"])) ** 2)

    shapes = {"in": (8, 16), "b": (16,), "positions": (5, 16), "experts": (3, 16, 32)}
    shapes |= {"c": (3, 32), "out": (3, 32, 16)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    decay = decayed(loss, params, jnp.ones((5, 8)))
    assert decay == {name: 0.0 if name in "bc" else 0.5 for name in shapes}


def test_what_is_added_to_a_generated_kernel_is_no_bias():
    def loss(p, x):
        kernel = p["base"] + (x.mean(0) @ p["generator"]).reshape(8, 8)
        return jnp.mean((jnp.tanh(x @ kernel) @ p["out"]) ** 2)

    shapes = {"base": (8, 8), "generator": (8, 64), "out": (8, 2)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    assert set(decayed(loss, params, jnp.ones((5, 8))).values()) == {0.5}


def test_biases_of_products_of_one_query_and_of_gated_experts_do_not_decay():
    """A product sums over their columns, or over experts, and leaves columns alone."""

    def loss(p, x):
        q = (x[:, 0] @ p["in"]).reshape(2, 3, 4) + p["b"]
        y = jnp.einsum("bhs,bks->bhk", q, x[..., :4])
        gates = jax.nn.softmax(x[:, 0] @ p["router"])
        experts = jnp.einsum("td,edf->tef", x[:, 1], p["experts"]) + p["c"]
        y = jnp.concatenate(
            [y.reshape(2, -1), jnp.einsum("te,tef->tf", gates, experts)], 1
        )
        return jnp.mean((jnp.tanh(y) @ p["out"]) ** 2)

    shapes = {
        "in": (8, 12),
        "b": (3, 4),
        "router": (8, 3),
        "experts": (3, 8, 4),
        "c": (3, 4),
    }
    params = {
        name: jnp.ones(shape) for name, shape in (shapes | {"out": (19, 2)}).items()
    }
    decay = decayed(loss, params, jnp.ones((2, 5, 8)))
    assert [name for name in decay if decay[name] == 0] == ["b", "c"]
