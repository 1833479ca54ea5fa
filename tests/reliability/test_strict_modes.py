"""Each public function once under JAX's strict modes: no implicit promotion of ranks or of dtypes, and no NaN."""

import functools
import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import muonjax
import muonjax.linen
import muonjax.nnx
import pallas_kernels
from tests.test_public_api import public_names
from tests.tools.oracles import normal
from tests.tools.tiers import quick

MODES = {
    "rank": lambda: jax.numpy_rank_promotion("raise"),
    "dtype": lambda: jax.numpy_dtype_promotion("strict"),
    "nan": lambda: jax.debug_nans(True),
}

# What is not strict, by mode and case. Not strictly expected to fail, so that a fix needs no change here.
_OPTAX = "Optax's Adam raises a float to the power of an int32"
_OF_ADAM = ("Distribution", "adamclip", "monitor", "muon", "muonclip", "muonh", "normuon")
KNOWN = {
    **{("dtype", f"muonjax.{name}"): _OPTAX for name in _OF_ADAM},
    ("nan", "muonjax.monitor"): "NaN marks what was not measured",
}


def array(*shape, dtype="float32"):
    return normal(*shape, seed=sum(shape), dtype=dtype)


@functools.cache
def attention_parameters(dtype="float32"):
    kernels = {name: {"kernel": array(8, 2, 4, dtype=dtype)} for name in ("query", "key", "value")}
    kernels["out"] = {"kernel": array(2, 4, 8, dtype=dtype), "bias": array(8, dtype=dtype)}
    return {"attention": kernels, "norm": {"scale": array(8, dtype=dtype)}}


@functools.cache
def matrices(dtype="float32"):
    return {"up": array(8, 16, dtype=dtype), "down": array(16, 8, dtype=dtype)}


def attention_kernels():
    return {name: array(8, 2, 4) for name in "qkv"}


def attended(kernels, x):
    q, k, v = (jnp.einsum("btd,dhs->bths", x, kernels[name]) for name in "qkv")
    return jnp.mean(jax.nn.dot_product_attention(q, k, v, is_causal=True) ** 2)


MAXIMA = {"attention": np.float32([400.0, 1.0])}
SITE = muonjax.mha_site("attention")


def updated(tx, params, **extra):
    """The parameters after two updates, compiled, with gradients of the parameters' dtype."""

    @jax.jit
    def step(state, params):
        grads = jax.tree.map(lambda p: (p * 0.5).astype(p.dtype), params)
        updates, state = tx.update(grads, state, params, **extra)
        return state, optax.apply_updates(params, updates)

    state = tx.init(params)
    for _ in range(2):
        state, params = step(state, params)
    return params


def gradient(f, *arguments):
    """The gradient in every argument, compiled."""
    loss = lambda *a: jnp.sum(jnp.sin(f(*a)))  # noqa: E731
    return jax.jit(jax.grad(loss, argnums=tuple(range(len(arguments)))))(*arguments)


def linen_adapters(layer=None, x=None):
    """Through every function of a tree of parameters; returns the merged one."""
    layer = muonjax.linen.LoHaDense(4, rank=2) if layer is None else layer
    x = array(3, 8) if x is None else x
    params = layer.init(jax.random.key(0), x)["params"]
    jax.jit(jax.grad(lambda params: jnp.sum(layer.apply({"params": params}, x) ** 2)))(params)
    return muonjax.linen.merge(params)


class Model(nnx.Module):
    """A convolution and an attention."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(8, 8, (3,), rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)

    def __call__(self, x):
        return self.attention(self.conv(x))


def nnx_adapters():
    model = Model(nnx.Rngs(0))
    muonjax.nnx.add_loha(model, ".", rank=2, rngs=nnx.Rngs(1))
    adapters = nnx.DiffState(0, muonjax.nnx.LoHaParam)
    nnx.grad(lambda model: jnp.sum(model(array(1, 3, 8)) ** 2), argnums=adapters)(model)
    muonjax.nnx.merge(model)


FACTORS = (array(9, 3), array(3, 6), array(9, 3) + 1, array(3, 6) + 1)
SYMMETRIC = array(2, 3, 3) + array(2, 3, 3).mT


def of_msign(**settings):
    return lambda: (
        gradient(functools.partial(muonjax.msign, num_steps=8, **settings), array(2, 3, 5)),
        gradient(functools.partial(muonjax.msign, num_steps=8, **settings), array(2, 8, 3, dtype="bfloat16")),
    )


def of_transformation(make, params=attention_parameters):
    return lambda: [updated(make(), params(dtype)) for dtype in ("float32", "bfloat16")]


def of_clip(make, name="max_logits"):
    return lambda: [
        updated(make(), attention_parameters(dtype), **{name: MAXIMA}) for dtype in ("float32", "bfloat16")
    ]


def replicated(params):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return muonjax.Distribution(mesh, jax.tree.map(lambda _: jax.sharding.PartitionSpec(), params))


CASES = {
    "muonjax.Distribution": lambda: updated(
        muonjax.muon(1e-2, distribution=replicated(attention_parameters())), attention_parameters()
    ),
    "muonjax.adamclip": of_clip(lambda: muonjax.adamclip(1e-3, [SITE])),
    "muonjax.adapter_mask": lambda: muonjax.adapter_mask({"loha": {"hada_w1_a": array(2, 2)}}),
    "muonjax.apply_qk_clip": lambda: muonjax.apply_qk_clip(attention_parameters(), MAXIMA, [SITE], 100.0),
    "muonjax.cautious_weight_decay": of_transformation(lambda: muonjax.cautious_weight_decay(0.1)),
    "muonjax.hadamard_linear": lambda: (
        gradient(muonjax.hadamard_linear, array(4, 9), array(9, 6), *FACTORS),
        # a layer in half precision with factors in float32
        gradient(
            muonjax.hadamard_linear, array(4, 9, dtype="bfloat16"), array(9, 6, dtype="bfloat16"), *FACTORS
        ),
    ),
    "muonjax.hyperball": of_transformation(lambda: muonjax.hyperball(1e-2), matrices),
    "muonjax.cast_momentum": lambda: muonjax.cast_momentum(
        muonjax.trace(0.9, accumulator_dtype=jnp.int8).init(matrices()), jnp.float32
    ),
    "muonjax.offload": of_transformation(lambda: muonjax.offload(optax.sgd(0.1, momentum=0.9)), matrices),
    "muonjax.ema_nesterov": of_transformation(
        lambda: muonjax.ema_nesterov(optax.chain(muonjax.orthogonalize(), optax.scale(-0.1)), 0.5), matrices
    ),
    "muonjax.ema_nesterov_params": lambda: muonjax.ema_nesterov_params(
        muonjax.ema_nesterov(optax.sgd(0.1), 0.5).init(matrices()), matrices()
    ),
    "muonjax.inspect": lambda: muonjax.inspect(attended, attention_kernels(), array(1, 5, 8)).sites,
    "muonjax.match_rms": of_transformation(lambda: muonjax.match_rms(), matrices),
    "muonjax.max_logits": lambda: (
        jax.jit(functools.partial(muonjax.max_logits, is_causal=True))(array(1, 5, 2, 4), array(1, 5, 2, 4)),
        muonjax.max_logits(
            array(1, 5, 4, 4, dtype="bfloat16"), array(1, 5, 2, 4, dtype="bfloat16"), local_window_size=2
        ),
        muonjax.max_logits(array(1, 5, 2, 4), array(1, 5, 2, 4), mask=jnp.ones((1, 1, 5, 5), bool)),
    ),
    "muonjax.max_logits_bound": lambda: muonjax.max_logits_bound(array(1, 2, 5)),
    "muonjax.metrics": lambda: muonjax.metrics(muonjax.muonclip(1e-2, [SITE]).init(attention_parameters())),
    "muonjax.mcsgn": lambda: (
        gradient(muonjax.mcsgn, SYMMETRIC),
        gradient(muonjax.mcsgn, SYMMETRIC.astype(jnp.bfloat16)),
    ),
    "muonjax.monitor": of_transformation(lambda: muonjax.monitor(muonjax.muon(1e-2))),
    "muonjax.msign": lambda: (
        of_msign()(),
        of_msign(gradient="polar")(),
        of_msign(gradient="autodiff")(),
    ),
    "muonjax.muon": of_transformation(lambda: muonjax.muon(1e-2)),
    "muonjax.muonclip": of_clip(lambda: muonjax.muonclip(1e-2, [SITE])),
    "muonjax.muonh": of_transformation(lambda: muonjax.muonh(1e-2, adam_learning_rate=1e-3)),
    "muonjax.newton_schulz": lambda: [
        jax.jit(muonjax.newton_schulz)(array(2, m, 24, dtype=dtype))
        for m in (3, 12)
        for dtype in ("float32", "bfloat16", "float16")
    ],
    "muonjax.newton_schulz, complex": lambda: jax.jit(muonjax.newton_schulz)(
        array(2, 3, 24, dtype="complex64")
    ),
    "muonjax.newton_schulz, half": lambda: [
        jax.jit(muonjax.newton_schulz, static_argnums=1)(
            array(2, 16, 24), muonjax.NewtonSchulz(form=form, compute_dtype=dtype)
        )
        for form in ("standard", "gram")
        for dtype in ("bfloat16", "float16")
    ],
    "muonjax.normalize_neurons": of_transformation(lambda: muonjax.normalize_neurons(), matrices),
    "muonjax.normuon": of_transformation(lambda: muonjax.normuon(1e-2)),
    "muonjax.orthogonalize": of_transformation(lambda: muonjax.orthogonalize(), matrices),
    "muonjax.qk_clip": of_clip(lambda: muonjax.qk_clip(100.0, [SITE])),
    "muonjax.signal_clip": of_clip(
        lambda: muonjax.signal_clip(muonjax.SignalRule(SITE, 100.0)), name="signals"
    ),
    "muonjax.trace": of_transformation(lambda: muonjax.trace(0.9, accumulator_dtype=jnp.int8), matrices),
    "muonjax.value_and_grad": lambda: jax.jit(muonjax.value_and_grad(attended))(
        attention_kernels(), array(1, 5, 8)
    ),
    "muonjax.sylvester": lambda: gradient(muonjax.sylvester, jnp.eye(3), 2 * jnp.eye(2), array(4, 3, 2)),
    "muonjax.tabulate": lambda: muonjax.tabulate(attention_parameters()),
    "muonjax.linen.LoHaConv": lambda: linen_adapters(muonjax.linen.LoHaConv(4, (3,), rank=2), array(1, 5, 8)),
    "muonjax.linen.LoHaDense": linen_adapters,
    "muonjax.dimension_numbers": lambda: [
        muonjax.dimension_numbers(attention_parameters()),
        muonjax.dimension_numbers(Model(nnx.Rngs(0))),
    ],
    "muonjax.nnx.LoHaLinear": lambda: gradient(
        muonjax.nnx.LoHaLinear(8, 4, rank=2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), array(3, 8)
    ),
    "muonjax.nnx.add_loha": nnx_adapters,
    "pallas_kernels.symmetric_product": lambda: [
        pallas_kernels.symmetric_product(
            array(4, 2, 3, 5).astype(dtype), alpha=array(2), implementation=implementation
        )
        for dtype in ("float32", "bfloat16", "complex64")
        for implementation in ("reference", "blocked")
    ],
}

# Run by another case, or without arrays to promote.
ELSEWHERE = {
    "muonjax.SignalRule",
    "muonjax.fused_qkv_site",
    "muonjax.mha_site",
    "muonjax.mla_site",
    "muonjax.polar_express",
    "muonjax.state_shardings",
    "muonjax.linen.loha",
    "muonjax.linen.merge",
    "muonjax.nnx.LoHaConv",
    "muonjax.nnx.merge",
}


@quick(
    "muonjax.newton_schulz-rank",
    "muonjax.qk_clip-dtype",
    "muonjax.qk_clip-nan",
    "muonjax.normalize_neurons-rank",
    "pallas_kernels.symmetric_product-dtype",
    others="nightly",  # .ci/run has all quick tests under these modes
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_strict(name, mode, request):
    case = CASES[name]
    if (mode, name) in KNOWN:
        request.applymarker(pytest.mark.xfail(reason=KNOWN[mode, name], strict=False))
    with MODES[mode]():
        case()


def test_every_public_function_has_a_case():
    modules = map(importlib.import_module, ("muonjax", "muonjax.linen", "muonjax.nnx", "pallas_kernels"))
    functions = {
        f"{module.__name__}.{name}"
        for module in modules
        for name in public_names(module)
        if inspect.isfunction(getattr(module, name))
    }
    missing = functions - CASES.keys() - ELSEWHERE
    assert not missing, "add a case for each to CASES"
