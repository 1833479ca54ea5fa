"""Compare dtypes of Muon's momentum by held-out loss after equal steps, on two texts, over seeds.

    python -m benchmarks.training.int8_momentum                 # everything; can be stopped and continued
    python -m benchmarks.training.int8_momentum --minutes 10    # starts no run after ten minutes

The small transformers of `variants`, at the best rates that it found for plain Muon: only the dtype differs. The second
text is the source of Python's standard library. Beside the losses, what one rounding does to the update of matrices
with recorded spectra of momentum.
"""

import functools
import itertools
import operator
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import loha_finetune
import numpy as np
import text_data

import muonjax
from benchmarks.common import measure, momentum
from benchmarks.training.book import Book, Rows, command_line, summary
from benchmarks.training.small_models import Model
from benchmarks.training.small_runs import SIZES, Recipe, Trainer
from muonjax._momentum import dequantize, quantize

DTYPES = ("float32", "bfloat16", "int8")
TEXTS = ("documentation", "source")


@functools.cache
def text(name: str) -> text_data.Text:
    """One of the two texts."""
    if name == "documentation":
        return text_data.Text()
    with tempfile.TemporaryDirectory() as folder:
        return text_data.Text(str(loha_finetune.standard_library(pathlib.Path(folder) / "source.txt")))


def best_rates() -> tuple[float, float]:
    """Of plain Muon's matrices, and of the parameters that AdamW trains."""
    found = measure.read("variants")
    (muon,) = [row for row in found["variants"] if (row["layout"], row["variant"]) == ("MHA", "muon")]
    return muon["learning_rate"], found["adam_rate"]


def _in_eight_bits(x: jax.Array, block: int = 128, power: int = 1, *, at_random: bool = False) -> jax.Array:
    """x rounded to 255 levels for each block, evenly in |x|^(1 / power)."""
    blocks = x.reshape(-1, block)
    largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    level = 127 * jnp.abs(blocks / largest) ** (1 / power)
    noise = jax.random.uniform(jax.random.key(0), level.shape) if at_random else 0.5
    rounded = (jnp.floor(level + noise) / 127) ** power
    return (jnp.sign(blocks) * rounded * largest).reshape(x.shape)


def _with_least_noise(x: jax.Array, bits: int = 8) -> jax.Array:
    """x with the noise that no code of so many bits a number can avoid, were its entries independent and normal."""
    noise = jax.random.normal(jax.random.key(0), x.shape)
    return x + 2.0**-bits * jnp.linalg.norm(x) / jnp.linalg.norm(noise) * noise


ROUNDINGS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "bfloat16": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "int8": lambda x: dequantize(*quantize(x)),
    "int8, blocks of 64": lambda x: _in_eight_bits(x, 64),
    "int8, blocks of 32": lambda x: _in_eight_bits(x, 32),
    "int8, rounded at random": lambda x: _in_eight_bits(x, at_random=True),
    "int8, square roots": lambda x: _in_eight_bits(x, power=2),
    "the least noise of 8 bits (Shannon)": _with_least_noise,
}


def rounding_errors(m: int = 192, n: int = 768) -> list[dict[str, Any]]:
    """What one rounding of the input adds to the polar error, over the recorded spectra, by format."""
    rng = np.random.default_rng(0)
    polar = jax.jit(muonjax.newton_schulz)
    roundings = {name: jax.jit(rounding) for name, rounding in ROUNDINGS.items()}
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in ROUNDINGS}
    for spectrum in momentum.spectra():
        x, exact = momentum.matrix(spectrum, m, n, rng)
        before = momentum.polar_error(polar(x), exact)
        for name, rounding in roundings.items():
            rounded = rounding(x)
            noise = float(jnp.linalg.norm(rounded - x) / jnp.linalg.norm(x))
            rows[name].append((noise, before, momentum.polar_error(polar(rounded), exact) - before))
    keys = ("noise", "error", "added")
    return [
        {
            "momentum": name,
            **dict(zip(keys, np.mean(values, 0).tolist(), strict=True)),
            "worst": values[-1][2],
        }
        for name, values in ((name, sorted(found, key=lambda row: row[2])) for name, found in rows.items())
    ]


def table(runs: Rows) -> list[dict[str, Any]]:
    """For each text and dtype the losses over the seeds, and the differences to float32's, seed by seed."""
    return summary(
        runs, ("text", "momentum"), lambda text, dtype: (text, DTYPES[0]), "difference", operator.sub
    )


def main(arguments: list[str] | None = None) -> None:
    args = command_line(__doc__, "int8_momentum", **SIZES).parse_args(arguments)
    rate, adam_rate = best_rates()
    settings = {size: getattr(args, size) for size in SIZES} | {"learning_rate": rate, "adam_rate": adam_rate}
    book = Book(args.name, settings, args.minutes)
    model = Model("MHA", args.layers, args.width, args.head_size, args.context)

    @functools.cache
    def trainer(name: str, dtype: str) -> Trainer:
        return Trainer(model, Recipe(momentum=dtype), args.steps, args.batch, text(name))

    def run(name: str, dtype: str, seed: int) -> float:
        return trainer(name, dtype).run(rate, adam_rate, seed)

    for seed, name, dtype in itertools.product(args.seeds, TEXTS, DTYPES):
        key = {"text": name, "momentum": dtype, "seed": seed}
        book.ensure(key, functools.partial(run, name, dtype, seed))
    rows = table(book.rows)
    book.write(rows, dtypes=rows, rounding=rounding_errors())


if __name__ == "__main__":
    main()
