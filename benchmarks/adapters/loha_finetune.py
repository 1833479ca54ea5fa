"""Fine-tune LoHa adapters on another text with Muon and with AdamW, at several learning rates.

`examples/loha_finetune.py` from a finished run of `examples/train_transformer.py`:

    python examples/train_transformer.py && python -m benchmarks.adapters.loha_finetune
"""

import pathlib
import tempfile

import jax
import loha_finetune as example
from flax import nnx
from text_data import Text

from benchmarks.common import measure

RATES = {"muon": (1e-2, 2e-2, 4e-2), "adamw": (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2)}


def main() -> None:
    args = example.parse()
    model, context = example.load(args.start)
    with tempfile.TemporaryDirectory() as folder:
        text = Text(
            args.data or example.standard_library(pathlib.Path(folder) / "source.txt")
        )
    rows = []
    for optimizer in args.optimizers:
        for rate in RATES[optimizer]:
            rows.append(example.adapt(model, optimizer, rate, text, context, args))
    settings = {
        name: getattr(args, name)
        for name in ("rank", "alpha", "steps", "batch", "seed")
    }
    before = float(example.evaluate(model, text.held_out_windows(context)))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    measure.write(
        "loha_finetune",
        {**settings, "before": before, "parameters": parameters, "runs": rows},
        rows,
    )


if __name__ == "__main__":
    main()
