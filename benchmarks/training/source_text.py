"""The Python sources that are installed here, as tokens in two files: those to train on, and those held out.

    python -m benchmarks.training.source_text runs/pretrain/packages packages

A file is held out or not by the hash of its content, and a content is taken once, so nothing of the order or the place
of an installation changes the split.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import pathlib
import platform
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

import numpy as np

VOCABULARY = 16384
END = "<|end|>"  # after each file
LARGEST = 500_000  # bytes of a file; longer ones are tables that a program has written
SAMPLE = 30_000_000  # bytes that the tokenizer is trained on


def sources(corpus: str) -> Iterator[tuple[str, str, pathlib.Path]]:
    """Package, version and path of every Python file, of the standard "library" or of all "packages" too."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if "site-packages" not in path.parts:
            yield "python", platform.python_version(), path
    if corpus == "library":
        return
    packages = importlib.metadata.distributions()
    for package in sorted(packages, key=lambda package: package.name):
        for path in package.files or ():
            if path.suffix == ".py":
                place = pathlib.Path(str(package.locate_file(path)))
                yield package.name, package.version, place


def read(corpus: str) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """The files by the hashes of their contents, in the order of these, and what was taken of each package."""
    contents: dict[str, bytes] = {}
    packages: dict[tuple[str, str], dict[str, Any]] = {}
    for name, version, path in sources(corpus):
        content = path.read_bytes() if path.is_file() else b""
        key = hashlib.sha256(content).hexdigest()
        if key in contents or not 0 < len(content) <= LARGEST:
            continue
        contents[key] = content
        empty = {"name": name, "version": version, "files": 0, "bytes": 0}
        row = packages.setdefault((name, version), empty)
        row["files"] += 1
        row["bytes"] += len(content)
    return dict(sorted(contents.items())), list(packages.values())


def is_held_out(key: str) -> bool:
    """Two files of a hundred."""
    return int(key, 16) % 50 == 0


def byte_pairs(contents: dict[str, bytes]) -> Any:
    """A byte-pair encoding, trained on files to train on."""
    from tokenizers import ByteLevelBPETokenizer

    def sample() -> Iterator[str]:
        left = SAMPLE
        for key, content in contents.items():
            if left > 0 and not is_held_out(key):
                left -= len(content)
                yield content.decode(errors="replace")

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        sample(), vocab_size=VOCABULARY, special_tokens=[END], show_progress=False
    )
    return tokenizer


def encode(tokenizer: Any, files: list[bytes]) -> np.ndarray:
    """The tokens of all files, each with one for its end; without a tokenizer bytes, which end with 0."""
    if tokenizer is None:
        text = b"".join(content + b"\0" for content in files)
        return np.frombuffer(text, np.uint8).astype(np.uint16)
    tokens = []
    for start in range(0, len(files), 500):
        some = files[start : start + 500]
        texts = [content.decode(errors="replace") for content in some]
        for encoding in tokenizer.encode_batch(texts):
            tokens.append(np.array([*encoding.ids, 0], np.uint16))
    return np.concatenate(tokens)


def prepare(folder: pathlib.Path, corpus: str) -> dict[str, Any]:
    """Write `folder` unless it is there; returns what was taken, without a path of this machine."""
    record = folder / "record.json"
    if record.exists():
        return json.loads(record.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    contents, packages = read(corpus)
    pairs = corpus == "packages" and importlib.util.find_spec("tokenizers") is not None
    tokenizer = byte_pairs(contents) if pairs else None
    row: dict[str, Any] = {
        "hash": hashlib.sha256("".join(contents).encode()).hexdigest()[:16],
        "tokenizer": f"byte pairs, {VOCABULARY} entries" if pairs else "bytes",
        "files": len(contents),
        "bytes": sum(map(len, contents.values())),
    }
    parts: dict[str, list[bytes]] = {"train": [], "held_out": []}
    for key, content in contents.items():
        parts["held_out" if is_held_out(key) else "train"].append(content)
    for part, files in parts.items():
        tokens = encode(tokenizer, files)
        tokens.tofile(folder / f"{part}.bin")
        row[part] = {
            "files": len(files),
            "bytes": sum(map(len, files)),
            "tokens": len(tokens),
        }
    row["packages"] = packages
    record.write_text(json.dumps(row))  # last: it says that the rest is whole
    return row


def windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    """The context + 1 tokens from each start on: [starts] -> [starts, context + 1]."""
    places = starts[:, None] + np.arange(context + 1)
    return tokens[places].astype(np.int32)


class Text:
    """Windows of the tokens of a folder that `prepare` wrote."""

    def __init__(self, folder: pathlib.Path):
        self.record = json.loads((folder / "record.json").read_text())
        self.train = np.memmap(folder / "train.bin", np.uint16, "r")
        self.held_out = np.memmap(folder / "held_out.bin", np.uint16, "r")

    def batch(self, seed: int, step: int, size: int, context: int) -> np.ndarray:
        """Windows [size, context + 1]; an epoch has each once, in an order that depends on the seed only."""
        count = (len(self.train) - 1) // context
        epochs, places = np.divmod(np.arange(step * size, (step + 1) * size), count)
        order = places.copy()
        for epoch in np.unique(epochs):
            shuffled = np.random.default_rng((seed, epoch)).permutation(count)
            order[epochs == epoch] = shuffled[places[epochs == epoch]]
        return windows(self.train, order * context, context)

    def held_out_batches(self, most: int, size: int, context: int) -> np.ndarray:
        """The first `most` or fewer batches [n, size, context + 1] of the held-out tokens."""
        count = min(most, (len(self.held_out) - 1) // (context * size))
        starts = np.arange(count * size) * context
        batches = windows(self.held_out, starts, context)
        return batches.reshape(count, size, context + 1)


if __name__ == "__main__":
    prepare(pathlib.Path(sys.argv[1]), sys.argv[2])
