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
    at = np.linspace(0, 1, m)
    given = np.linspace(0, 1, len(spectrum))
    return np.exp(np.interp(at, given, np.log(spectrum + 1e-12)))


def matrix(
    spectrum: np.ndarray, m: int, n: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A float32 matrix [m, n] with the spectrum interpolated to min(m, n) values, and its exact polar factor."""
    short, long = sorted((m, n))
    s = interpolated(spectrum, short)
    u = np.linalg.qr(rng.standard_normal((short, short)))[0]
    v = np.linalg.qr(rng.standard_normal((long, short)))[0]
    x = ((u * s) @ v.T).astype(np.float32)
    polar = u @ v.T
    return (x, polar) if m <= n else (x.T, polar.T)


def recorded(m: int, n: int, every: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Matrices [m, n] with one in `every` of the recorded spectra, and their polar factors."""
    rng = np.random.default_rng(0)
    matrices = []
    polars = []
    for spectrum in spectra()[::every]:
        x, polar = matrix(spectrum, m, n, rng)
        matrices.append(x)
        polars.append(polar)
    return matrices, polars


def polar_error(y: np.ndarray, polar: np.ndarray) -> float:
    """Root mean square error of the polar factor: ||Y - U V^T||_F / sqrt(min(m, n))."""
    distance = np.linalg.norm(np.asarray(y, np.float64) - polar)
    return float(distance / np.sqrt(min(polar.shape)))


def errors(results: Sequence[Any], polars: Sequence[np.ndarray]) -> dict[str, float]:
    """Mean and worst polar error, the worst cosine to the factor, and the largest singular value of any result."""
    distances = []
    cosines = []
    largest = []
    for result, polar in zip(results, polars, strict=True):
        y = np.asarray(result, np.float64)
        norms = np.linalg.norm(y) * np.linalg.norm(polar)
        distances.append(polar_error(y, polar))
        cosines.append(float(np.sum(y * polar) / norms))
        largest.append(float(np.linalg.norm(y, 2)))
    return {
        "mean": float(np.mean(distances)),
        "worst": max(distances),
        "worst_cosine": min(cosines),
        "largest": max(largest),
    }
