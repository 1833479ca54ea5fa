"""Sweep learning rates: how many of AdamW's steps MuonClip needs for AdamW's final held-out loss.

Full schedules of every length, on the example's model and text. Runs that the JSON contains already are skipped, so the
sweep can be stopped and continued.
"""

import argparse
import json
import tempfile
import time

import train_transformer

from benchmarks.common import measure

RATES = {
    "adamw": (1e-3, 2e-3, 3e-3, 4e-3, 8e-3),
    "muonclip": (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
}


def one_run(optimizer: str, rate: float, steps: int, seed: int, extra: list[str]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--optimizer", optimizer, "--learning-rate", str(rate), "--steps", str(steps), *extra]
        arguments += [
            "--threshold",
            "100",
        ]  # no logit reaches it: the optimizers are compared without clipping
        arguments += ["--seed", str(seed), "--out", folder, "--quiet", "--sample", "0"]
        arguments += ["--checkpoint-every", str(steps), "--eval-every", str(steps)]
        start = time.perf_counter()
        loss = train_transformer.train(train_transformer.parse(arguments))
        seconds = time.perf_counter() - start
    row = {
        "optimizer": optimizer,
        "learning_rate": rate,
        "steps": steps,
        "seed": seed,
        "held_out": round(loss, 5),
    }
    return {**row, "seconds": round(seconds, 1), "provenance": measure.provenance()}


def best(rows, optimizer, steps):
    """The rate with the lowest mean loss over seeds."""
    losses = {}
    for row in rows:
        if (row["optimizer"], row["steps"]) == (optimizer, steps):
            losses.setdefault(row["learning_rate"], []).append(row["held_out"])
    if not losses:
        return None
    mean, rate = min((sum(v) / len(v), rate) for rate, v in losses.items())
    return {"optimizer": optimizer, "steps": steps, "learning_rate": rate, "held_out": round(mean, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="AdamW's steps")
    parser.add_argument(
        "--shares", type=float, nargs="*", default=[0.6, 0.5], help="MuonClip's steps in units of AdamW's"
    )
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--name", default="training_sweep", help="name of the JSON under benchmarks/results")
    args, extra = parser.parse_known_args()
    path = measure.RESULTS / f"{args.name}.json"
    rows = json.loads(path.read_text())["runs"] if path.exists() else []
    lengths = {"adamw": [args.steps], "muonclip": [round(args.steps * share) for share in args.shares]}
    plan = [
        (optimizer, rate, steps, seed)
        for seed in args.seeds
        for optimizer in ("muonclip", "adamw")
        for steps in lengths[optimizer]
        for rate in RATES[optimizer]
    ]
    for run in plan:
        if any((r["optimizer"], r["learning_rate"], r["steps"], r["seed"]) == run for r in rows):
            continue
        rows.append(one_run(*run, extra))
        winners = [best(rows, name, steps) for name in lengths for steps in lengths[name]]
        measure.write(args.name, {"best": [w for w in winners if w], "runs": rows})
    table = [{k: v for k, v in row.items() if k != "provenance"} for row in rows]
    print(measure.table(table), "", measure.table([w for w in winners if w]), sep="\n")


if __name__ == "__main__":
    main()
