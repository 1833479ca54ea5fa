"""Result blocks of the LoHa benchmarks."""

from typing import Any

from benchmarks.common.blocks import Block, Row


def _times(content: Row) -> list[dict[str, Any]]:
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for time in content["time"]:
        row = rows.setdefault((time["layers"], time["tokens"]), {k: time[k] for k in ("layers", "tokens")})
        row[time["variant"]] = time
    return list(rows.values())


def _worst_errors(content: Row) -> Row:
    worst = {
        row["variant"]: max(v for v in row.values() if v != row["variant"]) for row in content["accuracy"]
    }
    return {"plain": worst.pop("plain"), "ours": max(worst.values())}


def _by_optimizer(content: Row) -> list[dict[str, Any]]:
    """Each optimizer's best run, and the losses of all of its runs."""
    rows = []
    for name in dict.fromkeys(run["optimizer"] for run in content["runs"]):
        runs = [run for run in content["runs"] if run["optimizer"] == name]
        best = min(runs, key=lambda run: run["held_out"])
        cells = ["{held_out:.3f} ({learning_rate:g})", "**{held_out:.3f}** ({learning_rate:g})"]
        losses = ", ".join(cells[run is best].format(**run) for run in runs)
        rows.append({**best, "losses": losses, "parameters": content["parameters"]})
    return rows


VARIANTS = ("jax.checkpoint", "hadamard_weight", "hadamard_linear, rows", "hadamard_linear, kronecker")

BLOCKS = {
    "hadamard.memory": Block(
        rows=lambda content: [row for row in content["memory"] if row["tokens"] in (64, 1024, 4096)],
        columns={
            "layers": "{layers}",
            "tokens": "{tokens}",
            "plain": "{plain:.0f}",
            "jax.checkpoint": "{jax.checkpoint:.0f}",
            "hadamard_weight": "{hadamard_weight:.0f}",
            "hadamard_linear": "{hadamard_linear, auto:.0f}",
        },
        text="{table}\n\nTemporary memory in MiB. {machine}",
    ),
    "hadamard.time": Block(
        rows=_times,
        columns={
            "layers": "{layers}",
            "tokens": "{tokens}",
            **{name: f"{{{name}:quartiles}}" for name in VARIANTS},
        },
        text="{table}\n\nTime (quartiles) in units of plain. {machine}",
    ),
    "hadamard.accuracy": Block(
        text="The gradients of every variant, form and argument are within {ours:.1e} (relative) of the same in "
        "float64; those of plain differentiation within {plain:.1e}.",
        values=_worst_errors,
    ),
    "loha_finetune": Block(
        rows=_by_optimizer,
        columns={
            "": "{optimizer}",
            "held-out loss by rate": "{losses}",
            "merged, at the best": "{held_out_merged:.3f}",
            "trainable parameters": "{trainable:,} of {parameters:,}",
            "optimizer state, MiB": "{state_mib:.2f}",
            "peak temporary memory, MiB": "{temporary_mib:.0f}",
        },
        text="{table}\n\nBefore: {before:.3f}. {steps} steps, rank {rank}, one seed; merged and unmerged logits differ "
        "by at most {apart:.1e}. {machine}",
        values=lambda content: {"apart": max(run["merged_difference"] for run in content["runs"])},
    ),
}
