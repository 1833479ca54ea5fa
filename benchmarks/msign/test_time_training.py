"""Compare test-time training by msign with linear attention of equal size, and the derivatives of msign in it.

The example's model and task. Each memory at the better of two learning rates, and the msign memory also with the polar
derivative; memory and time of a training step with 64 x 64 fast weights.
"""

import test_time_training as example

from benchmarks.common import measure

RATES = (1e-2, 2e-2)
WIDE = [
    "--width",
    "256",
    "--heads",
    "4",
    "--pairs",
    "128",
    "--chunk",
    "64",
    "--batch",
    "8",
]


def run(kind: str, rate: float, steps: int, gradient: str = "polynomial") -> dict:
    flags = [
        "--learning-rate",
        str(rate),
        "--steps",
        str(steps),
        "--gradient",
        gradient,
    ]
    print(f"{kind}, rate {rate:g}, gradient {gradient}")
    row = {"learning_rate": rate, "gradient": gradient if kind == "msign" else None}
    return row | example.train(example.parse(flags), kind)


def main() -> None:
    steps = measure.options(__doc__, steps=600).steps
    runs = [run(kind, rate, steps) for kind in example.MEMORIES for rate in RATES]
    best = []
    for kind in example.MEMORIES:
        same = [row for row in runs if row["memory"] == kind]
        best.append(min(same, key=lambda row: row["fresh_loss"]))
    runs.append(run("msign", best[0]["learning_rate"], steps, "polar"))
    gradients = example.measure_gradients(example.parse(WIDE))
    example.draw(best, gradients, measure.IMAGES / "test_time_training.png")
    for row in runs:
        del row["losses"]
    results = {"steps": steps, "runs": runs, "wide": WIDE, "gradients": gradients}
    measure.write("test_time_training", results, runs, gradients)


if __name__ == "__main__":
    main()
