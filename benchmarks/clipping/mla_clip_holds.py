"""Measure whether QK-Clip bounds the logits of latent attention that is made to diverge, and whether it learns.

`examples/mla_qk_clip.py` at its default size; draws docs/images/mla_qk_clip.png.
"""

import mla_qk_clip as example
import numpy as np

from benchmarks.common import measure


def main() -> None:
    args = example.parse()
    runs = {
        "Muon": example.train(args, clip=False),
        "MuonClip": example.train(args, clip=True),
    }
    rows = []
    for name, run in runs.items():
        means = np.convolve(run["loss"], np.full(20, 1 / 20), "valid")
        row = {
            "loss_lowest_20": means.min(),
            "loss_last_20": means[-1],
            "largest_logit": run["maxima"].max(),
            "share_above_threshold": (run["maxima"] > args.threshold).mean(),
        }
        rows.append(
            {"optimizer": name} | {key: round(float(x), 4) for key, x in row.items()}
        )
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    measure.write("mla_clip_holds", {**settings, "rows": rows}, rows)
    # After the JSON: a picture drawn before it would mark the recorded commit as changed.
    example.draw(runs, args.threshold, measure.IMAGES / "mla_qk_clip.png")


if __name__ == "__main__":
    main()
