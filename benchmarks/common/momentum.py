"""Make matrices with recorded singular values of momentum, random singular vectors and a known polar factor."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

SPECTRA = pathlib.Path(__file__).parents[1] / "data" / "momentum_spectra.npz"


def spectra() -> list[np.ndarray]:
    """Singular values of 72 momentum matrices of a small transformer, each divided by its largest."""
    with np.load(SPECTRA) as file:
        return [np.sort(values)[::-1] / values.max() for values in file.values()]


def interpolated(spectrum: np.ndarray, m: int) -> np.ndarray:
    """A spectrum, interpolated to m values."""
    at, given = np.linspace(0, 1, m), np.linspace(0, 1, len(spectrum))
    return np.exp(np.interp(at, given, np.log(spectrum + 1e-12)))


def adversarial(m: int) -> dict[str, np.ndarray]:
    """Spectra of m values that are hard to normalize or to deflate, by name; m / 8 directions are shrunk at most."""
    few, more, tenth = m // 16, 5 * m // 24, m // 10
    return {
        "rank one": np.r_[1, np.zeros(m - 1)],
        "low rank": np.r_[np.ones(more), np.zeros(m - more)],
        "flat": np.ones(m),
        "log to 1e-4": np.geomspace(1, 1e-4, m),
        "plateau of fewer than are shrunk": np.r_[np.ones(few), np.full(m - few, 0.3)],
        "plateau of more than are shrunk": np.r_[np.ones(more), np.full(m - more, 0.3)],
        "two levels": np.r_[np.ones(m // 2), np.full(m - m // 2, 0.05)],
        "three levels": np.r_[
            np.ones(3), np.full(tenth, 1e-2), np.full(m - 3 - tenth, 1e-4)
        ],
        "one dominant": np.r_[1, np.full(m - 1, 1e-3)],
        "slow decay": np.linspace(1, 0.3, m),
    }


def matrix(
    spectrum: np.ndarray, m: int, n: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A float32 matrix [m, n] with the spectrum interpolated to min(m, n) values, and its exact polar factor."""
    short, long = sorted((m, n))
    s = interpolated(spectrum, short)
    u = np.linalg.qr(rng.standard_normal((short, short)))[0]
    v = np.linalg.qr(rng.standard_normal((long, short)))[0]
    x, polar = ((u * s) @ v.T).astype(np.float32), u @ v.T
    return (x, polar) if m <= n else (x.T, polar.T)


def polar_error(y: np.ndarray, polar: np.ndarray) -> float:
    """Root mean square error of the polar factor: ||Y - U V^T||_F / sqrt(min(m, n))."""
    return float(
        np.linalg.norm(np.asarray(y, np.float64) - polar) / np.sqrt(min(polar.shape))
    )


def cosine(y: np.ndarray, polar: np.ndarray) -> float:
    """Cosine between the update and the polar factor."""
    y = np.asarray(y, np.float64)
    return float(np.sum(y * polar) / (np.linalg.norm(y) * np.linalg.norm(polar)))


def errors(results: Sequence[Any], polars: Sequence[np.ndarray]) -> dict[str, float]:
    """Mean and worst polar error, the worst cosine, and the largest singular value of any result."""
    pairs = [
        (np.asarray(y, np.float64), polar)
        for y, polar in zip(results, polars, strict=True)
    ]
    return {
        "mean": float(np.mean([polar_error(*pair) for pair in pairs])),
        "worst": max(polar_error(*pair) for pair in pairs),
        "worst_cosine": min(cosine(*pair) for pair in pairs),
        "largest": max(float(np.linalg.norm(y, 2)) for y, _ in pairs),
    }
