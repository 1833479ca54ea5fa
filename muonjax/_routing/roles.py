"""Before the first step: what a parameter's path says that it is: a bias, an attention kernel, a convolution.

Names only. The shapes have their say in `_stacks` (which axes enumerate layers) and `_routing` (which axes
make the matrix). The conventions read here are those of Flax's own layers, of MaxText and T5X, of Hugging
Face's Flax models, of Gemma, of nanoGPT and of the common adapters.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from muonjax._matrix_view import MuonDimensionNumbers


class Layout(NamedTuple):
    """The matrices in one layer's parameter: every head folded into one matrix, or a matrix a head."""

    whole: Any  # MuonDimensionNumbers, or FusedDimensionNumbers
    heads: MuonDimensionNumbers | None = None  # None: not an attention kernel, or its heads are folded away


class Role(NamedTuple):
    """What a parameter is in its layer.

    Attributes:
      name: in words, as `tabulate` prints it.
      muon: False for what never is a matrix of Muon's: biases, scales, embeddings, output heads.
      ranks: the ranks that the parameter of one layer, not a stack of layers, may have; empty: unknown.
      layouts: rank of one layer's parameter to its matrices.
      parts: number of matrices fused along one axis, for query, key and value in one kernel.
      kind: "projection" and "out" are the two sides of an attention; else "".
    """

    name: str
    muon: bool = True
    ranks: tuple[int, ...] = ()
    layouts: Mapping[int, Layout] = {}
    parts: int = 1
    kind: str = ""


def _dense(name: str) -> Role:
    return Role(name, ranks=(2,), layouts={2: _MATRIX})


_MATRIX = Layout(MuonDimensionNumbers(0, 1))
_HEADS_OUT = Layout(MuonDimensionNumbers(0, (1, 2)), MuonDimensionNumbers(0, 2))  # [d, heads, head size]
_HEADS_IN = Layout(MuonDimensionNumbers((0, 1), 2), MuonDimensionNumbers(1, 2))  # [heads, head size, d]

QUERY = Role("attention query", True, (2, 3), {2: _MATRIX, 3: _HEADS_OUT}, kind="projection")
KEY = QUERY._replace(name="attention key")
VALUE = QUERY._replace(name="attention value")
OUT = Role("attention output", True, (2, 3), {2: _MATRIX, 3: _HEADS_IN}, kind="out")
EXPERTS = Role("experts", True, (2, 3), {2: _MATRIX, 3: Layout(MuonDimensionNumbers(1, 2))})
CONVOLUTION = Role(
    "convolution",
    True,
    (3, 4, 5),
    {rank: Layout(MuonDimensionNumbers(tuple(range(rank - 1)), rank - 1)) for rank in (3, 4, 5)},
)
ADAPTER_CORE = CONVOLUTION._replace(name="adapter core")  # the Tucker form's [*window, rank, rank]
DENSE = _dense("dense")
ROUTER = _dense("router")
ADAPTER = _dense("adapter factor")
INTERLEAVED = Role("query, key and value, interleaved by head")
UNKNOWN = Role("matrix")
BIAS = Role("bias", muon=False, ranks=(1,))
EMBEDDING = Role("embedding", muon=False, ranks=(2,))
STATE_SPACE = Role("state-space parameter", muon=False)
HEAD = Role("output head", muon=False, ranks=(2,))


def fused(name: str, parts: int) -> Role:
    """A kernel that holds `parts` matrices of equal size side by side."""
    return Role(name, ranks=(2, 3, 4), parts=parts)


# Matched against the whole of "module/leaf", in snake case without numbers: "layer_norm/scale". Below, a leaf
# with a weight's name is known by its module, "query/kernel", and any other by its own, "attention/wq".
_WEIGHT = r"(?:kernel|w|weight|weights)"

_NOT_MUON = (
    (BIAS, r".*/(bias|biases|b|beta|\w+_bias|bias_\w+|b_\w+)"),
    (Role("scale", False, (0,)), r".*/hada_scale"),  # of an adapter: one number, unless stacked
    (Role("scale", False, (1,)), r".*/(scale|gamma|gain|\w+_scale|\w+_gamma|\w*norm\w*)"),
    (Role("scale", False, (1,)), r"(\w+_)?(\w*norm|ln)(_\w+)?/(weight|w|g)"),
    (EMBEDDING, r".*/embedding"),  # flax.linen.Embed and flax.nnx.Embed
    (EMBEDDING._replace(ranks=()), r".*/((\w+_)?(embed|embeddings?|wte|wpe|table)|\w+_embedding_\w+)"),
    (EMBEDDING._replace(ranks=()), rf"((\w+_)?embed\w*/(w|weights?|value|table)|(wte|wpe)/{_WEIGHT})"),
    (Role("position", False), r".*/(pos|position|positional|rel_pos|relative|\w+_pos|\w+_position)(_\w+)?"),
    (Role("learned tokens", False), r".*/(cls|(\w+_)?tokens?|latents?|registers?|queries|prompts?)"),
    (HEAD, rf"((\w+_)?heads?|classifier|readout|score|qa_outputs)/{_WEIGHT}"),
    (HEAD, rf"((\w+_)?(logits|unembed|unembedding)(_\w+)?|vocab_proj\w*|to_logits)/{_WEIGHT}"),
    (HEAD, r".*/(lm_head|head|(\w+_)?unembed(ding)?|to_logits|logits)"),
    (STATE_SPACE, r".*/(\w+_log|a_param|d_skip|log_\w+|lambda\w*|dt|delta)"),
    (Role("time mixing", False), r".*/time_(decay|first|mix|faaaa|maa)\w*"),
    (Role("gain", False, (1,)), r".*/\w*magnitude"),
    (Role("gain", False), r".*/(alpha|temperature|tau|layer_?scale\w*|ls\d?|slopes?)"),
    (Role("depthwise convolution", False), rf"(\w+_)?(depthwise|dw_?conv|conv_?dw)\w*/{_WEIGHT}"),
)

_GEMMA = {
    "q_einsum": Role(
        "attention query",
        True,
        (3,),
        {3: Layout(MuonDimensionNumbers(1, (0, 2)), MuonDimensionNumbers(1, 2))},
    ),
    "kv_einsum": Role(
        "attention key, value",
        True,
        (4,),
        {4: Layout(MuonDimensionNumbers(2, (1, 3)), MuonDimensionNumbers(2, 3))},
    ),
    "qkv_einsum": Role(
        "attention q, k, v",
        True,
        (4,),
        {4: Layout(MuonDimensionNumbers(2, (1, 3)), MuonDimensionNumbers(2, 3))},
    ),
    "attn_vec_einsum": Role("attention output", True, (3,), {3: _HEADS_IN}),
    "gating_einsum": Role("gate and up", True, (3,), {3: Layout(MuonDimensionNumbers(1, 2))}),
}

_SIDE = r"(?:_b|_up|_proj|_projection|_dense|_linear)*"
_PROJECTIONS = (
    (QUERY, rf"(w_?|to_)?(q|query|queries){_SIDE}"),
    (KEY, rf"(w_?|to_)?(k|key|keys){_SIDE}"),
    (VALUE, rf"(w_?|to_)?(v|value|values){_SIDE}"),
    (KEY._replace(name="attention key, value"), r"w?kv_(b|up)(_proj)?"),  # the upper half of MLA
    (fused("attention q, k, v", 3), rf"((w_?|to_)?qkv{_SIDE}|c_attn)"),
    (fused("attention key, value", 2), rf"(w_?|to_)?kv{_SIDE}"),
    (INTERLEAVED, r"query_key_value"),
)
_OUT = rf"(w_?|to_|attn_|c_)?(o|out|output|proj){_SIDE}"

_ADAPTER = r"(?:\w+_)?(?:lora|dora|hada|loha|lokr)_(?:[ab](?:_\w+)?|down|up|w[12]_?[ab]?)|w[12]_?[ab]"
_ADAPTER_CORE = r"hada_t[12]"
_OTHERS = (
    (fused("gate and up", 2), r"(gate_up|up_gate|gate_and_up)(_proj)?|wi_fused"),
    (CONVOLUTION, r"\w*conv\w*"),
    (
        DENSE,
        r"(?!.*general)(\w+_)?(\w*dense|\w*linear|lin|fc\d?|proj|projection|mlp|ffn?|ffw|up|down|gate|router"
        r"|intermediate|hidden|out|output|wi|wo|w[123]|wk?[qkv]|a)(_\w+)?",
    ),
)
_RAW_EXPERTS = r"wi|wo|w[123]|(wi|w)_(in|out|up|down|gate)|(up|down|gate)_proj"


def roles(paths: Sequence[tuple[str, ...]]) -> list[Role]:
    """Reads every path of a tree; siblings count, since `out` is an attention's only beside a query or a key.

    >>> [role.name for role in roles([("Dense_0", "kernel"), ("Dense_0", "bias"), ("ln_f", "scale")])]
    ['dense', 'bias', 'scale']
    """
    attentions = {scope for scope, name in map(unit, paths) if _projection(name)}
    return [_role(path, attentions) for path in paths]


def unit(path: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """The layer that a leaf belongs to: its scope, and its name in snake case without a number.

    >>> unit(("block", "MultiHeadDotProductAttention_0", "query", "kernel"))
    (('block', 'MultiHeadDotProductAttention_0'), 'query')
    >>> unit(("mlp", "experts", "wi_0"))
    (('mlp', 'experts'), 'wi')
    """
    named = [(i, name) for i, name in enumerate(map(_snake, path)) if name]
    if not named:
        return (), ""
    is_weight = re.fullmatch(_WEIGHT + "|bias|b", named[-1][1]) and len(named) > 1
    index, name = named[-2] if is_weight else named[-1]
    return path[:index], name


def module(path: tuple[str, ...]) -> tuple[str, ...]:
    """The path of the module whose kernel or bias this is; a bare array is its own.

    >>> module(("Dense_0", "bias")) == module(("Dense_0", "kernel")) != module(("Dense_1", "kernel"))
    True
    """
    return path[:-1] if path and re.fullmatch(_WEIGHT + "|bias|b", _snake(path[-1])) else path


def is_head_scope(path: tuple[str, ...]) -> bool:
    """Whether a module on the way is an output head, though the leaf's own name does not say so."""
    return any(re.fullmatch(r"(\w+_)?heads?|cls|predictions|classifier|decoder", _snake(n)) for n in path)


def is_position(path: tuple[str, ...]) -> bool:
    """Whether an embedding counts positions or token types, not a vocabulary."""
    return any(
        re.search(r"(^|_)(pos|position\w*|rel|relative|wpe|type|time\w*)(_|$)", _snake(n)) for n in path[-2:]
    )


def _role(path: tuple[str, ...], attentions: set[tuple[str, ...]]) -> Role:
    names = [name for name in map(_snake, path) if name] or [""]
    scope, name = unit(path)
    last_two = "/".join(names[-2:] if len(names) > 1 else ["", names[0]])
    if re.fullmatch(_ADAPTER, name) or re.fullmatch(rf".*/({_ADAPTER})|(\w+_)?lora(_\w+)?/[ab]", last_two):
        return ADAPTER
    if re.fullmatch(_ADAPTER_CORE, name):
        return ADAPTER_CORE
    if path[-1:] in (("A",), ("D",)):
        return STATE_SPACE
    for role, pattern in _NOT_MUON:
        if re.fullmatch(pattern, last_two):
            if role is BIAS and (projection := _projection(name)):
                return role._replace(ranks=(1, 2) if projection.parts == 1 else (1, 2, 3))
            if role is BIAS and _weight_role(path, name, scope, attentions) is UNKNOWN:
                return role._replace(ranks=(1, 2, 3))  # DenseGeneral's may have the rank of its output
            return role
    return _weight_role(path, name, scope, attentions)


def _weight_role(
    path: tuple[str, ...], name: str, scope: tuple[str, ...], attentions: set[tuple[str, ...]]
) -> Role:
    if name in _GEMMA:
        return _GEMMA[name]
    if projection := _projection(name):
        return projection
    is_attention = scope in attentions or bool(scope and re.search(r"att(n|ention)", _snake(scope[-1])))
    if is_attention and re.fullmatch(_OUT, name):
        return OUT
    if is_attention and name == "in_proj":
        return fused("attention q, k, v", 3)
    for role, pattern in _OTHERS[:2]:
        if re.fullmatch(pattern, name):
            return role
    last = _snake(path[-1]) if path else ""  # the tree may be one array
    if name != last and re.fullmatch(r"(\w+_)?(router|gate|gating)", name):
        return ROUTER
    if any(re.search(r"(^|_)(experts?|moe)(_|$)", _snake(n)) for n in path):
        return EXPERTS
    if name == last and re.fullmatch(_RAW_EXPERTS, name):
        return EXPERTS  # a bare array, not a Dense: experts when it has three axes
    return DENSE if re.fullmatch(_OTHERS[2][1], name) else UNKNOWN


def _projection(name: str) -> Role | None:
    return next((role for role, pattern in _PROJECTIONS if re.fullmatch(pattern, name)), None)


def _snake(name: str) -> str:
    """`LayerNorm_0` to `layer_norm`; a bare number to nothing."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    return re.sub(r"(_\d+)+$|^\d+$", "", words).strip("_")
