"""Result blocks of the reliability runs."""

from collections.abc import Callable

from benchmarks.common.blocks import Block, Row


def _with_sum(content: Row) -> list[Row]:
    passed, failed = (sum(row[kind] for row in content["rows"]) for kind in ("passed", "failed"))
    cells = [{**row, "passed": f"{row['passed']:,}"} for row in content["rows"]]
    return [*cells, {"input": "**all**", "passed": f"**{passed:,}**", "failed": f"**{failed}**"}]


def _shares(what: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        counts = [row[f"{what}_{how}"] for how in ("right", "wrong", "refused")]
        if what == "parameters":
            return " / ".join(f"{100 * n / sum(counts):.3g} %" for n in counts)
        return " / ".join(f"{n:,}" for n in counts)

    return cell


def _by_reason(row: Row) -> list[tuple[str, list[str]]]:
    """What a strict mode stops, under the reason."""
    found: dict[str, list[str]] = {}
    for one in row["others"]:
        found.setdefault(one["reason"], []).append(one["function"].removeprefix("muonjax."))
    return list(found.items())


def _outcome(row: Row) -> str:
    if row["muonjax"] == row["adamw"]:
        return (
            "works" if row["adamw"] == "works" else "an error, as of `optax.adamw`: mask it (`optax.masked`)"
        )
    return row["muonjax"]


MODES = {
    "rank": 'jax_numpy_rank_promotion="raise"',
    "dtype": 'jax_numpy_dtype_promotion="strict"',
    "nan": "jax_debug_nans",
}
VERSIONS = ("python", "jax", "flax", "optax", "commit", "passed", "failed", "skipped")

BLOCKS = {
    "zoo": Block(
        columns={
            "models": "{trees}",
            "rule": "{rule}",
            "models: right / wrong / refused": _shares("trees"),
            "leaves": _shares("leaves"),
            "parameters": _shares("parameters"),
        },
    ),
    "programs": Block(
        columns={
            "what is read": "{rule}",
            "models: right / wrong / refused": _shares("models"),
            "leaves": _shares("leaves"),
            "attentions: found / refused with their reason / wrong": lambda row: (
                " / ".join(str(row[f"attentions_{how}"]) for how in ("found", "refused", "wrong"))
                if "attentions_found" in row
                else None
            ),
        },
    ),
    "adversarial_input": Block(
        rows=_with_sum, columns={"input": "{input}", "examples passed": "{passed}", "failed": "{failed}"}
    ),
    "unusual_use.strict_modes": Block(
        rows="strict_modes",
        columns={
            "mode": lambda row: f"`{MODES[row['mode']]}`",
            "cases that run": "{passed}",
            "not": lambda row: "; ".join(
                f"{', '.join(f'`{name}`' for name in names)}: {why}" for why, names in _by_reason(row)
            ),
        },
    ),
    "unusual_use.quick_tests": Block(
        rows="quick_tests",
        columns={
            "option of `pytest`": "`{option}`",
            "quick tests under it": "{tests:,}",
            "without it": "{without}, marked `{marker}`",
            "other libraries, without it": lambda row: "; ".join(
                f"`{one['function']}` {one['reason']}" for one in row["spared"]
            ),
        },
    ),
    "unusual_use.shard_map": Block(
        rows="shard_map", columns={"in `jax.shard_map`": "{test}", "cases": "{cases}", "passed": "{passed}"}
    ),
    "unusual_use.files": Block(
        rows="files", columns={"file": "{test}", "cases": "{cases}", "passed": "{passed}"}
    ),
    "unusual_use.leaves": Block(rows="leaves", columns={"leaf": "{leaf}", "`muon`": _outcome}),
    "long_runs": Block(
        rows="weights",
        columns={
            "gradients": "{gradients}",
            "precision": "{precision}",
            "fixed point": "{fixed_point:.4f}",
            "RMS at the end": "{final_rms:.4f}",
            "largest of all steps": "{largest_rms:.4f}",
            "bound": "{bound:.4f}",
            "finite": "{finite}",
        },
        text="{table}\n\n{steps:,} steps, η = {rate:g}, λ = {weight_decay:g}, r = {rms:g}. {machine}",
    ),
    "long_runs.logits": Block(
        rows="logits",
        columns={
            "": lambda row: "muonclip" if row["clip"] else "muon",
            "precision": "{precision}",
            "largest logit": "{largest_logit:.3f}",
            "bound": lambda row: f"{row['bound']:.3f}" if row["clip"] else None,
            "finite": "{finite}",
        },
        text="{table}\n\nThreshold {logits[0][threshold]:g}, {steps:,} steps. {machine}",
    ),
    "killed_runs": Block(
        rows="damaged",
        columns={
            "a file of the newest checkpoint": "{damage}",
            "refused": "{refused}",
            "restored the same bits": "{same bits}",
            "restored others": "{other bits}",
            "crashed": "{crashed}",
        },
        text="{killed[kills]} kills of {killed[runs]} runs of {killed[steps]} steps, {killed[while_writing]} of them "
        "while a checkpoint was being written: {killed[runs_with_the_same_bits]} of {killed[runs]} runs ended with the "
        "parameters of an uninterrupted one, bit for bit, and with its losses at every step.\n\n{table}\n\n{machine}",
    ),
    "mutations": Block(
        rows="sets",
        columns={
            "breaks": "{name}",
            "tried": "{tried}",
            "of them equivalent": "{equivalent}",
            "found at first": "{found_at_first} ({share_at_first:.1%}; {low:.0%} to {high:.0%})",
            "found now": "{found} ({share:.1%})",
        },
        text="{table}\n\nEach seed draws from the {lines:,} lines that decide something; in brackets Wilson's "
        "interval, of 95%. {machine}",
    ),
    "versions": Block(
        columns={head: f"{{{head}}}" for head in VERSIONS},
        text="{table}",
    ),
}
