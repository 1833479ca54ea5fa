"""Read what a parameter is from its path: a bias, an attention's kernel, a convolution, a table;
or from the type of its module.

Names and types only; `axes` and `ends_of_model` read shapes. A path is read in snake case, without
numbers, and split at slashes and dots (`path_words`). Each row of the tables below says which
library needs it.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax

from muonjax._common import trees
from muonjax._matrices.matrix_view import DimensionNumbers, axes_of
from muonjax._names.path_words import (
    VECTOR,
    WEIGHT,
    Words,
    layer_of,
    module,
    snake,
    words,
)


class Role(NamedTuple):
    """What a parameter is in its layer.

    Attributes:
      name: In words, as `tabulate` prints it.
      ranks: The fewest and the most axes that the parameter of one layer, not a stack of layers,
        may have; by default any number.
      parts: Number of matrices in one kernel, 3 for query, key and value.
      projection: "query", "key", "value" or "out" of an attention; "norm" of what is called a norm;
        else "".
    """

    name: str
    ranks: tuple[int, int] = (0, 99)
    parts: int = 1
    projection: str = ""


class Parameter(NamedTuple):
    """A leaf as one layer sees it.

    Attributes:
      keys: Where it is in the tree, ("attn", "query", "kernel"). A key of Haiku's may have slashes.
      path: The keys joined, "attn/query/kernel".
      role: What it is in its layer.
      leaf_shape: Its shape as it is stored.
      axes: Which of the leaf's axes one layer has: (1, 2) of a stack [6, 32, 80] of kernels.
    """

    keys: tuple[str, ...]
    path: str
    role: Role
    leaf_shape: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in one layer."""
        return tuple(self.leaf_shape[axis] for axis in self.axes)

    @property
    def rank(self) -> int:
        return len(self.axes)

    @property
    def is_stack(self) -> bool:
        """Whether the leaf has further axes, which count layers."""
        return len(self.leaf_shape) > self.rank

    @property
    def is_matrix(self) -> bool:
        """Whether it has more than a vector's axes, not counting those of size 1."""
        return sum(size > 1 for size in self.shape) > 1

    def sizes_of(self, numbers: DimensionNumbers) -> tuple[list[int], list[int]]:
        """The sizes of the rows' axes and of the columns' axes: [64], [4, 16] of a query
        [64, 4, 16]."""
        rows = [self.leaf_shape[axis] for axis in axes_of(numbers.reduction_axis)]
        columns = [self.leaf_shape[axis] for axis in axes_of(numbers.output_axis)]
        return rows, columns

    @property
    def module(self) -> Words:
        return module(self.path)

    @property
    def scope(self) -> Words:
        return layer_of(self.path)[0]

    @property
    def layer(self) -> str:
        return layer_of(self.path)[1]

    @property
    def leaf_name(self) -> str:
        """The name of the array, such as "kernel"; "" of a tree that is one array."""
        return words(self.path)[-1]

    @property
    def is_called_weight(self) -> bool:
        """Whether it is called `weight`, as PyTorch, Equinox and axlearn call Flax's `kernel`."""
        return bool(re.fullmatch("weights?(_v)?", self.leaf_name))


class Answer(NamedTuple):
    """What is decided about a parameter: its matrices, or None for Adam, and why.

    Attributes:
      numbers: In the axes of the leaf, which may be a stack of layers.
      why: In a few words.
      is_open: Whether it goes to Adam with a warning, because nothing tells what it is.
    """

    numbers: DimensionNumbers | None
    why: str
    is_open: bool = False


# Attention. DenseGeneral's and einsums' kernels have three axes, plain ones two.
QUERY = Role("attention query", ranks=(2, 3), projection="query")
KEY = Role("attention key", ranks=(2, 3), projection="key")
VALUE = Role("attention value", ranks=(2, 3), projection="value")
OUT = Role("attention output", ranks=(2, 3), projection="out")
FUSED_QKV = Role("attention q, k, v", ranks=(2, 4), parts=3, projection="query")
FUSED_KV = Role("attention key, value", ranks=(2, 4), parts=2, projection="key")
# In multi-head latent attention this projection takes latents, which are narrower than the model.
MLA_UP = Role("attention key, value", ranks=(2, 3))

# Other matrices.
EXPERTS = Role("experts", ranks=(2, 3))
CONVOLUTION = Role("convolution", ranks=(2, 5))
ADAPTER = Role("adapter factor", ranks=(2, 3))
DENSE = Role("dense", ranks=(2, 2))
ROUTER = Role("router", ranks=(2, 2))
UNKNOWN = Role("matrix")

# Names show that these exist, but not how their axes are used.
INTERLEAVED = Role("projections interleaved by head")
RECURRENT = Role("gates of a recurrent cell", ranks=(2, 2))
# Gemma's are [2, in, out] or [2, out, in], and Phi 3's lie side by side.
GATE_UP = Role("gate and up", ranks=(2, 4))
LONE_LETTER = Role("a letter")  # S4's B, or an adapter's
SPECIAL = Role("kernel with groups, an einsum of its own or names of axes")
OPEN = (INTERLEAVED, RECURRENT, GATE_UP, LONE_LETTER, SPECIAL)

# Adam's.
BIAS = Role("bias")  # a vector, or [heads, size] of a query
SCALE = Role("scale", ranks=(1, 1))
# A norm's `weight` is a matrix where its shape is one, as in an adaptive norm.
NORM = Role("scale", ranks=(1, 1), projection="norm")
EMBEDDING = Role("embedding")
TABLE = Role("embedding", ranks=(2, 2))
POSITION = Role("position")
PATCHES = Role("patch embedding")
HEAD = Role("output head", ranks=(2, 2))
STATE_SPACE = Role("state-space parameter")
DEPTHWISE = Role("depthwise convolution")
TOKENS = Role("learned tokens")

_EMBED = r"(?:\w+_)?(?:embed\w*|emb|wte|wpe|embedder|lookup|lut|relative_attention_bias)|tok|shared"
# Read as a whole: "module/leaf" in snake case and without numbers. The first row that fits decides.
_NOT_MUON = (
    # Every library; TransformerLens' b_q and b_in.
    (BIAS, rf".*/({VECTOR}|\w+_bias|bias_\w+|b_\w+)"),
    (
        SCALE,
        # Flax' and Haiku's norms; nanoGPT's bare ln_1; Wav2Vec 2.0's weight_g; DoRA's magnitude.
        r".*/((\w+_)?(scale|gamma|gain|magnitude|ln\d*(_\w+)?|beta)|\w*norm\w*|rms\w*|weight_g"
        # Swin's temperature, BEiT's and timm's layer scales, ALiBi's slopes.
        r"|alpha|temperature|tau|layer_?scale\w*|ls\d?|slopes?)",
    ),
    # Norms of PyTorch, Equinox and axlearn (weight), Tunix (w) and EasyDeL (kernel).
    (NORM, r"((\w+_)?(ln|bn|gn|rms)|\w*norm)\d*(_\w+)?/(weight|w|g|kernel)"),
    # DINOv3, Gemma 3 and ViTs; a convolution or a dense layer.
    (PATCHES, rf"\w*patch_?(embed\w*|emb|proj\w*|ify|conv\w*|stem)\w*/{WEIGHT}"),
    # Flax' embedding, MaxText's token_embedder, Gemma's input_embedding; VQ-VAE's code books.
    (
        EMBEDDING,
        rf".*/({_EMBED}|emb_var|(\w+_)?tables?|\w+_embedding_\w+"
        r"|code_?(vectors|book)\w*|centroids|prototypes)",
    ),
    (
        TABLE,
        # Bare arrays of word vectors and recommenders; TransformerLens' W_E.
        r".*/((\w+_)?(factors|vectors|lookup|lut|vocab|entit(y|ies)|relations?)|w_e)"
        # Embeddings of PyTorch, axlearn, Levanter and Equinox (weight), Simply (w).
        rf"|({_EMBED})/(w|weights?|value|table)|(wte|wpe)/{WEIGHT}",
    ),
    # big_vision's posemb, SAM's rel_pos_h, Perceiver's pos_embs, TransformerLens' W_pos.
    (POSITION, r".*/(pos(ition(al)?)?|pos_?emb\w*|relative|\w+_pos(ition)?)(_\w+)?"),
    (
        TOKENS,
        # ViT's cls, big_vision's probe, DINOv3's register tokens, StyleGAN's const.
        r".*/(cls(_\w+)?|probe|const\w*|(\w+_)?(tokens?|masks?)(\W.*)?"
        r"|latents?|registers?|queries|prompts?)"
        # SAM's iou_token and mask_tokens.
        r"|(\w+_)?(tokens?|prompts?)/(weight|value)",
    ),
    # MaxText's logits_dense, big_vision's head, Transformers' lm_head, seqax' unembed.
    (
        HEAD,
        r"((\w+_)?heads?|classifier|readout|score|qa_outputs|(class|bbox|box)_embed"
        r"|(?!pre_|router_)((\w+_)?logits?(_\w+)?|logit_?dense)|(\w+_)?unembed(ding)?|vocab_proj\w*"
        rf")/{WEIGHT}|.*/(lm_head|head|(\w+_)?unembed(ding)?|to_logits|logits|w_u)",
    ),
    # S4's log_step and Lambda, Mamba's A_log and D, RWKV's time_decay, Griffin's a_param.
    (
        STATE_SPACE,
        r".*/(\w+_log|a_param|d_skip|log_\w+|lambda\w*|dt|delta"
        r"|time_(decay|first|mix|faaaa|maa)\w*)",
    ),
    # ConvNeXt's dwconv, EfficientNet's and MobileNet's depthwise_conv, Keras' depthwise_kernel.
    (
        DEPTHWISE,
        rf"(\w+_)?(depthwise|dw_?conv|conv_?dw|pos_conv)\w*/{WEIGHT}|.*/depthwise_kernel",
    ),
)

# What is never a matrix for Muon: biases, scales, embeddings, output heads.
ADAM = frozenset(role for role, _ in _NOT_MUON)

# What libraries put before and behind "q" or "query".
_BEFORE = r"(?:w_?|to_|linear_|fc_|proj_|c_)?"
_BEHIND = r"(_proj(ection)?|_dense|_lin(ear)?|_einsum|_layer|_net|_b|_up|_heads?|_attn|_fused)*"
# The names of a layer that make an attention of its scope.
_PROJECTIONS = (
    # Flax' query, Llama's q_proj, Gemma's q_einsum, DistilBERT's q_lin, diffusers' to_q.
    (QUERY, rf"{_BEFORE}(q|query|queries){_BEHIND}"),
    (KEY, rf"{_BEFORE}(k|key|keys){_BEHIND}"),
    (VALUE, rf"{_BEFORE}(v|value|values){_BEHIND}"),
    # DeepSeek in MaxText and Simply.
    (MLA_UP, r"w?kv_(b|up)(_proj)?"),
    # axlearn's qkv_proj, GPT-2's c_attn, Gemma's qkv_einsum, Flux' i_qkv.
    (FUSED_QKV, rf"(\w+_)?w?qkv{_BEHIND}|c_attn"),
    # Gemma's kv_einsum, seqax' w_kv.
    (FUSED_KV, rf"(\w+_)?w?kv{_BEHIND}"),
    # Bloom; Flaxformer's parallel layers.
    (INTERLEAVED, r"query_key_value|(q_wi|o_wo)(_fused)?"),
)
# In any module.
_ANYWHERE = (
    # PyTorch's weight_ih, Flax' dense_i, Elman's W_h.
    (RECURRENT, r"weight_[ih]h(_l\d+)?(_reverse)?|(dense|w)_[ih]|[ih]h"),
    # Gemma's gating_einsum, Phi 3's gate_up_proj, Flaxformer's wi_fused.
    (GATE_UP, r"(gate_(and_)?up|up_gate)(_proj)?|wi_fused|gating_einsum"),
    # pw: pointwise convolutions by a dense layer, as in ConvNeXt.
    (CONVOLUTION, r"(?!pw)\w*conv\w*"),
)
# Inside of an attention, where names that other layers have too mean its projections.
_IN_ATTENTION = (
    *_PROJECTIONS,
    # Flax' out, Llama's o_proj, BERT's dense, Haiku's linear, Gemma's attn_vec_einsum.
    (
        OUT,
        rf"(w_?|to_|attn_|attention_|c_|linear_|fc_)?(o|out|output|proj){_BEHIND}"
        r"|post|attn_vec_einsum|dense|linear",
    ),
    # PyTorch's MultiheadAttention.
    (FUSED_QKV, "in_proj"),
    *_ANYWHERE,
)

# LoRA's a and b, DoRA's, LoHa's w1_a; qwix' and Gemma's `lora/a`.
_ADAPTER = (
    r"(\w+_)?(lora|dora|hada|loha|lokr)_([ab](_\w+)?|down|up|w[12]_?[ab]?)|w[12]_?[ab]"
)
_ADAPTER_LEAF = rf".*/({_ADAPTER})|(\w+_)?lora(_\w+)?/[ab]"
# S4's B and C, an adapter's A. K, O, Q and V are an attention's, U, V and W a layer's.
_LETTER = "[A-JL-NPRSTX-Z]|[A-D]_(re|im|real|imag)"
# Outside of an attention.
_OUTSIDE = (
    *_ANYWHERE,
    (ROUTER, r"(\w+_)?(router|gate|gating)(_logits)?"),
    (
        DENSE,
        r"(?!.*general)(\w+_)?(\w*dense|\w*linear|lin\d?|fc\d?|proj|projection|mlp|ffn?|ffw|up|down"
        r"|gate|router|intermediate|hidden|wi|wo|w[123]|wk?[qkv]|a)(_\w+)?",
    ),
)


def read_roles(paths: Collection[str]) -> dict[str, Role]:
    """Reads the role of every path of a tree.

    Neighbors matter: `out` is an attention's only next to a query or a key, or in a module that is
    called an attention.

    >>> roles = read_roles(["Dense_0/kernel", "Dense_0/bias", "ln_f/scale"])
    >>> [role.name for role in roles.values()]
    ['dense', 'bias', 'scale']
    """
    attentions: set[Words] = set()
    for path in paths:
        scope, layer = layer_of(path)
        # A query, a key or a fused projection makes its scope an attention. A layer `q`, `q_net` or
        # `q_head` does not, because it may be a Q network (nor does `q_proj`, but its key does),
        # and neither does `value`, a critic or one half of a gated layer, as in penzai. `out` is
        # none of `_PROJECTIONS`.
        may_be_q_network = re.match("q(_|$)", layer)
        projection = _role_in(_PROJECTIONS, layer)
        if not may_be_q_network and projection not in (None, VALUE):
            attentions.add(scope)
    # The names of all arrays: Haiku's `output_b` is a bias if there is an `output_w`.
    arrays = set(map(words, paths))
    return {path: _role(path, attentions, arrays) for path in paths}


def _role(path: str, attentions: set[Words], arrays: set[Words]) -> Role:
    """What a leaf is in its layer: "Dense_0/kernel" is a dense layer's kernel,
    "ln_f/scale" a scale.

    The names of the array and of its module tell what is never a matrix; the name of the layer
    tells which matrix it is. The first that fits decides: an adapter, a lone letter, a bias next to
    its weight, what the table `_NOT_MUON` names, a matrix.

    Args:
      path: The path of the leaf.
      attentions: The scopes that hold queries or keys.
      arrays: The paths of all leaves, each as a tuple of names.
    """
    *around, name = words(path)
    # In snake case, without indices of lists, which `snake` makes "".
    names = ["", *filter(None, map(snake, words(path)))]
    # The module's and the array's name, "ln_f/scale"; "/scale" of an array in no module.
    last_two = "/".join(names[-2:])
    # The scope and the layer of attn/query/kernel are ("attn",) and "query".
    _, layer = layer_of(path)
    # An adapter has its factors in arrays such as lora_a, or as `a` in a module called lora. It
    # comes first, because the table below takes a `b` for a bias.
    if re.fullmatch(_ADAPTER, layer) or re.fullmatch(_ADAPTER_LEAF, last_two):
        return ADAPTER
    # A capital letter may be a state space's matrix or an adapter's factor: it is left open. In
    # snake case the table would take B for a bias.
    if re.fullmatch(_LETTER, name):
        return LONE_LETTER
    # Haiku and AlphaFold have a bias output_b next to its weight output_w.
    if name.endswith("_b") and (*around, f"{name[:-1]}w") in arrays:
        return BIAS
    role = _role_in(_NOT_MUON, last_two)
    # An array called queries is an attention's projection next to keys;
    # alone it holds learned tokens.
    is_query = names[-1] == "queries" and (*around, "keys") in arrays
    # The logits of a router are no output of the model.
    is_router = role is HEAD and "router" in names
    if role is None or is_query or is_router:
        return _matrix(path, attentions)
    return role


def _matrix(path: str, attentions: set[Words]) -> Role:
    """What a matrix is, by the name of its layer:
    `out` is an attention's output inside of an attention, and else UNKNOWN."""
    scope, layer = layer_of(path)
    # The modules around the layer, and the layer: "", "layers", "self_attn", "query". The module of
    # a layer at the root is "".
    names = ["", *map(snake, scope), layer]
    # Haiku keeps the gates of an LSTM in a layer called linear.
    if names[-2:] == ["lstm", "linear"]:
        return RECURRENT
    # A scope with queries or keys is an attention, and so is a module that is called one.
    is_in_attention = scope in attentions or re.search(r"att(n|en)", names[-2])
    table = _IN_ATTENTION if is_in_attention else _OUTSIDE
    role = _role_in(table, layer) or UNKNOWN
    # The name of the layer in experts_0/dense does not say that it is one of the experts. A
    # layer whose name says more, such as a router's, keeps its role.
    is_expert = re.search(r"[_/](experts?|moe)([_/]|$)", "/".join(names))
    return EXPERTS if is_expert and role in (DENSE, UNKNOWN) else role


def _role_in(table: Sequence[tuple[Role, str]], name: str) -> Role | None:
    """The role of the first row whose pattern is the whole name."""
    for role, pattern in table:
        if re.fullmatch(pattern, name):
            return role
    return None


def types_of_modules(params: Any) -> dict[str, Role]:
    """The roles that types and settings of modules show and names can't,
    by the path of the parameter.

    An `eqx.nn.Embedding` or an `nnx.Embed` is an embedding under any name. All others that show
    something have the role SPECIAL, which no name decides: such a kernel goes to Adam, with a
    warning. Settings show that a kernel has groups, that it belongs to an einsum with letters of
    its own, or that its axes have names, as those of penzai and Haliax.
    """
    roles_by_path: dict[str, Role] = {}
    # `_type` gives a role to some modules, and None to all else. So the leaves here are these
    # modules, and the arrays outside of them.
    nodes = jax.tree.leaves_with_path(params, is_leaf=lambda node: bool(_type(node)))
    for path, node in nodes:
        if role := _type(node):
            # The module's bias gets the role too; the caller ignores it where names show a bias.
            for rest, _ in jax.tree.leaves_with_path(node):
                roles_by_path["/".join(trees.names((*path, *rest)))] = role
    return roles_by_path


def _type(node: Any) -> Role | None:
    """The role of a module's parameters, if its type or its settings show it."""
    # penzai's arrays have `named_axes`, Haliax's have `array` and `axes`.
    is_haliax = hasattr(node, "array") and hasattr(node, "axes")
    has_named_axes = hasattr(node, "named_axes") or is_haliax
    # Flax calls the groups of a convolution feature_group_count, Equinox groups.
    groups = getattr(node, "feature_group_count", getattr(node, "groups", 1))
    is_grouped = isinstance(groups, int) and groups > 1
    if has_named_axes or is_grouped or hasattr(node, "einsum_str"):
        return SPECIAL
    return EMBEDDING if type(node).__name__ in ("Embedding", "Embed") else None
