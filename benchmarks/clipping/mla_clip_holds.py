"""Measure whether QK-Clip bounds the logits of latent attention that is made to diverge, and whether it learns.

`examples/mla_qk_clip.py` at its default size; draws docs/images/mla_qk_clip.png.
"""

import pathlib

import mla_qk_clip as example
import numpy as np

from benchmarks.common import measure

IMAGES = pathlib.Path(__file__).parents[2] / "docs" / "images"


def main() -> None:
    args = example.parse()
    runs = {
        "Muon": example.train(args, clip=False),
        "MuonClip": example.train(args, clip=True),
    }
    rows = [
        {
            "optimizer": name,
            "loss_lowest_20": round(
                float(np.convolve(run["loss"], np.full(20, 1 / 20), "valid").min()), 4
            ),
            "loss_last_20": round(float(run["loss"][-20:].mean()), 4),
            "largest_logit": round(float(run["maxima"].max()), 2),
            "share_above_threshold": round(
                float((run["maxima"] > args.threshold).mean()), 4
            ),
        }
        for name, run in runs.items()
    ]
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    measure.write("mla_clip_holds", {**settings, "rows": rows}, rows)
    # After the JSON: a picture drawn before it would mark the recorded commit as changed.
    example.draw(runs, args.threshold, IMAGES / "mla_qk_clip.png")


if __name__ == "__main__":
    main()
