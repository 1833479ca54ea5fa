"""Measure whether QK-Clip bounds the attention logits of a run that is made to diverge.

The example's model at many times its best learning rate, with Muon alone and with MuonClip; draws both.
"""

import argparse
import pathlib
import tempfile

import plots
import train_transformer

from benchmarks.common import measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--learning-rate", type=float, default=0.06)
    parser.add_argument("--threshold", type=float, default=20.0)
    args, extra = parser.parse_known_args()
    results, runs = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for optimizer in ("muon", "muonclip"):
            out = pathlib.Path(folder) / optimizer
            flags = [
                f"--optimizer={optimizer}",
                f"--out={out}",
                "--quiet",
                "--sample=0",
                *extra,
            ]
            flags += [
                f"--{name.replace('_', '-')}={x}" for name, x in vars(args).items()
            ]
            held_out = train_transformer.train(train_transformer.parse(flags))
            runs[optimizer] = plots.read(out / "metrics.csv")
            logits = [
                max(x for name, x in row.items() if name.startswith("logit/"))
                for row in runs[optimizer]
            ]
            results[optimizer] = {
                "held_out": round(held_out, 4),
                "largest_logit": round(max(logits), 2),
                "steps_above_1.5_thresholds": sum(
                    value > 1.5 * args.threshold for value in logits
                ),
            }
    figure = plots.plot(runs, args.threshold, train_transformer.LOSS_NAME)
    plots.save(figure, measure.IMAGES / "clip_holds.png")
    measure.write("clip_holds", {**vars(args), "runs": results}, results)


if __name__ == "__main__":
    main()
