"""Read a text as bytes: that of Python's own documentation, or any file."""

import hashlib
import pathlib

import numpy as np


class Text:
    """A byte sequence whose last 5 % are held out."""

    def __init__(self, path: str | None = None):
        if path is None:
            from pydoc_data import topics

            content = "\n".join(topics.topics.values()).encode()
        else:
            content = pathlib.Path(path).read_bytes()
        self.fingerprint = hashlib.sha256(content).hexdigest()[:16]
        data = np.frombuffer(content, np.uint8)
        cut = int(len(data) * 0.95)
        self.train, self.held_out = data[:cut], data[cut:]

    def batch(self, seed: int, step: int, size: int, context: int) -> np.ndarray:
        """Windows [size, context + 1] that depend on seed and step only, so that a resumed run sees the same ones."""
        if len(self.train) < context + 2:
            raise SystemExit(
                f"The text has {len(self.train)} bytes to train on; --context {context} needs more."
            )
        starts = np.random.default_rng((seed, step)).integers(
            0, len(self.train) - context - 1, size
        )
        return self.train[starts[:, None] + np.arange(context + 1)].astype(np.int32)

    def held_out_windows(self, context: int, most: int = 64) -> np.ndarray:
        """The first `most` whole windows [n, context + 1] of the held-out part."""
        count = min(most, len(self.held_out) // (context + 1))
        if count == 0:
            raise SystemExit(
                f"The held-out text has {len(self.held_out)} bytes, fewer than one --context {context}."
            )
        return self.held_out[: count * (context + 1)].reshape(count, context + 1).astype(np.int32)
