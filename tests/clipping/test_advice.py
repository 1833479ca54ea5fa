"""The code that an error message advises, taken from the message and run."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import muonjax
from tests.tools.oracles import normal


def calls(message):
    """Every `muonjax.f(...)` or `optax.f(...)` with its arguments in a message."""
    found = []
    for match in re.finditer(r"(muonjax|optax)\.[\w.]+\(", message):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(message[end], 0)
            end += 1
        found.append(message[match.start() : end])
    return found


def filled(code, **known):
    """The code with values for `name=...`: what only the caller knows."""
    for name, value in known.items():
        code = code.replace(f"{name}=...", f"{name}={value!r}")
    return code


def tree(**leaves):
    """Parameters of a module `block_0/a` and of one in `block_1`, from names that end in the leaf's."""
    module = {}
    for name, shape in leaves.items():
        child, leaf = name.split("__")
        module.setdefault(child, {})[leaf] = jnp.ones(shape)
    return {"block_0": {"a": module}, "block_1": {"a": module}}


def projections(query, key, output=None, names=("query", "key", "out"), leaf="kernel"):
    shapes = {f"{n}__{leaf}": s for n, s in zip(names, (query, key, output), strict=True) if s is not None}
    return tree(**shapes)


DENSE = ("q_proj", "k_proj", "o_proj")
# Parameters that `sites_from` refuses, whose number of heads is all that is missing; and the statistic of a module.
MERGED = {
    "heads in a merged axis": (projections((64, 64), (64, 64), (64, 64), DENSE), (4,)),
    "stored (out, in)": (
        projections((64, 64), (16, 64), (64, 64), DENSE, "weight") | {"up": {"weight": jnp.ones((256, 64))}},
        (4,),
    ),
}


@pytest.mark.parametrize("name", MERGED)
def test_the_number_of_heads_that_is_asked_for(name):
    params, shape = MERGED[name]
    with pytest.raises(ValueError, match="give num_heads") as error:
        muonjax.adamclip(1e-3).init(params)
    code = next(code for code in calls(str(error.value)) if "sites_from" in code)
    sites = eval(filled(code, num_heads=4), {"muonjax": muonjax, "params": params})
    tx = muonjax.adamclip(0.0, sites)
    state = tx.init(params)
    assert {path: m.shape for path, m in state[-1].maxima.items()} == {"block_0/a": shape, "block_1/a": shape}
    statistics = {path: jnp.full(m.shape, 400.0) for path, m in state[-1].maxima.items()}
    _, state = jax.jit(tx.update)(jax.tree.map(jnp.zeros_like, params), state, params, max_logits=statistics)
    assert int(state[-1].num_clipped) == 2 * statistics["block_0/a"].size


class Latent(nn.Module):
    """Queries and keys from latents, as in DeepSeek, without positions."""

    @nn.compact
    def __call__(self, x):
        q = nn.DenseGeneral((4, 8), use_bias=False, name="wq_b")(x)
        kv = nn.DenseGeneral((4, 12), use_bias=False, name="wkv_b")(nn.Dense(6, name="wkv_a")(x))
        return nn.dot_product_attention(q, kv[..., :8], kv[..., 8:])


class Pairs(nn.Module):
    """Keys and values in one kernel, as in Gemma's library."""

    @nn.compact
    def __call__(self, x):
        q = jnp.einsum("btd,hdk->bthk", x, self.param("q_einsum", nn.initializers.normal(), (4, 8, 8)))
        w = self.param("kv_einsum", nn.initializers.normal(), (2, 2, 8, 8))
        k, v = jnp.einsum("btd,chdk->cbthk", x, w)
        return jax.nn.dot_product_attention(q, k, v)


class Stack(nn.Module):
    """As many layers as everything else is long."""

    @nn.compact
    def __call__(self, x):
        w = [self.param(name, nn.initializers.normal(), (8, 8, 8, 8)) for name in ("query", "key")]
        for i in range(8):
            q, k = (jnp.einsum("btd,dhk->bthk", x, a[i]) for a in w)
            x = jax.nn.dot_product_attention(q, k, jnp.stack([x] * 8, 2)).mean(2)
        return x


@pytest.mark.parametrize("model", [Latent(), Pairs(), Stack()])
def test_the_program_that_is_advised(model):
    """What names don't tell is one paste away."""
    batch = jnp.ones((1, 3, 8))
    params = {"a": jax.jit(model.init)(jax.random.key(0), batch)["params"]}
    with pytest.raises(ValueError, match=r"muonjax\.inspect") as error:
        muonjax.qk_clip(100.0).init(params)
    inspect, muonclip = calls(str(error.value))
    names = {"muonjax": muonjax, "params": params, "batch": batch, "learning_rate": 1e-3}
    names["loss_fn"] = lambda params, x: (model.apply({"params": params["a"]}, x) ** 2).sum()
    names["program"] = eval(inspect, names)
    (maxima,) = eval(muonclip, names).init(params)[-1].maxima.values()
    assert maxima.shape == ((8, 8) if isinstance(model, Stack) else (4,))


ATTENTION = {"a": {name: {"kernel": jnp.ones((8, 2, 4))} for name in ("query", "key")}}
DENSE_LAYER = {"dense": {"kernel": jnp.ones((8, 16)), "bias": jnp.zeros(16)}}


@pytest.mark.parametrize("make", [muonjax.muonclip, muonjax.adamclip, muonjax.qk_clip])
def test_every_k_in_inject_hyperparams(make):
    with pytest.raises(TypeError, match=r"every_k=.* must be a Python int") as error:
        optax.inject_hyperparams(make)(1.0, every_k=2).init(ATTENTION)
    (code,) = calls(str(error.value))
    tx = eval(code.replace("...", "make"), {"optax": optax, "make": make})(1.0, every_k=2)
    assert tx.init(ATTENTION)


def test_a_threshold_in_the_place_of_sites():
    with pytest.raises(TypeError, match=r"sites=100.0 must be a Site") as error:
        muonjax.muonclip(1e-3, 100.0)
    (setting,) = re.findall(r"threshold=[\d.]+\d", str(error.value))
    assert eval(f"muonjax.muonclip(1e-3, {setting})", {"muonjax": muonjax}).init(ATTENTION)
    site, program = calls(str(error.value))
    assert muonjax.muonclip(1e-3, eval(site)).init(ATTENTION)
    assert program == "muonjax.inspect(loss_fn, params, batch)"


def test_a_model_without_attention():
    with pytest.raises(
        ValueError, match=r"no attention that it knows.* take muonjax.muon or optax.adamw"
    ) as error:
        muonjax.muonclip(1e-3).init(DENSE_LAYER)
    for name in re.findall(r"(muonjax\.muon|optax\.adamw)\b", str(error.value)):
        assert eval(name, {"muonjax": muonjax, "optax": optax})(1e-3).init(DENSE_LAYER)


def test_settings_are_checked_when_the_optimizer_is_made():
    with pytest.raises(TypeError, match="must be a NewtonSchulz"):
        muonjax.muon(1e-3, newton_schulz="fast")
    mesh = jax.make_mesh((1,), ("data",))
    with pytest.raises(TypeError, match="must be a Distribution") as error:
        muonjax.muonclip(1e-3, distribution=mesh)
    (code,) = calls(str(error.value))
    names = {"muonjax": muonjax, "mesh": mesh, "specs": jax.sharding.PartitionSpec()}
    assert muonjax.muonclip(1e-3, distribution=eval(code, names)).init(ATTENTION)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)

    def __call__(self, x):
        return self.attention(x)


X = normal(2, 5, 8)


@pytest.mark.thorough
def test_nnx_with_its_own_value_and_grad():
    model, tx = Model(nnx.Rngs(0)), muonjax.muonclip(1e-3)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss_fn(model):
        return (model(X) ** 2).mean()

    (_, stats), grads = nnx.jit(muonjax.value_and_grad(loss_fn))(model)
    optimizer.update(model, grads, max_logits=stats)  # read from the program
    _, sown = nnx.capture(model, nnx.Intermediate)(X)
    with pytest.raises(ValueError, match=r"max_logits has no arrays. .*muonjax.value_and_grad") as empty:
        optimizer.update(model, grads, max_logits=sown)
    with pytest.raises(ValueError, match=r"needs this step's statistics.*muonjax.value_and_grad") as none:
        optimizer.update(model, grads)
    for error in (empty, none):
        message, names = str(error.value), {"muonjax": muonjax, "model": model, "loss_fn": loss_fn}
        (value_and_grad,) = [code for code in calls(message) if "nnx" in code]
        ((_, max_logits), grads) = eval(value_and_grad, names)(model)
        (update,) = re.findall(r"optimizer\.update\(.*?\)", message)
        eval(update, {"optimizer": optimizer, "model": model, "grads": grads, "max_logits": max_logits})


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.MultiHeadDotProductAttention(2, name="attention")(x), None


@pytest.mark.parametrize("forgotten", ["mutable", "watch", "variable_axes"])
def test_linen_without(forgotten):
    """What is advised is what was forgotten, under `nn.scan` its `variable_axes` too."""

    def model(axes):
        return nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=2)()

    params = model({"params": 0}).init(jax.random.key(0), X)["params"]
    tx = muonjax.muonclip(1e-3)
    sown = {}
    if forgotten == "watch":
        _, sown = model({"params": 0, "intermediates": 0}).apply(
            {"params": params}, X, mutable=["intermediates"]
        )
    elif forgotten == "variable_axes":
        with muonjax.linen.watch():
            _, sown = model({"params": 0}).apply({"params": params}, X, mutable=["intermediates"])
    with pytest.raises(ValueError, match="max_logits has no arrays") as error:
        jax.jit(tx.update)(params, tx.init(params), params, max_logits=sown)
    message = str(error.value)
    (axes,) = re.findall(r"nn\.scan\(variable_axes=(\{.*?\})\)", message)
    (apply,) = re.findall(r"model\.apply\(.*?\)", message)
    (context,) = re.findall(r"`with (.*?):`", message)
    names = {"muonjax": muonjax, "model": model(eval(axes))}
    with eval(context, names):
        _, sown = eval(apply.replace("...", "{'params': params}, X"), names | {"params": params, "X": X})
    jax.jit(tx.update)(params, tx.init(params), params, max_logits=sown)
    assert muonjax.linen.TrainState.__name__ in message


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (5.0, r"'' \[\]"),
        ({"a": {"query": jnp.ones((2, 3))}}, r"'a/query' \[2, 3\]"),
        ({"a": None}, "no arrays"),
    ],
)
def test_what_was_passed_is_shown(given, shown):
    tx = muonjax.qk_clip(100.0)
    with pytest.raises(ValueError, match=rf"max_logits has {shown}\."):
        tx.update(ATTENTION, tx.init(ATTENTION), ATTENTION, max_logits=given)
    with pytest.raises(TypeError, match="max_logits of 'a' is 'x', no array"):
        tx.update(ATTENTION, tx.init(ATTENTION), ATTENTION, max_logits={"a": "x"})


OPTIMIZERS = [muonjax.muon, muonjax.normuon, muonjax.muonclip, muonjax.adamclip, muonjax.qk_clip]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_states(make):
    tx, statistics = make(1e-3), {"a": jnp.ones(2)}
    more = {"max_logits": statistics} if "clip" in make.__name__ else {}
    state = tx.init(ATTENTION)
    with pytest.raises(ValueError, match=r"state and parameters are exchanged; call tx\.update") as error:
        tx.update(ATTENTION, ATTENTION, state, **more)
    (code,) = re.findall(r"tx\.update\((.*?)\)", str(error.value))
    names = {"grads": ATTENTION, "state": state, "params": ATTENTION}
    jax.jit(tx.update)(*eval(code, names), **more)
    with pytest.raises(
        ValueError, match=r"gradients and state are exchanged; call tx\.update\(grads, state, params"
    ):
        tx.update(state, ATTENTION, ATTENTION, **more)
    if make is not muonjax.qk_clip:
        with pytest.raises(TypeError, match=r"takes no fourth positional argument.*max_logits="):
            tx.update(ATTENTION, state, ATTENTION, statistics)
    others = (
        optax.adamw(1e-3), optax.sgd(0.1, 0.9), optax.chain(*[optax.scale(1.0)] * 3), muonjax.muonclip(1e-3),
        muonjax.adamclip(1e-3), optax.chain(optax.scale(1.0), muonjax.qk_clip(1.0)),
    )  # fmt: skip
    for other in others:
        theirs = other.init(ATTENTION)
        if jax.tree.structure(theirs) == jax.tree.structure(state):
            continue
        with pytest.raises(ValueError, match=f"{make.__name__}: this is the state of another optimizer"):
            tx.update(ATTENTION, theirs, ATTENTION, **more)


@pytest.mark.thorough
def test_equinox_modules_in_update():
    """What has no gradient and is no array of floats, as AdamW takes it."""
    eqx = pytest.importorskip("equinox")

    class Patches(eqx.Module):
        linear: eqx.nn.Linear
        index: jax.Array
        patch_size: int
        function: object

        def __call__(self, x):
            return self.function(self.linear(x))

    model = Patches(eqx.nn.Linear(8, 16, key=jax.random.key(0)), jnp.arange(3), 4, jax.nn.relu)
    grads = eqx.filter_grad(lambda m: (m(jnp.ones(8)) ** 2).sum())(model)
    arrays = eqx.filter(model, eqx.is_inexact_array)
    for tx in (muonjax.muon(1e-3), muonjax.normuon(1e-3), muonjax.muonh(1e-2, adam_learning_rate=1e-3)):
        state = tx.init(arrays)
        whole, alone = (tx.update(grads, state, params)[0] for params in (model, arrays))
        assert eqx.tree_equal(whole, alone)
        assert eqx.apply_updates(model, whole).patch_size == 4
        with pytest.raises(ValueError, match="linear/bias' is a parameter without a gradient"):
            tx.update(eqx.tree_at(lambda m: m.linear.bias, grads, None), state, model)


@pytest.mark.parametrize("make", [muonjax.muon, muonjax.muonclip])
def test_integers_are_left_as_they_are(make):
    """AdamW's weight decay counted 100 down to 99 at the first step."""
    params = ATTENTION | {"count": jnp.array(100), "w": jnp.ones(3)}
    tx = make(1e-2)
    for gradient in (jnp.array(0), jnp.array(0.0), jnp.zeros((), jax.dtypes.float0)):
        grads = jax.tree.map(jnp.ones_like, params) | {"count": gradient}
        more = {"max_logits": {"a": jnp.ones(2)}} if make is muonjax.muonclip else {}
        updates, state = tx.update(grads, tx.init(params), params, **more)
        assert updates["count"].dtype == params["count"].dtype
        assert optax.apply_updates(params, updates)["count"] == 100
        assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
        assert updates["w"].dtype == jnp.float32


@pytest.mark.nan("the monitor starts from it")
def test_metrics_inside_of_jit():
    tx = optax.chain(muonjax.muonclip(1e-3), muonjax.monitor(optax.sgd(0.1), groups=lambda path: "all"))
    state = tx.init(ATTENTION)

    def step(state):
        statistics = {"a": jnp.array([400.0, 50.0])}
        _, state = tx.update(ATTENTION, state, ATTENTION, max_logits=statistics)
        return state, muonjax.metrics(state)

    state, inside = jax.jit(step)(state)
    assert {k: float(v) for k, v in inside.items()} == muonjax.metrics(state)
    assert all(v.dtype == jnp.float32 and v.shape == () for v in inside.values())
    assert inside["qk_clip/smallest_factor"] == 0.25


def test_an_attention_function_without_its_parentheses():
    with pytest.raises(TypeError, match="with parentheses") as error:
        nn.MultiHeadDotProductAttention(2, attention_fn=muonjax.linen.attention_fn).init(jax.random.key(0), X)
    (code,) = calls(str(error.value))
    names = {"muonjax": muonjax}
    nn.MultiHeadDotProductAttention(2, attention_fn=eval(code, names)).init(jax.random.key(0), X)


def test_key_heads_that_are_not_given():
    params = {"a": {"q": {"kernel": jnp.ones((8, 32))}, "k": {"kernel": jnp.ones((8, 16))}}}
    site = {"query": "q", "key": "k", "layout": "i (h d)", "num_heads": 4}
    with pytest.raises(ValueError, match="num_kv_heads") as error:
        muonjax.qk_clip(1.0, muonjax.mha_site(**site)).init(params)
    (count,) = re.findall(r"give num_kv_heads=(\d+)", str(error.value))
    assert muonjax.qk_clip(1.0, muonjax.mha_site(**site, num_kv_heads=int(count))).init(params)
