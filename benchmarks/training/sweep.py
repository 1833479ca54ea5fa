"""Sweep learning rates: how many of AdamW's steps MuonClip needs for AdamW's final held-out loss.

Full schedules of every length, on the example's model and text, with one seed. Runs that the JSON contains already are
skipped, so the sweep can be stopped and continued.
"""

import tempfile

import train_transformer

from benchmarks.common import measure

RATES = {
    "adamw": (1e-3, 2e-3, 3e-3, 4e-3, 8e-3),
    "muonclip": (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
}
# MuonClip's runs are shorter: these shares of AdamW's steps.
SHARES = {"adamw": (1.0,), "muonclip": (0.6, 0.5)}


def held_out_loss(optimizer: str, rate: float, steps: int) -> float:
    """Train the example; no logit reaches the threshold, so the optimizers are compared without clipping."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--optimizer", optimizer, "--learning-rate", str(rate), "--steps", str(steps)]
        arguments += ["--threshold", "100", "--out", folder, "--quiet", "--sample", "0"]
        arguments += ["--checkpoint-every", str(steps), "--eval-every", str(steps)]
        return round(train_transformer.train(train_transformer.parse(arguments)), 5)


def main() -> None:
    args = measure.options(__doc__, steps=400)
    runs = measure.read("training_sweep").get("runs", [])
    for optimizer, rates in RATES.items():
        for share in SHARES[optimizer]:
            for rate in rates:
                steps = round(share * args.steps)
                key = {"optimizer": optimizer, "learning_rate": rate, "steps": steps}
                if not any(key.items() <= run.items() for run in runs):
                    runs.append({**key, "held_out": held_out_loss(optimizer, rate, steps)})
                    measure.write("training_sweep", {"runs": runs}, runs[-1:])


if __name__ == "__main__":
    main()
