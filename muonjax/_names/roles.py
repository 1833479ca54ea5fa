"""Read what a parameter is from its path: a bias, an attention kernel, a convolution, an embedding.

Names only; shapes are read in `axes` and `ends_of_model`. The conventions known here are those of
Flax's own layers, MaxText, T5X, axlearn, Hugging Face, Gemma, Haiku, Equinox, Levanter, penzai, nanoGPT and the common
adapters. A path is read in snake case, without numbers, and split at slashes and dots.
"""

import functools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from muonjax._matrices.matrix_view import DimensionNumbers, MuonDimensionNumbers

Path = tuple[str, ...]


class Role(NamedTuple):
    """What a parameter is in its layer.

    Attributes:
      name: In words, as `tabulate` prints it.
      muon: False for what is never a matrix for Muon: biases, scales, embeddings, output heads.
      ranks: The ranks that the parameter of one layer, not a stack of layers, may have; empty: unknown.
      layouts: Rank of one layer's parameter to its matrices, where nothing but the rank has to be known.
      parts: Number of matrices fused along one axis, for query, key and value in one kernel.
      projection: "query", "key", "value" or "out" of an attention; "norm" of what is called a norm; else "".
    """

    name: str
    muon: bool = True
    ranks: tuple[int, ...] = ()
    layouts: Mapping[int, DimensionNumbers] = {}
    parts: int = 1
    projection: str = ""


class Parameter(NamedTuple):
    """A leaf as one layer sees it.

    Attributes:
      path: Names from the root.
      role: What it is in its layer.
      shape: Its shape in one layer.
      axes: For each axis of `shape`, which axis of the leaf it is.
      leaf_shape: Its shape as it is stored.
      stacked: True where further axes enumerate layers, but it is not known which ones.
    """

    path: tuple[str, ...]
    role: Role
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    leaf_shape: tuple[int, ...]
    stacked: bool | None = None


class Answer(NamedTuple):
    """What is decided about a parameter: its matrices, or None for Adam, and why.

    Attributes:
      numbers: In the axes of one layer, and at last in those of the leaf.
      why: In a few words.
      is_open: Whether it goes to Adam with a warning, because nothing tells what it is.
    """

    numbers: DimensionNumbers | None
    why: str
    is_open: bool = False


QUERY = Role("attention query", ranks=(2, 3), projection="query")
KEY = Role("attention key", ranks=(2, 3), projection="key")
VALUE = Role("attention value", ranks=(2, 3), projection="value")
OUT = Role("attention output", ranks=(2, 3), projection="out")
FUSED_QKV = Role("attention q, k, v", ranks=(2, 3, 4), parts=3)
FUSED_KV = Role("attention key, value", ranks=(2, 3, 4), parts=2)
# It takes latents.
MLA_UP = Role("attention key, value", ranks=(2, 3), layouts={3: MuonDimensionNumbers(0, (1, 2))})
INTERLEAVED = Role("projections interleaved by head")
GATE_UP = Role("gate and up", ranks=(2, 3, 4), parts=2)
EXPERTS = Role("experts", ranks=(2, 3), layouts={3: MuonDimensionNumbers(1, 2)})
CONVOLUTION = Role("convolution", ranks=(2, 3, 4, 5))
ADAPTER = Role("adapter factor", ranks=(2, 3))
DENSE = Role("dense", ranks=(2,))
ROUTER = Role("router", ranks=(2,))
RECURRENT = Role("gates of a recurrent cell", ranks=(2,))
UNKNOWN = Role("matrix")
LONE_LETTER = Role("a letter")  # S4's B or an adapter's
SPECIAL = Role("kernel with groups or an einsum of its own")
# What names never read further.
OPEN = (INTERLEAVED, RECURRENT, LONE_LETTER, SPECIAL)

BIAS = Role("bias", muon=False, ranks=(1,))
SCALE = Role("scale", muon=False, ranks=(1,))
NORM = Role("scale", muon=False, ranks=(1,), projection="norm")  # a `weight`: a matrix where its shape is one
EMBEDDING = Role("embedding", muon=False)
TABLE = Role("embedding", muon=False, ranks=(2,))
PATCHES = Role("patch embedding", muon=False)
HEAD = Role("output head", muon=False, ranks=(2,))
STATE_SPACE = Role("state-space parameter", muon=False)
DEPTHWISE = Role("depthwise convolution", muon=False)
TOKENS = Role("learned tokens", muon=False)

_WEIGHT = r"(?:kernel|w|weights?|weight_v)"
_VECTOR = r"(?:bias|biases|b|offset|beta)"
_EMBED = r"(?:\w+_)?(?:embed\w*|emb|wte|wpe|embedder|lookup|lut|relative_attention_bias)|tok|shared"

# The first name that fits decides: "module/leaf" as a whole, in snake case and without numbers.
_NOT_MUON = (
    (BIAS, rf".*/({_VECTOR}|\w+_bias|bias_\w+|b_\w+)"),
    (SCALE, r".*/((\w+_)?(scale|gamma|gain|magnitude|ln\d*(_\w+)?|beta)|\w*norm\w*|rms\w*|weight_g)"),
    (SCALE, r".*/(alpha|temperature|tau|layer_?scale\w*|ls\d?|slopes?)"),
    (NORM, r"((\w+_)?(ln|bn|gn|rms)|\w*norm)\d*(_\w+)?/(weight|w|g|kernel)"),
    (PATCHES, rf"\w*patch_?(embed\w*|emb|proj\w*|ify|conv\w*|stem)\w*/{_WEIGHT}"),
    (
        EMBEDDING,
        rf".*/({_EMBED}|emb_var|(\w+_)?tables?|\w+_embedding_\w+|code_?(vectors|book)\w*|centroids|prototypes)",
    ),
    (TABLE, r".*/((\w+_)?(factors|vectors|lookup|lut|vocab|entit(y|ies)|relations?)|w_e)"),
    (TABLE, rf"({_EMBED})/(w|weights?|value|table)|(wte|wpe)/{_WEIGHT}"),
    (
        Role("position", False),
        r".*/(pos|pos_?emb\w*|position|positional|rel_pos|relative|\w+_pos|\w+_position)(_\w+)?",
    ),
    (
        TOKENS,
        r".*/(cls(_\w+)?|probe|const\w*|(\w+_)?(tokens?|masks?)(\W.*)?|latents?|registers?|queries|prompts?)",
    ),
    (TOKENS, r"(\w+_)?(tokens?|prompts?)/(weight|value)"),
    (
        HEAD,
        r"(((\w+_)?heads?|classifier|readout|score|qa_outputs|(class|bbox|box)_embed"
        rf"|(?!pre_|router_)((\w+_)?logits?(_\w+)?|logit_?dense)|(\w+_)?unembed(ding)?|vocab_proj\w*)/{_WEIGHT})"
        r"|.*/(lm_head|head|(\w+_)?unembed(ding)?|to_logits|logits|w_u)",
    ),
    (
        STATE_SPACE,
        r".*/(\w+_log|a_param|d_skip|log_\w+|lambda\w*|dt|delta|time_(decay|first|mix|faaaa|maa)\w*)",
    ),
    (DEPTHWISE, rf"(\w+_)?(depthwise|dw_?conv|conv_?dw|pos_conv)\w*/{_WEIGHT}|.*/depthwise_kernel"),
)
_SIDE = r"(?:_b|_up|_proj|_projection|_dense|_linear|_lin|_einsum|_layer|_net|_heads?|_attn|_fused)*"
_BEFORE = r"(?:w_?|to_|linear_|fc_|proj_|c_)?"
_PROJECTIONS = (
    (QUERY, rf"{_BEFORE}(q|query|queries){_SIDE}"),
    (KEY, rf"{_BEFORE}(k|key|keys){_SIDE}"),
    (VALUE, rf"{_BEFORE}(v|value|values){_SIDE}"),
    (MLA_UP, r"w?kv_(b|up)(_proj)?"),
    (FUSED_QKV, rf"(\w+_)?w?qkv{_SIDE}|c_attn"),
    (FUSED_KV, rf"(\w+_)?w?kv{_SIDE}"),
    (INTERLEAVED, r"query_key_value|(q_wi|o_wo)(_fused)?"),
)
_IN_ATTENTION = (
    (
        OUT,
        rf"(w_?|to_|attn_|attention_|c_|linear_|fc_)?(o|out|output|proj){_SIDE}|post|attn_vec_einsum|dense|linear",
    ),
    (FUSED_QKV, "in_proj"),
)
_ANYWHERE = (
    (GATE_UP, r"(gate_(and_)?up|up_gate)(_proj)?|wi_fused|gating_einsum"),
    (CONVOLUTION, r"(?!pw)\w*conv\w*"),
)

_ADAPTER = r"(?:\w+_)?(?:lora|dora|hada|loha|lokr)_(?:[ab](?:_\w+)?|down|up|w[12]_?[ab]?)|w[12]_?[ab]"
_DENSE = (
    r"(?!.*general)(\w+_)?(\w*dense|\w*linear|lin\d?|fc\d?|proj|projection|mlp|ffn?|ffw|up|down|gate|router"
    r"|intermediate|hidden|wi|wo|w[123]|wk?[qkv]|a)(_\w+)?"
)


def read_roles(paths: Sequence[tuple[str, ...]]) -> list[Role]:
    """Reads the role of every path of a tree. Neighbors matter: `out` is an attention's only next to a query or a key.

    >>> [role.name for role in read_roles([("Dense_0", "kernel"), ("Dense_0", "bias"), ("ln_f", "scale")])]
    ['dense', 'bias', 'scale']
    """
    # A lone `q` is a Q network, and a gated layer's values belong to no attention.
    layers = [layer for layer in map(layer_of, paths) if not re.match("q(_|$)", layer[1])]
    attentions = {scope for scope, name in layers if _projection(name) not in (None, VALUE)}
    folders: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for *folder, name in filter(None, map(words, paths)):
        folders[tuple(folder)].add(name)
    return [_role(words(path) or ("",), attentions, folders[words(path)[:-1]]) for path in paths]


def _role(path: tuple[str, ...], attentions: set[tuple[str, ...]], beside: set[str]) -> Role:
    names = [name for name in map(_snake, path) if name] or [""]
    scope, name = layer_of(path)
    last_two = "/".join(names[-2:] if len(names) > 1 else ["", names[0]])
    if re.fullmatch(_ADAPTER, name) or re.fullmatch(rf".*/({_ADAPTER})|(\w+_)?lora(_\w+)?/[ab]", last_two):
        return ADAPTER
    if re.fullmatch("[A-JL-NPRSTX-Z]|[A-D]_(re|im|real|imag)", path[-1]):
        return LONE_LETTER
    if path[-1].endswith("_b") and path[-1][:-1] + "w" in beside:
        return _bias(path, layer_of((*path[:-1], path[-1][:-1] + "w"))[1], attentions)
    role = next((role for role, pattern in _NOT_MUON if re.fullmatch(pattern, last_two)), None)
    if role is BIAS:
        return _bias(path, re.sub("^b_", "", name), attentions)
    is_query = role is TOKENS and names[-1] == "queries" and beside & {"keys", "values"}
    if role is None or is_query or (role is HEAD and "router" in names):
        return _weight_role(path, name, scope, attentions)
    return role


def _bias(path: tuple[str, ...], name: str, attentions: set[tuple[str, ...]]) -> Role:
    if projection := _projection(name):
        return BIAS._replace(ranks=(1, 2) if projection.parts == 1 else (1, 2, 3))
    if _weight_role(path, name, layer_of(path)[0], attentions) is UNKNOWN:
        return BIAS._replace(ranks=(1, 2, 3, 4))  # DenseGeneral's may have the rank of its output
    return BIAS


def _weight_role(path: Path, name: str, scope: Path, attentions: set[Path]) -> Role:
    is_attention = scope in attentions or bool(scope and re.search(r"att(n|en)", _snake(scope[-1])))
    if is_attention and (projection := _projection(name)):
        return projection
    is_lstm = name == "linear" and _snake("".join(scope[-1:])) == "lstm"  # Haiku's
    if is_lstm or re.fullmatch(r"weight_[ih]h(_l\d+)?(_reverse)?|(dense|w)_[ih]|[ih]h", name):
        return RECURRENT
    for role, pattern in (*_IN_ATTENTION, *_ANYWHERE) if is_attention else _ANYWHERE:
        if re.fullmatch(pattern, name):
            return role
    # A gate that is no module may be another's parameter.
    routers = r"(\w+_)?(router|gate|gating)(_logits)?" if name != _snake(path[-1]) else r"(\w+_)?router"
    if not is_attention and re.fullmatch(routers, name):
        return ROUTER
    if any(re.search(r"(^|_)(experts?|moe)(_|$)", _snake(n)) for n in path):
        return EXPERTS
    return DENSE if not is_attention and re.fullmatch(_DENSE, name) else UNKNOWN


def _projection(name: str) -> Role | None:
    return next((role for role, pattern in _PROJECTIONS if re.fullmatch(pattern, name)), None)


@functools.cache
def words(path: tuple[str, ...]) -> tuple[str, ...]:
    """The names of a path, split at slashes and dots, without the index of an array container at its end.

    >>> words(("mlp/~/linear_0", "w")), words(("key.weights",)), words(("ffn", "w", "0"))
    (('mlp', '~', 'linear_0', 'w'), ('key', 'weights'), ('ffn', 'w'))
    """
    found = [word for name in path for word in re.split(r"[/.]", name) if word]
    while len(found) > 1 and re.fullmatch(r"\d+|array|value|raw_value", found[-1]):
        if not re.fullmatch(rf"{_WEIGHT}|{_VECTOR}|scale", _snake(found[-2])):
            break
        found.pop()
    return tuple(found)


@functools.cache
def layer_of(path: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """The layer that a leaf belongs to: its scope, and its name in snake case without a number.

    >>> layer_of(("block", "MultiHeadDotProductAttention_0", "query", "kernel"))
    (('block', 'MultiHeadDotProductAttention_0'), 'query')
    >>> layer_of(("mlp", "experts", "wi_0"))
    (('mlp', 'experts'), 'wi')
    """
    path = words(path)
    named = [(i, name) for i, name in enumerate(map(_snake, path)) if name]
    if not named:
        return (), ""
    while len(named) > 1 and re.fullmatch(f"{_WEIGHT}|{_VECTOR}", named[-1][1]):
        named.pop()
    index, name = named[-1]
    return path[:index], re.sub(r"(?<=\w)_(w|weights?|kernel)$", "", name)


@functools.cache
def module(path: tuple[str, ...]) -> tuple[str, ...]:
    """The path of the module whose kernel or bias this is; a bare array is its own.

    >>> module(("Dense_0", "bias")) == module(("Dense_0", "kernel")) != module(("Dense_1", "kernel"))
    True
    >>> module(("attention", "output_w")) == module(("attention", "output_b"))
    True
    """
    path = words(path)
    if not path:
        return path
    if re.fullmatch(f"{_WEIGHT}|{_VECTOR}|scale", _snake(path[-1])):
        return path[:-1]
    return (*path[:-1], re.sub(rf"_({_WEIGHT}|bias|b)$", "", path[-1]))


@functools.cache
def attention_scope(scope: tuple[str, ...]) -> tuple[str, ...]:
    """The attention module around a scope: up to the last name with "attn" or "attention"; else the scope itself."""
    for end in range(len(scope), 0, -1):
        if re.search(r"att(n|en)", _snake(scope[end - 1])):
            return scope[:end]
    return scope


def stem(name: str) -> str:
    """A name in snake case without any number at its end: `fc` of fc2."""
    return re.sub(r"\d+$", "", _snake(name))


@functools.cache
def _snake(name: str) -> str:
    """A name in snake case without its number: `LayerNorm_0` to `layer_norm`, a bare number to nothing."""
    underscored = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    return re.sub(r"(_\d+)+$|^\d+$", "", underscored).strip("_")
