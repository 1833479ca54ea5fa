"""Float64 NumPy: what the mathematics says, slowly and plainly; and the inputs that tests share."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muonjax import NewtonSchulz, polar_express

# The classical quintic of order three at 1, the limit of every Polar Express schedule (Higham, "Functions of Matrices",
# 2008, table 5.1).
CLASSICAL = ((15 / 8, -10 / 8, 3 / 8),)
# For tests of what is around the orthogonalization: it compiles in a fraction of the time.
SHORT = NewtonSchulz(coefficients=polar_express(1), deflation=0)


def normal(*shape, seed=0, scale=1.0, dtype=jnp.float32):
    """Independent standard normal numbers, times `scale`."""
    return on_device(scale * np.random.default_rng(seed).standard_normal(shape), dtype)


def normal_tree(shapes, seed=0, dtype=jnp.float32):
    """A tree of independent standard normal arrays, of a tree of shapes."""
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda s: isinstance(s, tuple))
    arrays = [normal(*s, seed=[seed, i], dtype=dtype) for i, s in enumerate(leaves)]
    return structure.unflatten(arrays)


def gradients(step, params):
    """Standard normal arrays like the parameters, other ones at each step."""
    shapes = jax.tree.map(jnp.shape, params)
    return jax.tree.map(
        lambda p, g: g.astype(p.dtype), params, normal_tree(shapes, seed=step)
    )


def disturbed(params):
    """Every parameter moved, as training would."""
    return jax.tree.map(lambda p, g: p + 0.3 * g, params, gradients(0, params))


def trained(tx, params, gradients, **extra):
    """Parameters and state after a compiled step by each of the gradients."""
    state = tx.init(params)
    update = jax.jit(tx.update)
    for g in gradients:
        updates, state = update(g, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params, state


def queries_and_keys(*shape, dtype=jnp.float32):
    """The kernels of one attention, of ones."""
    return {name: {"kernel": jnp.ones(shape, dtype)} for name in ("query", "key")}


def on_device(x, dtype=jnp.float32):
    """NumPy's x, which NumPy rounds: JAX would compile a program for each shape, as it does without a dtype."""
    return jnp.asarray(np.asarray(x, dtype), dtype)


def polar(x):
    """U V^H of x [..., m, n] by singular value decomposition; directions with a zero singular value stay
    zero."""
    u, s, vh = np.linalg.svd(
        np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64),
        full_matrices=False,
    )
    keep = s > 1e-13 * s.max(axis=-1, keepdims=True)
    return (u * keep[..., None, :]) @ vh


def polar_error(y, x):
    """||y - polar(x)||_F / sqrt(min(m, n)), the largest over the batch."""
    difference = np.asarray(y).astype(np.complex128) - polar(x)
    return float(
        np.max(np.linalg.norm(difference, axis=(-2, -1))) / np.sqrt(min(x.shape[-2:]))
    )


def with_spectrum(s, n, seed=0, tall=False):
    """A float64 matrix [len(s), n] (transposed if tall) with singular values s and random singular
    vectors."""
    rng = np.random.default_rng(seed)
    m = len(s)
    u = np.linalg.qr(rng.standard_normal((m, m)))[0]
    v = np.linalg.qr(rng.standard_normal((n, m)))[0]
    x = (u * np.asarray(s)) @ v.T
    return x.T if tall else x


def newton_schulz(x, rows):
    """The plain iteration with Frobenius normalization, as Jordan wrote it."""
    x = np.asarray(x, np.float64)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / np.linalg.norm(x)
    for a, b, c in rows:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def muon_steps(
    weight,
    gradients,
    *,
    rows,
    learning_rate,
    decay=0.95,
    nesterov=True,
    weight_decay=0.1,
    rms=0.2,
):
    """Muon on one matrix, straight from the papers: the weights after each gradient."""
    momentum = np.zeros_like(weight)
    history = []
    for g in gradients:
        momentum = decay * momentum + g
        direction = g + decay * momentum if nesterov else momentum
        update = rms * np.sqrt(max(weight.shape)) * newton_schulz(direction, rows)
        weight = weight - learning_rate * (update + weight_decay * weight)
        history.append(weight)
    return history
