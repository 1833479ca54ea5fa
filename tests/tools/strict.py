"""Run every function of the packages under JAX's strict modes, and the tests' own code without them.

`pytest --jax-strict`: inside of muonjax and pallas_kernels, and of what they call, no array is promoted to another rank
or dtype by itself. Tests and their oracles may promote, and so may the functions of other libraries in `LENIENT`. Where
a test makes another library promote, it has the marker `promotes` and runs without the modes.
"""

import ast
import contextlib
import contextvars
import functools
import importlib

import jax

from tests.tools.sources import Decorator

# Of other libraries, what promotes by itself: the module, the name there, and what it does.
LENIENT = (("optax.tree", "bias_correction", "raises a float to the power of an int32"),)


_on = contextvars.ContextVar("on", default=True)


@contextlib.contextmanager
def switched(on: bool):
    """Whether the modes are set in what runs inside."""
    token = _on.set(on)
    yield
    _on.reset(token)


def strict(function):
    """`function`, under both modes while it runs or is traced."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        is_set = jax.numpy_rank_promotion.value == "raise" and jax.numpy_dtype_promotion.value == "strict"
        if is_set or not _on.get():  # setting them again takes longer than most functions
            return function(*args, **kwargs)
        with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
            return function(*args, **kwargs)

    call.__kwdefaults__ = function.__kwdefaults__  # for tests that set a default
    return call


def lenient(function):
    """`function`, without the modes."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return call


def computes(function: ast.FunctionDef) -> bool:
    """Not a generator, which runs under the modes of whoever iterates over it, and no special method but a call."""
    special = function.name.startswith("__") and function.name != "__call__"
    return not special and not any(
        isinstance(node, (ast.Yield, ast.YieldFrom)) for node in own_nodes(function)
    )


def own_nodes(function: ast.FunctionDef):
    """All nodes of its body but those of functions in it."""
    pending = list(function.body)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            pending += ast.iter_child_nodes(node)


DECORATORS = [Decorator("strict", "strict", computes)]


def spare_other_libraries():
    for module, name, _ in LENIENT:
        library = importlib.import_module(module)
        setattr(library, name, lenient(getattr(library, name)))
