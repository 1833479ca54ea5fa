"""A model as a function of its parameters, and the same function with other names for them."""

import random
import string
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
    leaves: Mapping[str, str]
    attentions: Sequence[str] = ()
    per_head: Mapping[str, str] = {}


class Entry(NamedTuple):
    """A model that is made when a test wants it."""

    make: Callable[[], Model]
    needs: str  # the library that has to be there


MODELS: dict[str, Entry] = {}


def model(needs: str) -> Callable[[Callable[[], Model]], Callable[[], Model]]:
    """Adds a function that makes a `Model` to `MODELS`."""

    def register(make: Callable[[], Model]) -> Callable[[], Model]:
        name = f"{needs}-{make.__name__}"
        assert name not in MODELS
        MODELS[name] = Entry(make, needs)
        return make

    return register


def scrambled(made: Model, seed: int = 0) -> tuple[Model, dict[str, str]]:
    """The same function of one flat dictionary whose keys are random words, and the path behind each word."""
    paths, leaves, structure = flattened(made.params)
    draw = random.Random(seed)
    words = ["".join(draw.choices(string.ascii_lowercase, k=8)) for _ in paths]
    assert len(set(words)) == len(words)

    def loss(params: Any, *inputs: Any) -> Any:
        return made.loss(structure.unflatten([params[word] for word in words]), *inputs)

    return made._replace(loss=loss, params=dict(zip(words, leaves, strict=True))), dict(
        zip(words, paths, strict=True)
    )


def flattened(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Paths, leaves and structure."""
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found]
    return [path.removesuffix("/value") for path in paths], [leaf for _, leaf in found], structure


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def tokens(*sizes: int) -> jax.ShapeDtypeStruct:
    return shape(*sizes, dtype=jnp.int32)


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Over the last axis, the mean of all others."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def mean_square(predicted: Any) -> Any:
    return jnp.mean(predicted.astype(jnp.float32) ** 2)
