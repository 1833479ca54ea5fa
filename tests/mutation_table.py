"""The breaks that `tests.mutations` tries: a file, a snippet that is in it once, what replaces it, what that breaks."""

from typing import NamedTuple


class Mutation(NamedTuple):
    file: str
    old: str
    new: str
    breaks: str


# The tests of the sources below a path: their own first. The longest path that fits a file counts.
AFFECTED = {
    "muonjax/_newton_schulz": [
        "tests/newton_schulz",
        "tests/test_orthogonalize.py",
        "tests/test_optimizers.py",
    ],
    "muonjax/_match_rms.py": ["tests/test_match_rms.py", "tests/test_optimizers.py"],
    "muonjax/_matrix_view.py": ["tests/test_matrix_view.py", "tests/test_orthogonalize.py", "tests/routing"],
    "muonjax/_batching.py": ["tests/test_orthogonalize.py"],
    "muonjax/_optimizers.py": ["tests/test_optimizers.py"],
    "muonjax/_normalize_neurons.py": ["tests/test_normalize_neurons.py"],
    "muonjax/_hyperball.py": ["tests/test_hyperball.py"],
    "muonjax/_cautious_weight_decay.py": ["tests/test_cautious_weight_decay.py"],
    "muonjax/_monitor.py": ["tests/test_monitor.py"],
    "muonjax/_orthogonalize.py": ["tests/test_orthogonalize.py", "tests/test_optimizers.py"],
    "muonjax/_linalg.py": ["tests/newton_schulz", "tests/msign", "tests/adapters"],
    "muonjax/_routing": ["tests/routing", "tests/test_optimizers.py", "tests/linen", "tests/nnx"],
    "muonjax/_clipping": ["tests/clipping", "tests/reliability"],
    "muonjax/_msign": ["tests/msign"],
    "muonjax/_adapters": ["tests/adapters", "tests/linen", "tests/nnx"],
    "muonjax/_mesh": ["tests/mesh"],
    "muonjax/linen": ["tests/linen", "tests/adapters", "tests/clipping"],
    "muonjax/nnx": ["tests/nnx", "tests/adapters", "tests/clipping"],
    "pallas_kernels": ["tests/pallas_kernels", "tests/newton_schulz"],
}

_NS = "muonjax/_newton_schulz/"
_CLIP = "muonjax/_clipping/"
_MSIGN = "muonjax/_msign/"
_LOHA = "muonjax/_adapters/"
_MESH = "muonjax/_mesh/"
_ROUTING = "muonjax/_routing/"

MUTATIONS = [
    # Schedules
    Mutation(
        _NS + "coefficients.py",
        "q, r = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))",
        "q, r = math.sqrt((-3 * b - root) / (9 * c)), math.sqrt((-3 * b + root) / (9 * c))",
        "the extrema of the quintic",
    ),
    Mutation(
        _NS + "coefficients.py",
        "return scale * a, -scale, 0.0,",
        "return scale * a, scale, 0.0,",
        "the sign of b",
    ),
    Mutation(
        _NS + "coefficients.py",
        "max(lower, cushion * upper), upper)",
        "max(lower, cushion), upper)",
        "the cushion is in units of the interval's end",
    ),
    Mutation(
        _NS + "coefficients.py",
        "recenter = 2 / (at_lower + 1 + error)",
        "recenter = 1.0",
        "the ends lie about 1",
    ),
    Mutation(
        _NS + "coefficients.py",
        "safety if step < num_steps - 1 else 1.0",
        "safety if step < num_steps else 1.0",
        "the last step is not divided by `safety`",
    ),
    Mutation(
        _NS + "coefficients.py",
        "rows.append((a / s, b / s**3, c / s**5))",
        "rows.append((a / s, b / s**2, c / s**5))",
        "a power of `safety`",
    ),
    Mutation(
        _NS + "coefficients.py",
        "coefficients[:num_steps] + coefficients[-1:] * (num_steps - len(coefficients))",
        "coefficients[:num_steps] + coefficients[:1] * (num_steps - len(coefficients))",
        "the row that a short table repeats",
    ),
    Mutation(
        _NS + "coefficients.py",
        "math.isfinite(v) for row",
        "not math.isnan(v) for row",
        "an infinite coefficient is refused",
    ),
    # Scaling and normalization
    Mutation(
        _NS + "scaling.py",
        "exponent = jnp.maximum(2 * bias - 1 -",
        "exponent = jnp.maximum(2 * bias -",
        "the scale's exponent, by one",
    ),
    Mutation(
        _NS + "scaling.py",
        "jnp.maximum(jnp.abs(x.real), jnp.abs(x.imag))",
        "jnp.abs(x.real)",
        "imaginary parts count",
    ),
    Mutation(
        _NS + "scaling.py",
        "(largest >= info.tiny) & (largest < jnp.inf)",
        "(largest >= info.tiny)",
        "infinity is scaled by 1",
    ),
    Mutation(
        _NS + "normalization.py",
        "jnp.where(norm == 0, 1, norm)",
        "norm",
        "a zero matrix is not divided by zero",
    ),
    Mutation(
        _NS + "normalization.py",
        "unit, bound = 1 / schatten8, schatten4 * schatten8",
        "unit, bound = 1 / schatten8, schatten4",
        "the Schatten-8 bound",
    ),
    Mutation(
        _NS + "normalization.py",
        "x, gram = x * rows, gram * rows * rows.mT",
        "x, gram = x, gram * rows * rows.mT",
        "AOL rescales x with its Gram matrix",
    ),
    Mutation(
        _NS + "normalization.py",
        "jnp.linalg.eigvalsh(gram)[..., -1:, None]",
        "jnp.linalg.eigvalsh(gram)[..., :1, None]",
        "the largest eigenvalue",
    ),
    # Deflation
    Mutation(_NS + "deflation.py", "_SUBSPACE_STEPS = 2", "_SUBSPACE_STEPS = 0", "the subspace is iterated"),
    Mutation(_NS + "deflation.py", "s = av - dot(p, h) / 2", "s = av + dot(p, h) / 2", "a sign of W A W"),
    # The iteration
    Mutation(
        _NS + "iteration.py",
        "wide = n > 1.5 * m",
        "wide = n > 0.5 * m",
        "the Gram form for wide matrices alone",
    ),
    Mutation(
        _NS + "iteration.py",
        "grown *= steps[t - 1][0] ** 2",
        "grown *= steps[t - 1][0]",
        "how rounding grows",
    ),
    Mutation(
        _NS + "iteration.py",
        "return (y.mT if tall else y).astype(x.dtype)",
        "return y.mT if tall else y",
        "the result's dtype",
    ),
    Mutation(_NS + "iteration.py", "if 0 in x.shape:", "if 0 in x.shape[-1:]:", "an empty matrix is refused"),
    # RMS and matrices
    Mutation(
        "muonjax/_match_rms.py",
        "math.sqrt(max(view.fan_in, view.fan_out))",
        "math.sqrt(min(view.fan_in, view.fan_out))",
        "the longer side",
    ),
    Mutation(
        "muonjax/_match_rms.py",
        "ratio = view.fan_out / view.fan_in",
        "ratio = view.fan_in / view.fan_out",
        "the ratio of the sides",
    ),
    Mutation(
        "muonjax/_match_rms.py",
        "math.sqrt(max(1.0, ratio)",
        "math.sqrt(min(1.0, ratio)",
        "the width rule widens",
    ),
    Mutation(
        "muonjax/_match_rms.py", "not 0 < rms < math.inf", "not 0 <= rms < math.inf", "rms=0 is refused"
    ),
    Mutation(
        "muonjax/_matrix_view.py",
        "return self.batch_axes + self.reduction_axes + self.output_axes",
        "return self.batch_axes + self.output_axes + self.reduction_axes",
        "rows and columns",
    ),
    Mutation(
        "muonjax/_matrix_view.py",
        "key=self._order.__getitem__)",
        "key=lambda i: i)",
        "the inverse permutation",
    ),
    Mutation(
        "muonjax/_matrix_view.py",
        "tuple(axis + (axis >= cut) for axis in axes)",
        "tuple(axis + (axis > cut) for axis in axes)",
        "the parts are no axis of the matrix",
    ),
    Mutation(
        "muonjax/_matrix_view.py",
        "return tuple(axis % len(shape) for axis in axes)",
        "return tuple(axes)",
        "negative axes",
    ),
    Mutation(
        "muonjax/_matrix_view.py",
        "parts >= 1 and size % parts == 0",
        "parts >= 1",
        "parts that do not divide are refused",
    ),
    Mutation(
        "muonjax/_batching.py",
        "(*sorted(x.shape[-2:]), x.dtype)",
        "(*x.shape[-2:], x.dtype)",
        "a matrix and its transpose share a loop",
    ),
    Mutation(
        "muonjax/_batching.py",
        "itertools.accumulate(part.shape[0] for part in parts[:-1])",
        "itertools.accumulate(part.shape[0] for part in parts[1:])",
        "where each array's matrices start",
    ),
    # Optimizers
    Mutation("muonjax/_optimizers.py", 'rule="width")', 'rule="spectral")', "rms=None is the width rule"),
    Mutation(
        "muonjax/_normalize_neurons.py", "squares / view.fan_in", "squares", "the second moment is a mean"
    ),
    Mutation(
        "muonjax/_normalize_neurons.py",
        "1 if axis in view.reduction_axes",
        "1 if axis in view.output_axes",
        "a neuron is a column",
    ),
    Mutation("muonjax/_hyperball.py", "2 * toward * wu", "toward * wu", "the length after a step"),
    Mutation("muonjax/_hyperball.py", "jnp.where(u2 == 0, 1, u2)", "u2", "a zero update leaves the weight"),
    Mutation(
        "muonjax/_cautious_weight_decay.py",
        ".real >= 0",
        ".real <= 0",
        "only weights that the update agrees with decay",
    ),
    Mutation("muonjax/_monitor.py", "trace**2 /", "trace /", "the deviation from orthogonality"),
    # Clipping
    Mutation(
        _CLIP + "factors.py",
        "(signal > threshold) & jnp.isfinite(signal)",
        "(signal > threshold)",
        "an infinite statistic does nothing",
    ),
    Mutation(
        _CLIP + "factors.py",
        "jnp.where(hot, threshold / jnp.where(hot, signal, 1.0), 1.0)",
        "jnp.where(hot, jnp.where(hot, signal, 1.0) / threshold, 1.0)",
        "γ is threshold / S",
    ),
    Mutation(
        _CLIP + "factors.py",
        "return jnp.maximum(gamma, jnp.finfo(jnp.float32).tiny)",
        "return gamma",
        "γ is never zero",
    ),
    Mutation(
        _CLIP + "factors.py",
        "smallest = grouped.min(-1, keepdims=True)",
        "smallest = grouped.max(-1, keepdims=True)",
        "the smallest γ of a group",
    ),
    Mutation(_CLIP + "factors.py", "0.5: jnp.sqrt", "0.5: lambda x: x", "√γ"),
    Mutation(
        _CLIP + "factors.py",
        "after = part.total - part.start - part.size",
        "after = part.total - part.size",
        "where the scaled part ends",
    ),
    Mutation(
        _CLIP + "factors.py", "[(part.start, after)]", "[(after, part.start)]", "where the scaled part starts"
    ),
    Mutation(
        _CLIP + "factors.py",
        "tuple(axis % len(shape) for axis in scan_axis)",
        "tuple(scan_axis)",
        "a negative scan_axis",
    ),
    Mutation(
        _CLIP + "factors.py",
        "sorted(range(f.ndim), key=order.__getitem__)",
        "order",
        "the factors' axes on the parameter",
    ),
    Mutation(
        _CLIP + "qk_clip.py",
        'OWN_KEYS = {"query": (0.5, 0.0), "key": (0.5, 0.0), "rotary": (1.0, 0.0)}',
        'OWN_KEYS = {"query": (0.5, 0.0), "key": (0.5, 0.0), "rotary": (0.5, 0.0)}',
        "a shared rotary key takes nothing, its query all",
    ),
    Mutation(
        _CLIP + "qk_clip.py",
        '"balanced": {"query": (1.0, -0.5)',
        '"balanced": {"query": (1.0, 0.5)',
        "the balanced query's power",
    ),
    Mutation(
        _CLIP + "qk_clip.py",
        "jnp.where(factors[path] == 1, p, factors[path] * p).astype(p.dtype)",
        "factors[path] * p",
        "apply_qk_clip keeps the dtype and calm heads' bits",
    ),
    Mutation(
        _CLIP + "transform.py",
        "f * u.astype(wide) + (f - 1) * p.astype(wide)",
        "f * u.astype(wide)",
        "the old weight is scaled too",
    ),
    Mutation(
        _CLIP + "transform.py",
        "due = (state.count + 1) % self.every_k == 0",
        "due = state.count % self.every_k == 0",
        "when every_k clips",
    ),
    Mutation(
        _CLIP + "transform.py",
        "maxima = {name: jnp.maximum(s, state.running_max[name])",
        "maxima = {name: jnp.minimum(s, state.running_max[name])",
        "maxima accumulate",
    ),
    Mutation(
        _CLIP + "transform.py",
        "maxima = {name: lax.pmax(s, self.axis_name) for name, s in maxima.items()}",
        "pass",
        "replicas take one maximum",
    ),
    Mutation(
        _CLIP + "transform.py",
        "threshold(state.count // self.every_k)",
        "threshold(state.count)",
        "a schedule counts clips",
    ),
    Mutation(
        _CLIP + "transform.py",
        "state.clips[name] + (gamma < 1)",
        "state.clips[name] + (gamma <= 1)",
        "clips are counted",
    ),
    Mutation(
        _CLIP + "statistics.py",
        "return functools.reduce(jnp.maximum, arrays)",
        "return arrays[-1]",
        "the largest of several statistics",
    ),
    Mutation(
        _CLIP + "signal_clip.py",
        "if abs(own + group - 1) > 1e-6 or group < 0:",
        "if abs(own + group - 1) > 1e-6:",
        "a negative group power is refused",
    ),
    Mutation(
        _CLIP + "max_logits.py",
        "factor = depth**-0.5 if scale is None else scale",
        "factor = depth**-0.5 if not scale else depth**-0.5 * scale",
        "a given scale replaces 1/√d",
    ),
    Mutation(
        _CLIP + "max_logits.py",
        "visible & (ahead <= right)",
        "visible & (ahead < right)",
        "a query sees its own position",
    ),
    Mutation(
        _CLIP + "max_logits.py",
        "visible & (-ahead <= left)",
        "visible & (-ahead < left)",
        "the window's left end",
    ),
    Mutation(
        _CLIP + "max_logits.py",
        "j <= i + block_q - 1 + right",
        "j < i + block_q - 1 + right",
        "which blocks are visible, to the right",
    ),
    Mutation(
        _CLIP + "max_logits.py",
        "j + block_k - 1 >= i - left",
        "j >= i - left",
        "which blocks are visible, to the left",
    ),
    Mutation(
        _CLIP + "max_logits.py",
        "[min(j, S - block_k) for j in range(0, S, block_k)]",
        "[j for j in range(0, S - block_k + 1, block_k)]",
        "the last keys count",
    ),
    Mutation(
        _CLIP + "max_logits.py",
        "logits = jnp.where(m, logits, -jnp.inf)",
        "logits = jnp.where(m, logits, 0.0)",
        "masked logits do not count",
    ),
    Mutation(
        _CLIP + "max_logits.py",
        "jnp.promote_types(jnp.promote_types(query.dtype, key.dtype), jnp.float32)",
        "jnp.promote_types(query.dtype, key.dtype)",
        "half-precision logits are summed in float32",
    ),
    Mutation(
        _CLIP + "max_logits.py",
        "top + cast * jnp.abs(top)",
        "top + cast * top",
        "the margin of a negative bound",
    ),
    # msign and mcsgn
    Mutation(
        _MSIGN + "polynomial_gradient.py",
        "slope = b + 2 * c * mean",
        "slope = b + c * mean",
        "the slope about the mean",
    ),
    Mutation(
        _MSIGN + "polynomial_gradient.py",
        "return v - unit * inner(unit, v)",
        "return v",
        "the derivative of the norm",
    ),
    Mutation(
        _MSIGN + "polynomial_gradient.py",
        "return oriented_like(inverse * tangential(unit, v), x)",
        "return oriented_like(tangential(unit, v), x)",
        "1 / |x| in the transposed derivative",
    ),
    Mutation(
        _MSIGN + "polynomial_gradient.py",
        "5 * n + 12 * m < 2 * (5 * n + 2 * m)",
        "5 * n + 12 * m > 2 * (5 * n + 2 * m)",
        "when a segment has two steps",
    ),
    Mutation(
        _MSIGN + "polynomial_gradient.py",
        "share = a * share",
        "share = share",
        "the identity's share of a composition",
    ),
    Mutation(
        _MSIGN + "polar_gradient.py", "0.5 * (x - adjoint(x))", "0.5 * (x + adjoint(x))", "the skew part"
    ),
    Mutation(
        _MSIGN + "polar_gradient.py",
        "return 0.5 * e, q",
        "return e, q",
        "a factor of two in the Lyapunov solution",
    ),
    Mutation(
        _MSIGN + "polar_gradient.py",
        "e = share * e + 0.5 * slope * w",
        "e = share * e - 0.5 * slope * w",
        "a sign in the Lyapunov iteration",
    ),
    Mutation(
        _MSIGN + "mcsgn.py",
        "inverse = jnp.where(is_zero, 0.0, root)",
        "inverse = jnp.nan_to_num(root)",
        "NaN outside of the domain",
    ),
    Mutation(
        _MSIGN + "mcsgn.py",
        "v = inverse * (v - unit * inner(adjoint(unit), v))",
        "v = inverse * (v - unit * inner(unit, v))",
        "a transpose in the derivative of the trace",
    ),
    # Adapters
    Mutation(
        _LOHA + "hadamard_dot.py",
        "tokens * r**2 * (m + n) <= (2 * r + tokens) * m * n",
        "tokens * r**2 * (m + n) >= (2 * r + tokens) * m * n",
        "which form is cheaper",
    ),
    Mutation(
        _LOHA + "hadamard_forms.py",
        "y * (magnitude.astype(dtype) / (jnp.sqrt(squares) +",
        "y * (magnitude.astype(dtype) / (squares +",
        "the columns' norms",
    ),
    Mutation(
        _LOHA + "hadamard_forms.py",
        "y = jnp.asarray(scale).astype(dtype) * _zero_from_cotangent(y, carried)",
        "y = 2.0 * _zero_from_cotangent(y, carried)",
        "the scale of the Kronecker form",
    ),
    Mutation(
        _LOHA + "hadamard_forms.py", "rest = r % count", "rest = 0", "the last columns of the Kronecker form"
    ),
    Mutation(
        _LOHA + "hadamard_forms.py",
        "dy += _multiply(x, dw, dtype, precision)",
        "dy += 0",
        "the derivative by the factors",
    ),
    Mutation(
        _LOHA + "hadamard.py",
        "jnp.concatenate([weight, rows(len(weight), m - len(weight))])",
        "jnp.concatenate([weight, rows(0, m - len(weight))])",
        "the last rows of a weight",
    ),
    Mutation(
        _LOHA + "hadamard.py",
        "return jnp.asarray(scale).astype(dtype) * first * second",
        "return first * second",
        "the scale of a weight",
    ),
    # Meshes
    Mutation(
        _MESH + "assignment.py",
        "return (-works[kind].flops,",
        "return (works[kind].flops,",
        "the costliest matrices are assigned first",
    ),
    Mutation(
        _MESH + "assignment.py",
        "held + unit.share_size, owner))\n            counts[kind][owner] += 1",
        "held + unit.share_size, owner))\n            counts[kind][owner] += 2",
        "each matrix has one owner",
    ),
    Mutation(
        _MESH + "layout.py",
        "tall = view.fan_in > view.fan_out",
        "tall = view.fan_in < view.fan_out",
        "a tall matrix is transposed",
    ),
    Mutation(
        _MESH + "owner_loop.py",
        "order += [*map(exchange.index, axes), batch + 1 + i]",
        "order += [batch + 1 + i, *map(exchange.index, axes)]",
        "in which order pieces meet",
    ),
    # Routing
    Mutation(
        _ROUTING + "dimension_numbers.py",
        "if min(m, n) == 1:",
        "if min(m, n) == 0:",
        "a matrix of one row goes to Adam",
    ),
    Mutation(
        _ROUTING + "rules.py",
        "ruled.setdefault(path, numbers)",
        "ruled[path] = numbers",
        "the first rule decides",
    ),
    Mutation(
        _ROUTING + "matrices.py",
        "if total == 3 * p.shape[1 - axis]:",
        "if total == 3 * p.shape[axis]:",
        "what counts as query, key and value in one",
    ),
    Mutation(
        _ROUTING + "matrices.py",
        "return MuonDimensionNumbers(both, d)",
        "return MuonDimensionNumbers(d, both)",
        "the output projection's rows are its heads",
    ),
    Mutation(
        _ROUTING + "matrices.py",
        "parts=p.shape[axis] // size, axis=axis",
        "parts=size, axis=axis",
        "as many matrices as heads",
    ),
    Mutation(
        _ROUTING + "output_heads.py",
        "p.shape == table.shape[::-1]",
        "p.shape == table.shape",
        "an output head",
    ),
    # Kernels
    Mutation(
        "pallas_kernels/_reference.py",
        "jnp.tril(p) + jnp.tril(p, -1).mT",
        "jnp.tril(p) + jnp.tril(p).mT",
        "the diagonal counts once",
    ),
    Mutation(
        "pallas_kernels/_reference.py",
        "strict + strict.mT.conj()",
        "strict + strict.mT",
        "Hermitian, not symmetric",
    ),
    Mutation(
        "pallas_kernels/_reference.py",
        "p + beta[..., None, None] * c.astype(p.dtype)",
        "p + c.astype(p.dtype)",
        "beta",
    ),
    Mutation(
        "pallas_kernels/_reference.py",
        "return jnp.promote_types(dtype, jnp.float32)",
        "return dtype",
        "half types are summed in float32",
    ),
    Mutation(
        "pallas_kernels/_blocked.py",
        "(block, block.mT.conj()) if i > j",
        "(block, block.mT) if i > j",
        "the conjugate above the diagonal",
    ),
    Mutation("pallas_kernels/_blocked.py", "cut(c_i, j, axis=-1)", "cut(c_i, i, axis=-1)", "the block of C"),
    Mutation("pallas_kernels/_sharded.py", "size = -(-m // rows)", "size = m // rows", "the last rows"),
    Mutation(
        "pallas_kernels/_api.py",
        'platform == "cpu" and shape[-2] >= 256',
        'platform == "cpu" and shape[-2] > 256',
        "from which size on blocks are used",
    ),
]
