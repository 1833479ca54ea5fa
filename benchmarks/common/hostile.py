"""Make finite matrices that break factorizations and bounds: low rank, repeated, constant, sparse, at any scale."""

import numpy as np

# Of every float32 that is finite: the entries of the largest are clipped.
SCALES = (1e-38, 1e-37, 1e-30, 1e-20, 1e20, 1e30, 1e37, 1e38, 3e38)


def matrices(m: int, n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Finite float32 matrices [m, n], by name."""
    normal = rng.standard_normal((m, n))
    rows, columns = np.arange(m), np.arange(n)
    low = {
        f"rank {k}": rng.standard_normal((m, k)) @ rng.standard_normal((k, n))
        for k in (1, 2, 3)
    }
    found = low | {
        "zero": np.zeros((m, n)),
        "constant": np.full((m, n), 0.37),
        "almost constant": 1 + 1e-3 * normal,
        "rows alike": np.outer(np.ones(m), normal[0]),
        "columns alike": np.outer(normal[:, 0], np.ones(n)),
        "every other column": np.outer(
            normal[:, 0], columns % 2
        ),  # sinusoidal features at t = 0
        "each row twice": normal[rows // 2],
        "each column twice": normal[:, columns // 2],
        "few rows repeated": normal[rows % max(1, m // 8)],
        "blocks": normal * (rows[:, None] * 4 // m == columns * 4 // n),
        "constant blocks": 1.0 * (rows[:, None] * 4 // m == columns * 4 // n),
        "one-hot, few": normal * (rng.random(m) < 0.05)[:, None],
        "one-hot, one": normal * (rows == m // 2)[:, None],
        "one entry": 1.0 * ((rows == m - 1)[:, None] & (columns == 0)),
        "identity": np.eye(m, n),
        "triangle": np.tri(m, n),
        "integers": rng.integers(-3, 4, (m, n)).astype(float),
        "rank 3 of integers": (
            rng.integers(-3, 4, (m, min(3, m))) @ rng.integers(-3, 4, (min(3, m), n))
        ).astype(float),
        "signs": rng.choice([-1.0, 1.0], (m, n)),
        "rank 1 and noise": low["rank 1"] + 1e-7 * normal,
        "rows of all scales": normal * np.geomspace(1e-30, 1e30, m)[:, None],
        "normal": normal,
    }
    found |= {f"normal, {scale:g}": normal * scale for scale in SCALES}
    found |= {f"constant, {scale:g}": np.full((m, n), scale) for scale in SCALES}
    largest = np.finfo(np.float32).max
    return {
        name: np.clip(x, -largest, largest).astype(np.float32)
        for name, x in found.items()
    }
