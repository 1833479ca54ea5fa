"""The breaks that `tests.mutations` tries: a file, a snippet that is in it once, what replaces it, what that breaks."""

from typing import NamedTuple


class Mutation(NamedTuple):
    file: str
    old: str
    new: str
    breaks: str


_ITERATION = "tests/newton_schulz/test_iteration.py"
_HALF = "tests/newton_schulz/test_half_precision.py"
_ORTHOGONALIZE = "tests/test_orthogonalize.py"
_BAD_MATRICES = "tests/reliability/test_adversarial_matrices.py"
_BAD_STATISTICS = "tests/reliability/test_adversarial_attention.py"
_ROUTES = ["tests/routing/test_dimension_numbers.py", "tests/routing/test_evidence.py"]

# The tests of a source file, or of the files below a path: the longest path that fits counts. Those that are most likely
# to fail come first; a break is tried until one fails.
AFFECTED = {
    "muonjax/_newton_schulz/coefficients.py": ["tests/newton_schulz/test_coefficients.py", _ITERATION],
    "muonjax/_newton_schulz/scaling.py": ["tests/newton_schulz/test_scaling.py", _ITERATION, _BAD_MATRICES],
    "muonjax/_newton_schulz/normalization.py": [_ITERATION, _BAD_MATRICES],
    "muonjax/_newton_schulz/deflation.py": ["tests/newton_schulz/test_deflation.py", _ITERATION],
    "muonjax/_newton_schulz/gram_form.py": [_ITERATION, "tests/newton_schulz/test_deflation.py"],
    "muonjax/_newton_schulz/iteration.py": [_ITERATION, "tests/newton_schulz/test_deflation.py"],
    "muonjax/_newton_schulz/half_precision.py": [_HALF, "tests/test_policy.py"],
    "muonjax/_newton_schulz/thin_deflation.py": [_HALF],
    "muonjax/_newton_schulz/inverse_root.py": [_HALF, "tests/newton_schulz/test_deflation.py"],
    "muonjax/_policy.py": ["tests/test_policy.py", _HALF, _ORTHOGONALIZE],
    "muonjax/_match_rms.py": ["tests/test_match_rms.py", "tests/test_optimizers.py"],
    "muonjax/_matrix_view.py": ["tests/test_matrix_view.py", _ORTHOGONALIZE, *_ROUTES],
    "muonjax/_batching.py": [_ORTHOGONALIZE],
    "muonjax/_optimizers.py": ["tests/test_optimizers.py"],
    "muonjax/_keywords.py": ["tests/test_first_mistakes.py"],
    "muonjax/_partition.py": [
        "tests/test_first_mistakes.py",
        "tests/reliability/test_restored_elsewhere.py",
        "tests/test_optimizers.py",
    ],
    "muonjax/_hyperparameters.py": ["tests/test_optimizers.py", "tests/test_hyperball.py"],
    "muonjax/_normalize_neurons.py": ["tests/test_normalize_neurons.py"],
    "muonjax/_hyperball.py": ["tests/test_hyperball.py"],
    "muonjax/_cautious_weight_decay.py": ["tests/test_cautious_weight_decay.py"],
    "muonjax/_monitor/monitor.py": ["tests/test_monitor.py"],
    "muonjax/_monitor/metrics.py": ["tests/test_metrics.py"],
    "muonjax/_routing": [*_ROUTES, "tests/zoo", "tests/test_first_mistakes.py"],
    "muonjax/_clipping/factors.py": [
        "tests/clipping/test_sites.py",
        "tests/clipping/test_qk_clip.py",
        "tests/clipping/test_signal_clip.py",
        "tests/reliability/test_found_cases.py",
        _BAD_STATISTICS,
    ],
    "muonjax/_clipping/qk_clip.py": ["tests/clipping/test_qk_clip.py", "tests/clipping/test_sites.py"],
    "muonjax/_clipping/transform.py": [
        "tests/clipping/test_qk_clip.py",
        "tests/clipping/test_signal_clip.py",
        "tests/clipping/test_qk_clip_on_a_mesh.py",
    ],
    "muonjax/_clipping/statistics.py": [
        "tests/clipping/test_statistics.py",
        "tests/clipping/test_qk_clip.py",
    ],
    "muonjax/_clipping/signal_clip.py": ["tests/clipping/test_signal_clip.py"],
    "muonjax/_clipping/max_logits.py": ["tests/clipping/test_max_logits.py", _BAD_STATISTICS],
    "muonjax/_msign/mcsgn.py": ["tests/msign/test_mcsgn.py"],
    "muonjax/_msign": ["tests/msign/test_msign.py"],
    "muonjax/_adapters": ["tests/adapters/test_hadamard.py", "tests/linen", "tests/nnx"],
    "muonjax/_mesh/assignment.py": ["tests/mesh/test_assignment.py"],
    "muonjax/_mesh": ["tests/mesh/test_exchange.py", "tests/mesh/test_layouts.py"],
    "muonjax/linen": ["tests/clipping/test_watch.py"],
    "muonjax/nnx": ["tests/clipping/test_watch.py"],
    "pallas_kernels/_xla_workarounds.py": [_HALF],
    "pallas_kernels/_sharded.py": ["tests/pallas_kernels/test_sharded.py"],
    "pallas_kernels": [
        "tests/pallas_kernels/test_symmetric_product.py",
        "tests/pallas_kernels/test_blocked.py",
    ],
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
        "return jnp.where(number == 0, 1, number)",
        "return number",
        "a zero matrix is not divided by zero",
    ),
    Mutation(
        _NS + "normalization.py",
        "1 / schatten8, jax.lax.rsqrt(schatten4 * schatten8)",
        "1 / schatten8, jax.lax.rsqrt(schatten4)",
        "the Schatten-8 bound",
    ),
    Mutation(
        _NS + "normalization.py",
        "return scaled(x, rows), Normalized(",
        "return x, Normalized(",
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
        _NS + "gram_form.py",
        'settings.form == "auto" and n > 1.5 * m',
        'settings.form == "auto" and n > 0.5 * m',
        "the Gram form for wide matrices alone",
    ),
    Mutation(
        _NS + "gram_form.py",
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
    # The iteration in half precision
    Mutation(
        _NS + "half_precision.py",
        "gain = row[0] * gain",
        "gain = gain",
        "the factors a are gathered",
    ),
    Mutation(
        _NS + "half_precision.py",
        "q = q + c / a * square**2 * (inverse_bound",
        "q = q + c / a * square * (inverse_bound",
        "the scale of the quadratic term",
    ),
    Mutation(
        _NS + "half_precision.py",
        "fourth**-0.25, fourth**-0.125",
        "fourth**-0.25, fourth**-0.25",
        "the root of the bound",
    ),
    Mutation(
        _NS + "half_precision.py",
        "s = 0.99 * jnp.sum(",
        "s = 1.1 * jnp.sum(",
        "the sum over the basis is a lower bound",
    ),
    Mutation(
        _NS + "half_precision.py",
        "r = products.symmetric(once, y=q, c=once)",
        "r = products.symmetric(once, y=q)",
        "the second of two fused steps",
    ),
    Mutation(
        _NS + "half_precision.py",
        "products.symmetric(q, y=total, c=total)",
        "products.symmetric(q, y=total)",
        "the product of two fused maps",
    ),
    Mutation(
        _NS + "half_precision.py",
        "c / a * (square * inverse_bound) ** 2, b / a",
        "c / a * (square * inverse_bound), b / a",
        "the numbers of a kernel's step",
    ),
    Mutation(
        _NS + "half_precision.py",
        "product = self._gram_by_kernel(z, scale) if",
        "product = self._gram_by_kernel(z, 1.0) if",
        "the scale of a kernel's Gram matrix",
    ),
    Mutation(
        _NS + "half_precision.py",
        "_MAGNIFIED * square * inverse_bound, dtype",
        "square * inverse_bound, dtype",
        "the magnified Gram matrix of fused steps",
    ),
    Mutation(
        _NS + "half_precision.py",
        "settings.steps[-number:-1]) >",
        "settings.steps[-number:-1]) > 2 *",
        "which schedules join their last steps",
    ),
    Mutation(
        _NS + "half_precision.py",
        "jnp.maximum(s - bound**0.25, 0)",
        "s",
        "the largest eigenvalue is not one of the others",
    ),
    Mutation(
        _NS + "inverse_root.py",
        "return (*rows[:-1], tuple(c / top for c in rows[-1]))",
        "return (*rows[:-1], rows[-1])",
        "never above the inverse root",
    ),
    Mutation(
        _NS + "inverse_root.py",
        "start = scaled(h, inverse_bound) + _RIDGE * eye, scaled(eye, jnp.sqrt(inverse_bound))",
        "start = scaled(h, inverse_bound) + _RIDGE * eye, scaled(eye, inverse_bound)",
        "the scale of the inverse root",
    ),
    Mutation("muonjax/_policy.py", "return n > 1.5 * m", "return n > 15 * m", "which last steps are fused"),
    Mutation(
        "muonjax/_policy.py",
        "jnp.dtype(jnp.float32 if self.is_cpu else jnp.bfloat16)",
        "jnp.dtype(jnp.float32)",
        "accelerators compute in half precision",
    ),
    Mutation(
        "muonjax/_policy.py",
        "if count % size == 0 and size <= largest",
        "if size <= largest",
        "chunks divide the count",
    ),
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
    Mutation("muonjax/_hyperball.py", "2 * toward * _mean", "toward * _mean", "the length after a step"),
    Mutation(
        "muonjax/_hyperball.py",
        "(back - 1) * w",
        "back * w",
        "a step is a difference",
    ),
    Mutation(
        "muonjax/_hyperball.py",
        "others = [-eta.astype(u.dtype) * u for u in leaves]",
        "others = [eta.astype(u.dtype) * u for u in leaves]",
        "the sign of a step of a leaf that is no matrix",
    ),
    Mutation(
        "muonjax/_normalize_neurons.py",
        "factor = 1 / (jnp.sqrt(moment) + eps)",
        "factor = 1 / (moment + eps)",
        "the root of the second moment",
    ),
    Mutation(
        "muonjax/_normalize_neurons.py",
        "factor *= jnp.sqrt(norm2 / jnp.where(scaled2 == 0, 1, scaled2))",
        "factor *= jnp.sqrt(norm2)",
        "the norm of the update is kept",
    ),
    Mutation(
        "muonjax/_cautious_weight_decay.py",
        ".real >= 0",
        ".real <= 0",
        "only weights that the update agrees with decay",
    ),
    Mutation("muonjax/_monitor/monitor.py", "trace**2 /", "trace /", "the deviation from orthogonality"),
    Mutation(
        "muonjax/_monitor/monitor.py",
        "state.count % every_k == 0",
        "state.count % every_k == 1",
        "when it measures",
    ),
    Mutation(
        "muonjax/_monitor/monitor.py",
        'key.name in ("trace", "mu")',
        'key.name in ("trace",)',
        "Adam's first moment is momentum",
    ),
    Mutation(
        "muonjax/_monitor/metrics.py",
        "counts[name] = counts.get(name, -1) + 1",
        "counts[name] = 0",
        "a second clip has a name of its own",
    ),
    Mutation(
        "muonjax/_partition.py",
        "if found != [shape for _, shape in paths]:",
        "if len(found) != len(paths):",
        "a state of other shapes is refused",
    ),
    Mutation(
        "muonjax/_partition.py",
        "if shapes[0] != shapes[1]:",
        "if False:",
        "a gradient of another shape is refused",
    ),
    Mutation(
        "muonjax/_keywords.py", "if keyword not in parameters:", "if False:", "unknown keywords are explained"
    ),
    Mutation(
        "muonjax/_routing/siblings.py",
        "likely = likely or p.shape[2] < min(p.shape[:2])",
        "likely = likely or False",
        "(out, in, window) of a convolution over time",
    ),
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
        _CLIP + "factors.py",
        "(f.astype(wide) * p.astype(wide)).astype(p.dtype))",
        "f.astype(wide) * p.astype(wide))",
        "apply_qk_clip keeps the dtype",
    ),
    Mutation(
        _CLIP + "factors.py",
        "jnp.where(f == 1, u, f * u + (f - 1) * p)",
        "f * u + (f - 1) * p",
        "the update of a calm head keeps its bits",
    ),
    Mutation(
        _CLIP + "factors.py",
        "f * u + (f - 1) * p)",
        "f * u)",
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
        "maxima = {name: larger(s, state.running_max[name])",
        "maxima = {name: jnp.minimum(s, state.running_max[name])",
        "maxima accumulate",
    ),
    Mutation(
        _CLIP + "transform.py",
        "maxima = {name: largest_of_devices(s, self.axis_name) for name, s in maxima.items()}",
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
        "[functools.reduce(larger, values) for values in found]",
        "[values[-1] for values in found]",
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
        "depth**-0.5 if scale is None else scale",
        "depth**-0.5 if scale is None else depth**-0.5 * scale",
        "a given scale replaces 1/√d",
    ),
    Mutation(
        _CLIP + "max_logits.py",
        "yield ahead <= right",
        "yield ahead < right",
        "a query sees its own position",
    ),
    Mutation(
        _CLIP + "max_logits.py",
        "yield -ahead <= left",
        "yield -ahead < left",
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
        "logits = jnp.where(visible, logits, -jnp.inf)",
        "logits = jnp.where(visible, logits, 0.0)",
        "masked logits do not count",
    ),
    Mutation(
        _CLIP + "max_logits.py",
        "dtype = wide_dtype(query.dtype, key.dtype)",
        "dtype = jnp.promote_types(query.dtype, key.dtype)",
        "half-precision logits are summed in float32",
    ),
    Mutation(
        _CLIP + "max_logits.py",
        "top + cast * size",
        "top + cast * top",
        "the margin of a negative bound",
    ),
    Mutation(
        "muonjax/linen/_watch.py",
        'object.__setattr__(module, "attention_fn", function)\n\n    with',
        "pass\n\n    with",
        "a watched module is as before afterwards",
    ),
    Mutation(
        "muonjax/linen/_watch.py",
        "if not attends or module.normalize_qk:",
        "if not attends:",
        "normalized attention runs as it is",
    ),
    Mutation(
        "muonjax/linen/_watch.py",
        ".apply_gradients(bound, grads=grads, **kwargs).replace(tx=self.tx)",
        ".apply_gradients(bound, grads=grads, **kwargs)",
        "the state keeps its optimizer",
    ),
    Mutation(
        "muonjax/nnx/_watch.py",
        'if hasattr(kind, "_muonjax_watched"):',
        "if False:",
        "what is watched already stays so",
    ),
    Mutation(
        "muonjax/nnx/_watch.py",
        'kind.__call__(self, *args, **kwargs | {"sow_weights": True})',
        "kind.__call__(self, *args, **kwargs)",
        "a watched attention reports",
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
    Mutation(_ROUTING + "roles.py", '(BIAS, rf".*/({_VECTOR}|', '(BIAS, rf".*/(', "biases by their names"),
    Mutation(
        _ROUTING + "roles.py",
        'if is_attention and name == "in_proj":',
        "if False:",
        "PyTorch's fused projection",
    ),
    Mutation(
        _ROUTING + "roles.py",
        "if (_projection(name) or VALUE) is not VALUE}",
        "if _projection(name)}",
        "a value alone makes no attention",
    ),
    Mutation(
        _ROUTING + "siblings.py",
        'kernel["h"] % key["h"]',
        'kernel["h"] != key["h"]',
        "several queries share a key head",
    ),
    Mutation(
        _ROUTING + "matrices.py",
        "keys = (shape[heads] - queries) // 2",
        "keys = shape[heads] - queries",
        "keys and values share what the queries leave",
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
        "scaled(alpha, p) + scaled(beta, c.astype(p.dtype))",
        "scaled(alpha, p) + c.astype(p.dtype)",
        "beta",
    ),
    Mutation(
        "pallas_kernels/_reference.py",
        "if jnp.finfo(dtype).bits >= 32 else",
        "if jnp.finfo(dtype).bits >= 16 else",
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
