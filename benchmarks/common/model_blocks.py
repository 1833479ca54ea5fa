"""Result blocks of the counted model: one update's figures beside Optax's on the same chip and matrices."""

from typing import Any

from benchmarks.common.blocks import Block, Row, read

# In the order of the table.
METHODS = (
    "Optax, float32",
    "Optax, bfloat16",
    "MaxText, bfloat16",
    "5 Polar Express steps, no deflation",
    "6 Polar Express steps, no deflation",
    "fast",
    "balanced",
    'fast, "hopper"',
    'balanced, "hopper"',
)


def rows(content: Row) -> list[dict[str, Any]]:
    """Each row with its ratios to Optax in bfloat16, and in time to the better of Optax's two types."""
    results = [row for row in content["results"] if row["tree"] != "small"]  # which is for the test alone
    groups = [(row["chip"], row["tree"]) for row in results if row["method"] == METHODS[0]]

    def order(row: Row) -> tuple[int, int]:
        return groups.index((row["chip"], row["tree"])), METHODS.index(row["method"])

    shown = []
    for row in sorted(results, key=order):
        if "error" in row:
            shown.append({**row, "figures": {}, "time": "does not compile"})
            continue
        peers = {
            other["method"]: other
            for other in results
            if (other["chip"], other["tree"]) == (row["chip"], row["tree"]) and "error" not in other
        }
        base = peers["Optax, bfloat16"]
        best = min(
            peers[name]["milliseconds"] for name in ("Optax, bfloat16", "Optax, float32") if name in peers
        )
        seconds = row["compile_processor_seconds"] / base["compile_processor_seconds"]
        shown.append(
            {
                **row,
                "time": f"{row['milliseconds']:.1f} ms",
                "ratio": f"{row['milliseconds'] / best:.2f}",
                "gigabytes": f"{row['gigabytes']:.1f}",
                "temporary": f"{row['temporary_megabytes']:.0f} MB",
                "compile": f"{seconds:.1f}",
            }
        )
    return shown


def block(*, chips: bool, compile_time: bool) -> Block:
    """The table of gpu_model.json or tpu_model.json."""

    def cell(key):
        return lambda row: row.get(key, "")

    columns: dict[str, Any] = {"chip": "{chip}"} if chips else {}
    columns |= {
        "matrices": "{tree}",
        "method": "{method}",
        "modelled": "{time}",
        "÷ Optax's": cell("ratio"),
        "launches": cell("launches"),
        "GB moved": cell("gigabytes"),
        "temporary": cell("temporary"),
    }
    if compile_time:
        columns["trace and compile ÷ Optax's"] = cell("compile")
    return Block(
        rows=rows,
        columns=columns,
        text="{table}\n\nModelled, not measured: {machine} Ratios of time: to the better of Optax's types.",
    )


def headline(presets: tuple[str, ...] = ("fast", "balanced")) -> Block:
    """Our presets' modelled time beside the better of Optax's types: a row for each chip, a column for each tree."""

    def chips(content: Row) -> dict[str, dict[str, dict[str, Any]]]:
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for row in [*rows(content), *rows(read("tpu_model"))]:
            found.setdefault(row["chip"], {}).setdefault(row["tree"], {})[row["method"]] = row
        return found

    def columns(content: Row) -> dict[str, Any]:
        def cell(tree: str):
            return lambda row: (
                "; ".join(row[tree][name]["ratio"] for name in presets) if tree in row else None
            )

        trees = dict.fromkeys(tree for found in chips(content).values() for tree in found)
        return {"; ".join(presets): "{name}"} | {tree.replace("x", " × "): cell(tree) for tree in trees}

    def compiling(content: Row) -> Row:
        (trees,) = (found for chip, found in chips(content).items() if chip == "H100")
        return {"compiling": ", ".join(f"{trees[tree][presets[-1]]['compile']} ({tree})" for tree in trees)}

    return Block(
        rows=chips,
        columns=columns,
        text="{table}\n\nModelled, no accelerator was timed: compiled ahead of time and counted, in units of the "
        "better of Optax's types, so that above 1 is slower than Optax. To compile for an H100 takes, in the same "
        "units: {compiling}. jax {provenance[versions][jax]}, optax {provenance[versions][optax]}.",
        values=compiling,
    )
