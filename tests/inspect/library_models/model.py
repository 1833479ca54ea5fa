"""A model as a function of its parameters, and the same function with other names for them."""

import importlib
import pathlib
import pkgutil
import random
import string
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class Model(NamedTuple):
    """A loss, and what is right for each parameter and each attention (the notation is in `answers`).

    Attributes:
      loss: `loss(params, *inputs)`, a scalar.
      params: Shapes.
      inputs: Shapes.
      leaves: The right answers, by patterns of paths. The first that matches counts.
      attentions: One line for each attention, in the order of the program.
      per_head: The right answers with a matrix for each head, where they differ from `leaves`.
    """

    loss: Callable[..., Any]
    params: Any
    inputs: Sequence[Any]
    leaves: Mapping[str, str] = {}
    attentions: Sequence[str] = ()
    per_head: Mapping[str, str] = {}


class Entry(NamedTuple):
    """A model that is made when a test wants it."""

    makers: str  # the module with the function that makes it
    table: dict[str, Any]
    needs: str  # the library that has to be there

    def make(self) -> Model:
        table = dict(self.table)
        answers = {
            name: table.pop(name)
            for name in ("leaves", "attentions", "per_head")
            if name in table
        }
        maker = getattr(importlib.import_module(self.makers), table.pop("make"))
        loss, params, inputs = maker(**table)
        return Model(loss, params, inputs, **answers)


def read(path: pathlib.Path) -> dict[str, Entry]:
    """The models of a file of tables."""
    tables = tomllib.loads(path.read_text())
    needs = tables.pop("needs")
    makers = f"{__package__}.{tables.pop('makers')}"
    return {
        f"{needs}-{name}": Entry(makers, table, needs) for name, table in tables.items()
    }


MODELS: dict[str, Entry] = {}
for _path in sorted(pathlib.Path(__file__).parent.glob("*.toml")):
    MODELS |= read(_path)


def scrambled(made: Model, seed: int = 0) -> tuple[Model, dict[str, str]]:
    """The same function of one flat dictionary whose keys are random words, and the path behind each word."""
    paths, leaves, structure = flattened(made.params)
    draw = random.Random(seed)
    words = ["".join(draw.choices(string.ascii_lowercase, k=8)) for _ in paths]
    assert len(set(words)) == len(words)

    def loss(params, *inputs):
        return made.loss(structure.unflatten([params[word] for word in words]), *inputs)

    return made._replace(loss=loss, params=dict(zip(words, leaves, strict=True))), dict(
        zip(words, paths, strict=True)
    )


def flattened(tree) -> tuple[list[str], list[Any], Any]:
    """Paths, leaves and structure."""
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found
    ]
    return (
        [path.removesuffix("/value") for path in paths],
        [leaf for _, leaf in found],
        structure,
    )


def shapes_of(tree) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf, by its path."""
    paths, leaves, _ = flattened(tree)
    return {path: leaf.shape for path, leaf in zip(paths, leaves, strict=True)}


def shape(*sizes: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def tokens(*sizes: int) -> jax.ShapeDtypeStruct:
    return shape(*sizes, dtype=jnp.int32)


def cross_entropy(logits, labels):
    """Over the last axis, the mean of all others."""
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    ).mean()


def mean_square(predicted):
    return jnp.mean(predicted.astype(jnp.float32) ** 2)


def array(words: str) -> jax.ShapeDtypeStruct:
    """A dtype and sizes: `float32 2 8`."""
    dtype, *sizes = words.split()
    return shape(*map(int, sizes), dtype=dtype)


def arrays(named: Mapping[str, str]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: array(words) for name, words in named.items()}


def instance(value):
    """What a table means: one with a `class` is an object with those arguments, `@a.b` is that name, `@` is None."""
    if isinstance(value, list):
        return [instance(item) for item in value]
    if isinstance(value, str) and value.startswith("@"):
        return pkgutil.resolve_name(value[1:]) if value != "@" else None
    if not isinstance(value, dict):
        return value
    arguments = {
        word: instance(item)
        for word, item in value.items()
        if word not in ("class", "args")
    }
    for word in arguments:
        if word.endswith(("shape", "patch_size")) and isinstance(arguments[word], list):
            arguments[word] = tuple(arguments[word])
    if "class" not in value:
        return arguments
    return pkgutil.resolve_name(value["class"])(
        *instance(value.get("args", [])), **arguments
    )
