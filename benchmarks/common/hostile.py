"""Make finite matrices that break factorizations and bounds: low rank, repeated, constant, sparse, at any scale."""

import numpy as np

# Of every float32 that is finite: the entries of the largest are clipped.
SCALES = (1e-38, 1e-37, 1e-30, 1e-20, 1e20, 1e30, 1e37, 1e38, 3e38)


def matrices(m: int, n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Finite float32 matrices [m, n], by name."""
    normal = rng.standard_normal((m, n))
    by_name = {}
    for rank in (1, 2, 3):
        left = rng.standard_normal((m, rank))
        right = rng.standard_normal((rank, n))
        by_name[f"rank {rank}"] = left @ right
    few_rows = rng.random(m)[:, None] < 0.05
    integers = rng.integers(-3, 4, (m, n))
    left = rng.integers(-3, 4, (m, min(3, m)))
    right = rng.integers(-3, 4, (min(3, m), n))
    rows = np.arange(m)
    columns = np.arange(n)
    column = rows[:, None]
    diagonal_block = column * 4 // m == columns * 4 // n
    last_corner = (column == m - 1) & (columns == 0)
    # Sinusoidal features at t = 0 are zero in every other column.
    odd = columns % 2
    by_name |= {
        "zero": np.zeros((m, n)),
        "constant": np.full((m, n), 0.37),
        "almost constant": 1 + 1e-3 * normal,
        "rows alike": np.outer(np.ones(m), normal[0]),
        "columns alike": np.outer(normal[:, 0], np.ones(n)),
        "every other column": np.outer(normal[:, 0], odd),
        "each row twice": normal[rows // 2],
        "each column twice": normal[:, columns // 2],
        "few rows repeated": normal[rows % max(1, m // 8)],
        "blocks": normal * diagonal_block,
        "constant blocks": 1.0 * diagonal_block,
        "one-hot, few": normal * few_rows,
        "one-hot, one": normal * (column == m // 2),
        "one entry": 1.0 * last_corner,
        "identity": np.eye(m, n),
        "triangle": np.tri(m, n),
        "integers": 1.0 * integers,
        "rank 3 of integers": 1.0 * (left @ right),
        "signs": rng.choice([-1.0, 1.0], (m, n)),
        "rank 1 and noise": by_name["rank 1"] + 1e-7 * normal,
        "rows of all scales": normal * np.geomspace(1e-30, 1e30, m)[:, None],
        "normal": normal,
    }
    for scale in SCALES:
        by_name[f"normal, {scale:g}"] = normal * scale
    for scale in SCALES:
        by_name[f"constant, {scale:g}"] = np.full((m, n), scale)
    largest = np.finfo(np.float32).max
    for name, x in by_name.items():
        by_name[name] = np.clip(x, -largest, largest).astype(np.float32)
    return by_name
