"""Split a parameter's path into words, and find its layer, its module and its attention."""

import functools
import re

# The names of a path: ("attn", "query", "kernel") of "attn/query/kernel".
Words = tuple[str, ...]

# How libraries call a layer's matrix: Flax `kernel`, Haiku `w`, PyTorch `weight` (`weight_v` with
# weight normalization); and its vectors.
WEIGHT = r"(?:kernel|w|weights?|weight_v)"
VECTOR = r"(?:bias|biases|b|offset|beta)"
# An array of a layer. A norm's `scale` is apart, as it ends no bare name such as `output_w`.
_ARRAY = rf"{WEIGHT}|{VECTOR}|scale"
# Words that NNX and lists of arrays put behind the name of a parameter.
_CONTAINER = r"\d+|array|value"


@functools.cache
def words(path: str) -> Words:
    """The names of a path, split at slashes and dots, without an index, `array` or `value` that
    follows the name of an array.

    >>> words("mlp/~/linear_0/w"), words("key.weights"), words("ffn/w/0"), words("w/value")
    (('mlp', '~', 'linear_0', 'w'), ('key', 'weights'), ('ffn', 'w'), ('w',))
    """
    # The path of a tree that is one array is "".
    names = re.findall(r"[^/.]+", path) or [""]
    while len(names) > 1 and re.fullmatch(_CONTAINER, names[-1]):
        # Only behind the name of an array, such as `kernel` or `bias`. Behind any other name a
        # number is the layer's own, as in layers/0.
        if not re.fullmatch(_ARRAY, snake(names[-2])):
            break
        names.pop()
    return tuple(names)


def layer_of(path: str) -> tuple[Words, str]:
    """The layer that a leaf belongs to: its scope, which are the modules around it, and its name in
    snake case without a number.

    All layers of a list have the same scope and name; only `module` differs between them.

    >>> layer_of("block/MultiHeadDotProductAttention_0/query/kernel")
    (('block', 'MultiHeadDotProductAttention_0'), 'query')
    >>> layer_of("mlp/experts/wi_0")
    (('mlp', 'experts'), 'wi')
    >>> layer_of("encoder/layers/0/kernel"), module("encoder/layers/0/kernel")
    ((('encoder',), 'layers'), ('encoder', 'layers', '0'))
    """
    names = module(path)
    # The index of a list has the name "" in snake case, which names no layer.
    while len(names) > 1 and not snake(names[-1]):
        names = names[:-1]
    # A `kernel` at the root of the tree has no module: its scope is (), and its layer has no name.
    return names[:-1], snake(names[-1]) if names else ""


def module(path: str) -> Words:
    """The module whose kernel or bias this is; a bare array is a module by itself.

    >>> module("Dense_0/bias"), module("Dense_0/kernel"), module("wq")
    (('Dense_0',), ('Dense_0',), ('wq',))
    >>> module("attention/output_w"), module("attention/output_b")
    (('attention', 'output'), ('attention', 'output'))
    """
    *around, name = words(path)
    if not re.fullmatch(_ARRAY, snake(name)):
        around.append(re.sub(rf"_({WEIGHT}|bias|b)$", "", name))
    return tuple(around)


def attention_scope(path: str) -> Words:
    """A layer's scope up to the last module with "attn" or "attention" in its name;
    all of it without such a name.

    >>> attention_scope("block_0/self_attn/qkv/query/kernel")
    ('block_0', 'self_attn')
    """
    scope, _ = layer_of(path)
    for end in range(len(scope), 0, -1):
        if re.search(r"att(n|en)", snake(scope[end - 1])):
            return scope[:end]
    return scope


def stem(name: str) -> str:
    """A name in snake case without any number at its end: `fc` of fc2."""
    return re.sub(r"\d+$", "", snake(name))


@functools.cache
def snake(name: str) -> str:
    """A name in snake case without its number: `layer_norm` of LayerNorm_0, "" of a number."""
    start_of_word = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
    underscored = re.sub(start_of_word, "_", name).lower()
    return re.sub(r"(_\d+)+$|^\d+$", "", underscored).strip("_")
