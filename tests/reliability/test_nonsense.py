"""Every public function refuses nonsense for a setting, in its own name. Signatures say what the settings are.

A new function or argument needs no entry, but for a value in NEEDED where the function can't be called without it.
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
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import muonjax
from tests.test_public_api import public_names

PACKAGES = ("muonjax", "muonjax.linen", "muonjax.nnx", "muonjax.optax_contrib", "pallas_kernels")

NONSENSE = {
    "nan": math.nan, "inf": math.inf, "-1": -1, "1.5": 1.5, "True": True, "'no'": "no", "None": None, "1j": 1j,
    "np.array('0.1')": np.array("0.1"), "[1.0]": [1.0], "jnp.ones(2)": jnp.ones(2),
}  # fmt: skip

MESH = jax.make_mesh((1,), ("data",))
WEIGHT = jax.device_put(jnp.ones((8, 2, 4)), NamedSharding(MESH, PartitionSpec()))

# What a call needs beside the nonsense.
NEEDED = {
    "inner": optax.sgd(0.1), "tx": optax.sgd(0.1, 0.9), "learning_rate": 1e-3, "adam_learning_rate": 1e-3, "beta": 0.5,
    "decay": 0.9, "threshold": 10.0, "rank": 2, "num_steps": 3, "num_heads": 2, "head_dim": 4, "nope": 2,
    "features": 4, "in_features": 8, "out_features": 4, "kernel_size": (3,), "mesh": MESH,
    "param_specs": PartitionSpec(), "dtype": jnp.float32, "ns_coeffs": jnp.ones(3), "x": jnp.eye(4),
    "rngs": nnx.Rngs(0), "model": nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "path_rule": ".",
    "fun": jnp.sum, "loss_fn": jnp.sum,
    "params": {"attention": {name: {"kernel": WEIGHT} for name in ("query", "key")}},
    "query": jnp.ones((1, 3, 2, 4)), "key": jnp.ones((1, 3, 2, 4)), "lse": jnp.ones((1, 3, 2)),
    "w": jnp.eye(4), "w1a": jnp.eye(4), "w1b": jnp.eye(4), "w2a": jnp.eye(4), "w2b": jnp.eye(4),
    "a": jnp.eye(4), "b": jnp.eye(4), "c": jnp.eye(4), "state": (),
    "max_logits": {"attention": jnp.ones(2)}, "sites": muonjax.mha_site(), "site": muonjax.mha_site(),
    "rules": muonjax.SignalRule(muonjax.mha_site(), 10.0),
}  # fmt: skip


# Pattern of function.argument: which nonsense has a meaning there or is another's to refuse, and why.
ALLOWED = {
    "*.precision": ({*NONSENSE}, "JAX refuses it, in the words of jax.lax.Precision"),
    "*features": ({*NONSENSE}, "an argument of Flax's own layer"),
    "*mask": ({"True"}, "a prefix of the tree of parameters: all of them"),
    "*clip.every_k": ({"None"}, "1, of which optax.inject_hyperparams makes no array"),
    "*.scan_axis": ({"-1"}, "it counts from the end"),
    "value_and_grad.argnums": ({"-1"}, "it counts from the end"),
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
            checks = value in (muonjax.NewtonSchulz, muonjax.Distribution, muonjax.SignalRule)
            if checks or (callable(value) and (not inspect.isclass(value) or issubclass(value, nnx.Module))):
                yield f"optax_contrib.{name}" if package.endswith("contrib") else name, value


def parameters(function: Any) -> list[inspect.Parameter]:
    found = inspect.signature(
        function.__init__ if inspect.isclass(function) else function
    ).parameters.values()
    return [p for p in found if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def kinds_of(function: Any, parameter: inspect.Parameter) -> set[Any]:
    """The members of the union that a setting is annotated as; none for an array, a tree or a module."""
    annotation = parameter.annotation
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, vars(inspect.getmodule(inspect.unwrap(function))))
        except NameError:  # jaxtyping's, an array
            return set()
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = {*typing.get_args(annotation)} if is_union else {annotation}
    if Any in kinds and parameter.name.endswith("mask"):
        return {types.NoneType}
    is_tree = (
        Any in kinds
        or any(typing.get_origin(kind) is Iterable for kind in kinds)
        or kinds <= {jax.Array, types.NoneType}
    )
    is_module = any(inspect.isclass(kind) and issubclass(kind, (nnx.Module, nnx.Rngs)) for kind in kinds)
    return set() if is_tree or is_module else kinds


def is_meant(label: str, kinds: set[Any]) -> bool:
    """Whether the annotation alone says that this value has a meaning."""
    as_number = np.ndarray in kinds  # `jax.typing.ArrayLike`, which has bool and complex in it
    return {
        "True": bool in kinds and not as_number,
        "'no'": str in kinds and np.dtype not in kinds,
        "None": types.NoneType in kinds,
        "1.5": float in kinds,
    }.get(label, False)


def failures(name: str, function: Any, parameter: inspect.Parameter) -> Iterator[tuple[str, str]]:
    """Each value that is not refused in two lines that name call and argument, and what happens."""
    given = {
        p.name: NEEDED[p.name]
        for p in parameters(function)
        if p.name == "adam_learning_rate" or (p.default is p.empty and p.name in NEEDED)
    }
    if name.endswith("clip"):  # says first that it needs to know where attention is
        given |= {p.name: NEEDED["sites"] for p in parameters(function) if p.name in ("program", "sites")}
    kinds = kinds_of(function, parameter)
    for label, value in NONSENSE.items() if kinds else ():
        if not is_meant(label, kinds):
            try:
                function(**given | {parameter.name: value})
                yield label, "it is taken"
            except (TypeError, ValueError) as error:
                words = name.removeprefix("optax_contrib."), parameter.name
                named = all(re.search(rf"\b{word}\b", str(error)) for word in words)
                if not named or len(str(error).splitlines()) > 2:
                    yield label, str(error)
            except Exception as error:
                yield label, repr(error)


def taken(name: str, function: Any) -> dict[str, str]:
    """The nonsense that is not refused and is not in the table, and what happens."""
    return {
        f"{argument}={label}": why
        for parameter in parameters(function)
        for argument in [f"{name}.{parameter.name}"]
        for label, why in failures(name, function, parameter)
        if not any(
            label in ls and fnmatch.fnmatchcase(argument, pattern) for pattern, (ls, _) in ALLOWED.items()
        )
    }


@pytest.mark.parametrize(("name", "function"), [*functions()])
def test_nonsense_is_refused_by_name(name, function):
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
        with pytest.raises(ValueError, match=rf"^{make.__name__}\({argument}=.*must be"):
            run()


@pytest.mark.parametrize("dtype", ["bool", "complex64"])
def test_a_traced_number_is_real(dtype):
    def init(value):
        return muonjax.trace(value).init({"w": jnp.ones(2)})

    jax.eval_shape(init, jax.ShapeDtypeStruct((), "float32"))
    with pytest.raises(TypeError, match=r"trace\(decay=.* must be a number"):
        jax.eval_shape(init, jax.ShapeDtypeStruct((), dtype))
