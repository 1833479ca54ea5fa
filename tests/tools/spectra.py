"""Singular values that are hard to normalize or to deflate."""

import numpy as np


def adversarial(m: int) -> dict[str, np.ndarray]:
    """Spectra of m values, by name; m / 8 directions are shrunk at most."""
    few = m // 16
    more = 5 * m // 24
    tenth = m // 10
    return {
        "rank one": np.r_[1, np.zeros(m - 1)],
        "low rank": np.r_[np.ones(more), np.zeros(m - more)],
        "flat": np.ones(m),
        "log to 1e-4": np.geomspace(1, 1e-4, m),
        "plateau of fewer than are shrunk": np.r_[
            np.ones(few),
            np.full(m - few, 0.3),
        ],
        "plateau of more than are shrunk": np.r_[
            np.ones(more),
            np.full(m - more, 0.3),
        ],
        "two levels": np.r_[
            np.ones(m // 2),
            np.full(m - m // 2, 0.05),
        ],
        "three levels": np.r_[
            np.ones(3),
            np.full(tenth, 1e-2),
            np.full(m - 3 - tenth, 1e-4),
        ],
        "one dominant": np.r_[1, np.full(m - 1, 1e-3)],
        "slow decay": np.linspace(1, 0.3, m),
    }
