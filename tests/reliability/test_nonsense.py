"""Every public function refuses nonsense for each of its arguments, which its signature says.

For a setting the error has the names of call and argument; for an array, a tree or a module any error will do, but one
has to come, at the latest while the first step is traced. A new function or argument needs no entry, but for a value in
NEEDED where the function can't be called without it.
"""

import fnmatch
import importlib
import inspect
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import muonjax
import muonjax.linen
from tests.test_public_api import public_names

PACKAGES = (
    "muonjax",
    "muonjax.linen",
    "muonjax.nnx",
    "muonjax.optax_contrib",
    "pallas_kernels",
)

NONSENSE = {
    "nan": math.nan, "inf": math.inf, "-1": -1, "1.5": 1.5, "True": True, "'no'": "no", "None": None, "1j": 1j,
    "np.array('0.1')": np.array("0.1"), "[1.0]": [1.0], "jnp.ones(2)": jnp.ones(2),
}  # fmt: skip

MESH = jax.make_mesh((1,), ("data",))
WEIGHT = jax.device_put(jnp.ones((8, 2, 4)), NamedSharding(MESH, PartitionSpec()))
PARAMS = {"attention": {name: {"kernel": WEIGHT} for name in ("query", "key")}}
SITE = muonjax.mha_site()
QUERY = muonjax.Scale(path="query/kernel", rank=3, axes=(-2, -1))
ADAPTED = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
muonjax.nnx.add_loha(ADAPTED, ".", rank=1, rngs=nnx.Rngs(0))
DENSE = nn.Dense(4, dot_general_cls=muonjax.linen.loha(2))
SIGNAL = muonjax.Site(path="attention", scales=(QUERY,))


def attention(params: Any) -> jax.Array:
    q, k = (
        jnp.ones((1, 3, 8)) @ params["attention"][n]["kernel"].reshape(8, 8)
        for n in ("query", "key")
    )
    heads = q.reshape(1, 3, 2, 4), k.reshape(1, 3, 2, 4), jnp.ones((1, 3, 2, 4))
    return jnp.mean(jax.nn.dot_product_attention(*heads) ** 2)


# What a call needs besides the nonsense.
NEEDED = {
    "inner": optax.sgd(0.1), "tx": optax.sgd(0.1, 0.9), "learning_rate": 1e-3, "adam_learning_rate": 1e-3, "beta": 0.5,
    "decay": 0.9, "threshold": 10.0, "rank": 2, "num_steps": 3, "num_heads": 2, "head_dim": 4, "nope": 2,
    "mesh": MESH,
    "param_specs": PartitionSpec(), "dtype": jnp.float32, "ns_coeffs": jnp.ones(3), "x": jnp.eye(4),
    "rngs": nnx.Rngs(0), "model": nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0))), "path_rule": ".",
    "fun": attention, "params": PARAMS,
    "query": jnp.ones((1, 3, 2, 4)), "key": jnp.ones((1, 3, 2, 4)), "lse": jnp.ones((1, 3, 2)),
    "w": jnp.eye(4), "w1a": jnp.eye(4), "w1b": jnp.eye(4), "w2a": jnp.eye(4), "w2b": jnp.eye(4),
    "state": muonjax.trace(0.9).init(PARAMS),
    "max_logits": {"attention": jnp.ones(2)}, "sites": SITE, "site": SITE,
    # Which a signature leaves out, or for one function alone.
    "muonclip.program": SITE, "adamclip.program": SITE, "qk_clip.sites": SITE, "signal_clip.sites": SIGNAL,
    "muonh.adam_learning_rate": 1e-3, "Site.path": "attention", "Site.scales": (QUERY,), "Scale.path": "kernel",
    "ema_nesterov_params.state": muonjax.ema_nesterov(optax.sgd(0.1), 0.5).init(PARAMS),
    "merge.model": ADAPTED,
    "merge.params": DENSE.init(jax.random.key(0), jnp.ones((1, 4)))["params"],
}  # fmt: skip


# Pattern of function.argument: which nonsense has a meaning there or is another's to refuse, and why.
ALLOWED = {
    "*mask": ({"True"}, "a prefix of the tree of parameters: all of them"),
    "*clip.every_k": ({"None"}, "1, of which optax.inject_hyperparams makes no array"),
    "*.scan_axis": ({"-1"}, "it counts from the end"),
    **dict.fromkeys(
        [f"adamclip.{name}" for name in ("b1", "b2", "eps", "eps_root", "weight_decay", "nesterov")],
        ({*NONSENSE}, "a setting of optax.adamw, which Optax does not check"),
    ),
    "Scale.axes": ({"-1"}, "it counts from the end"),
    "Scale.power": ({"-1", "1.5"}, "a power of any size"),
    "value_and_grad.argnums": ({"-1"}, "it counts from the end"),
    "value_and_grad.fun": ({*NONSENSE}, "Python says that it is no function, where it is called"),
    "loha.param_dtype": ({*NONSENSE}, "an argument of Flax's own layer"),
    "*.params": ({*NONSENSE}, "one leaf is a tree"),
    "metrics.state": ({*NONSENSE}, "there is nothing in it"),
    "*.param_specs": ({"None"}, "a prefix: nothing is cut"),
    "hadamard_linear.scale": ({"-1", "1.5"}, "a factor of any size"),
    "optax_contrib.muon.ns_steps": ({"1.5"}, "JAX's loop refuses it, where there is a matrix"),
    "max_logits.scale": ({"-1"}, "a factor of any sign"),
    "symmetric_product.alpha": ({"nan", "inf", "-1", "jnp.ones(2)"}, "a factor of any size, one for each matrix",),
    "symmetric_product.beta": ({"nan", "inf", "-1", "jnp.ones(2)"}, "a factor of any size, one for each matrix",),
}  # fmt: skip


def functions() -> Iterator[tuple[str, Any]]:
    """Public functions, and the classes whose constructor checks settings, under the name that errors have."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in sorted(public_names(module)):
            value = getattr(module, name)
            checks = value in (
                muonjax.NewtonSchulz,
                muonjax.Distribution,
                muonjax.Site,
                muonjax.Scale,
            )
            if checks or (
                callable(value)
                and (not inspect.isclass(value) or issubclass(value, nnx.Module))
            ):
                yield (
                    f"optax_contrib.{name}" if package.endswith("contrib") else name,
                    value,
                )


def parameters(function: Any) -> list[inspect.Parameter]:
    found = inspect.signature(
        function.__init__ if inspect.isclass(function) else function
    ).parameters.values()
    return [
        p
        for p in found
        if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def kinds_of(function: Any, parameter: inspect.Parameter) -> tuple[set[Any], bool]:
    """The members of the union that it is annotated as, and whether it is a setting, no array, tree or module."""
    annotation = parameter.annotation
    if isinstance(annotation, str):
        try:
            annotation = eval(
                annotation, vars(inspect.getmodule(inspect.unwrap(function)))
            )
        except NameError:  # jaxtyping's, an array
            return ({types.NoneType} if annotation.endswith("| None") else set()), False
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = {*typing.get_args(annotation)} if is_union else {annotation}
    if Any in kinds and parameter.name.endswith("mask"):
        return {types.NoneType}, True
    is_tree = (
        Any in kinds
        or any(typing.get_origin(kind) is Iterable for kind in kinds)
        or kinds <= {jax.Array, types.NoneType}
    )
    is_module = any(
        inspect.isclass(kind) and issubclass(kind, (nnx.Module, nnx.Rngs))
        for kind in kinds
    )
    return (kinds & {types.NoneType}, False) if is_tree or is_module else (kinds, True)


def is_meant(label: str, kinds: set[Any]) -> bool:
    """Whether the annotation alone says that this value has a meaning."""
    as_number = (
        np.ndarray in kinds
    )  # `jax.typing.ArrayLike`, which has bool and complex in it
    return {
        "True": bool in kinds and not as_number,
        "'no'": str in kinds and np.dtype not in kinds,
        "None": types.NoneType in kinds,
        "1.5": float in kinds,
    }.get(label, False)


def call(name: str, function: Any, /, **nonsense: Any) -> None:
    """Call it with what it needs, and trace the first step of the optimizer or function that it returns."""
    given = {
        p.name: NEEDED.get(f"{name}.{p.name}", NEEDED.get(p.name))
        for p in parameters(function)
        if f"{name}.{p.name}" in NEEDED or (p.default is p.empty and p.name in NEEDED)
    }
    made = function(**given | nonsense)
    if isinstance(made, optax.GradientTransformation):
        tx = optax.with_extra_args_support(made)
        more = {"max_logits": NEEDED["max_logits"]}
        jax.eval_shape(
            lambda p: tx.update(p, tx.init(p), p, signals=more["max_logits"], **more),
            PARAMS,
        )
    elif isinstance(made, types.FunctionType):
        jax.eval_shape(made, PARAMS)


def failures(
    name: str, function: Any, parameter: inspect.Parameter
) -> Iterator[tuple[str, str]]:
    """Each value that is not refused, for a setting in two lines that name call and argument, and what happens."""
    kinds, is_setting = kinds_of(function, parameter)
    for label, value in NONSENSE.items():
        if not is_meant(label, kinds):
            try:
                call(name, function, **{parameter.name: value})
                yield label, "it is taken"
            except Exception as error:
                words = name.removeprefix("optax_contrib."), parameter.name
                named = all(re.search(rf"\b{word}\b", str(error)) for word in words)
                refused = isinstance(error, (TypeError, ValueError)) and named
                if is_setting and not (refused and len(str(error).splitlines()) <= 2):
                    yield label, repr(error)


def taken(name: str, function: Any) -> dict[str, str]:
    """The nonsense that is not refused and is not in the table, and what happens."""
    return {
        f"{argument}={label}": why
        for parameter in parameters(function)
        for argument in [f"{name}.{parameter.name}"]
        for label, why in failures(name, function, parameter)
        if not any(
            label in ls and fnmatch.fnmatchcase(argument, pattern)
            for pattern, (ls, _) in ALLOWED.items()
        )
    }


@pytest.mark.filterwarnings("ignore:.*none of the parameters is a matrix")
@pytest.mark.parametrize(("name", "function"), [*functions()])
def test_nonsense_is_refused_by_name(name, function):
    call(name, function)
    found = taken(name, function)
    assert not found


@pytest.mark.parametrize("kind", [float, np.float32, jnp.float32, np.array])
@pytest.mark.parametrize(
    ("make", "argument", "inside", "outside"),
    [
        (muonjax.trace, "decay", 0, 1),
        (muonjax.normalize_neurons, "eps", 1, 0),
        (muonjax.hyperball, "learning_rate", 0, -1),
    ],
)
def test_ends_of_ranges(make, argument, inside, outside, kind):
    """Numbers of every kind, also where they are known while another function is traced."""
    make(**{argument: kind(inside)})
    out = kind(outside)
    for run in (
        lambda: make(**{argument: out}),
        lambda: jax.make_jaxpr(lambda: make(**{argument: out}).init({}))(),
    ):
        with pytest.raises(
            ValueError, match=rf"^{make.__name__}\({argument}=.*must be"
        ):
            run()


@pytest.mark.parametrize("dtype", ["bool", "complex64"])
def test_a_traced_number_is_real(dtype):
    def init(value):
        return muonjax.trace(value).init({"w": jnp.ones(2)})

    jax.eval_shape(init, jax.ShapeDtypeStruct((), "float32"))
    with pytest.raises(TypeError, match=r"trace\(decay=.* must be a number"):
        jax.eval_shape(init, jax.ShapeDtypeStruct((), dtype))
