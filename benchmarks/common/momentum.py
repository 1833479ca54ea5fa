"""Make matrices with recorded singular values of momentum, random singular vectors and a known polar factor."""

import pathlib

import numpy as np

SPECTRA = pathlib.Path(__file__).parents[1] / "data" / "momentum_spectra.npz"


def spectra() -> list[np.ndarray]:
    """Singular values of 72 momentum matrices of a small transformer, each divided by its largest."""
    with np.load(SPECTRA) as file:
        return [np.sort(values)[::-1] / values.max() for values in file.values()]


def matrix(spectrum: np.ndarray, m: int, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A float32 matrix [m, n] with the spectrum interpolated to min(m, n) values, and its exact polar factor."""
    short, long = sorted((m, n))
    at, given = np.linspace(0, 1, short), np.linspace(0, 1, len(spectrum))
    s = np.exp(np.interp(at, given, np.log(spectrum + 1e-12)))
    u = np.linalg.qr(rng.standard_normal((short, short)))[0]
    v = np.linalg.qr(rng.standard_normal((long, short)))[0]
    x, polar = ((u * s) @ v.T).astype(np.float32), u @ v.T
    return (x, polar) if m <= n else (x.T, polar.T)


def polar_error(y: np.ndarray, polar: np.ndarray) -> float:
    """Root mean square error of the polar factor: ||Y - U V^T||_F / sqrt(min(m, n))."""
    return float(np.linalg.norm(np.asarray(y, np.float64) - polar) / np.sqrt(min(polar.shape)))


def cosine(y: np.ndarray, polar: np.ndarray) -> float:
    """Cosine between the update and the polar factor."""
    y = np.asarray(y, np.float64)
    return float(np.sum(y * polar) / (np.linalg.norm(y) * np.linalg.norm(polar)))
