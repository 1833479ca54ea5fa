"""Write the numbers of README.md and docs: a block `<!-- results: NAME -->` … `<!-- end -->` comes from NAME's JSON.

python -m benchmarks.report            # rewrite
python -m benchmarks.report --check    # fail if a block is out of date
"""

import json
import pathlib
import re
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def _markdown(heads: list[str], rows: list[list[Any]]) -> str:
    lines = [heads, ["---"] * len(heads), *([str(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _born(content: dict[str, Any]) -> str:
    born = content["born"]
    return f"{born['device']}; jax {born['versions']['jax']}, optax {born['versions']['optax']}."


def training_sweep(content: dict[str, Any]) -> str:
    """Held-out loss by rate, and the sentence that it supports."""
    runs = content["runs"]
    rates = sorted({run["learning_rate"] for run in runs})
    lengths = sorted({(run["optimizer"], run["steps"]) for run in runs}, key=lambda key: (key[0], -key[1]))
    loss = {(r["optimizer"], r["steps"], r["learning_rate"]): r["held_out"] for r in runs}
    rows = []
    for optimizer, steps in lengths:
        cells = [loss.get((optimizer, steps, rate)) for rate in rates]
        least = min(cell for cell in cells if cell is not None)
        shown = ["" if c is None else f"**{c:.3f}**" if c == least else f"{c:.3f}" for c in cells]
        rows.append([f"{optimizer}, {steps} steps", *shown])
    table = _markdown(["held-out loss at rate", *(f"{rate:g}" for rate in rates)], rows)
    return f"{training_sweep_steps(content)}\n\n{table}\n\n{_born(content)}"


def training_sweep_steps(content: dict[str, Any]) -> str:
    """How many steps less MuonClip takes to AdamW's loss."""
    adamw = min((b for b in content["best"] if b["optimizer"] == "adamw"), key=lambda b: b["held_out"])
    enough = [
        b for b in content["best"] if b["optimizer"] == "muonclip" and b["held_out"] <= adamw["held_out"]
    ]
    first = min(enough, key=lambda b: b["steps"])
    return (
        f"MuonClip reaches {first['held_out']:.3f} in {first['steps']} steps, AdamW {adamw['held_out']:.3f} in "
        f"{adamw['steps']}: {first['steps'] / adamw['steps']:.2f} of the steps (one seed, each at its best rate)."
    )


def training_sweep_rates(content: dict[str, Any]) -> str:
    """Whether AdamW's learning rate carries over."""
    names = {"adamw": "AdamW", "muonclip": "MuonClip"}
    best = [f"{names[b['optimizer']]} in {b['steps']} steps: {b['learning_rate']:g}" for b in content["best"]]
    return f"Learning rate with the least held-out loss. {'; '.join(best)} (one seed)."


def muon_step(content: dict[str, Any]) -> str:
    """One optimizer step against Optax's."""
    rows = [
        [
            name,
            _ratio(row),
            f"{row['temporary_ratio']:.2f}",
            f"{row['compile_ratio']:.2f}",
            f"{row['polar_error_mean']:.2f}",
            f"{row['cosine_worst']:.2f}",
        ]
        for name, row in content["optimizers"].items()
    ]
    heads = [
        "",
        "time of a step",
        "temporary memory",
        "trace and compile",
        "polar error, mean",
        "cosine to the polar factor, worst",
    ]
    return f"{_markdown(heads, rows)}\n\n{_born(content)} Times and memory in units of Optax's."


def grouping(content: dict[str, Any]) -> str:
    """Several matrices at once, or one after the other."""
    sizes = list(content["shapes"][0]["chunks"])
    rows = [
        [
            " × ".join(map(str, row["shape"])),
            *(f"{row['chunks'][size]['ratio']:.2f}" for size in sizes),
            row["rule"],
        ]
        for row in content["shapes"]
    ]
    heads = ["matrices", *(f"{size} at once" for size in sizes), "the rule takes"]
    count = content["shapes"][0]["count"]
    return f"{_markdown(heads, rows)}\n\n{count} matrices; times in units of one after the other. {_born(content)}"


def grouping_compile(content: dict[str, Any]) -> str:
    """Compiling many equal leaves."""
    compiled = content["compile"]
    ratios = ", ".join(
        f"{name} {_ratio(row)}" for name, row in compiled["optimizers"].items() if name != "optax"
    )
    width = compiled["width"]
    return (
        f"Orthogonalizing {compiled['leaves']} leaves of {width} × {width}, to trace and compile, in units of Optax's "
        f"{compiled['optimizers']['optax']['seconds']:.1f} s: {ratios}. {_born(content)}"
    )


def newton_schulz(content: dict[str, Any]) -> str:
    """Error and time of each method, for three shapes."""
    width, shapes = content["width"], content["shapes"]
    rows = [
        [name, *(f"{shapes[aspect][name]['ratio']:.2f}; {_error(shapes[aspect][name])}" for aspect in shapes)]
        for name in next(iter(shapes.values()))
    ]
    heads = ["time ÷ Optax's; polar error (worst cosine)"]
    heads += [f"{width} × {int(aspect) * width}" for aspect in shapes]
    return f"{_markdown(heads, rows)}\n\n{_born(content)}"


def newton_schulz_exact(content: dict[str, Any]) -> str:
    """An ill-conditioned matrix, beside exact factorizations."""
    rows = [[name, f"{row['polar_error']:.1e}", _ratio(row)] for name, row in content["exact"].items()]
    width = content["width"]
    return (
        f"{_markdown(['', 'polar error', 'time'], rows)}\n\n{width} × {width}, condition number 1000; times in "
        f"units of the faster factorization's. {_born(content)}"
    )


def spectra(content: dict[str, Any]) -> str:
    """What deflation leaves to do, by width."""
    widths = content["widths"]
    ranks = sorted({int(key.split(" = ")[1]) for row in widths for key in row if key.startswith("fast")})
    rows = []
    for row in widths:
        cells = [row.get(f"fast, k = {k}") for k in ranks]
        shown = [
            "" if c is None else f"{c:.2f} / {row[f'balanced, k = {k}']:.2f}"
            for k, c in zip(ranks, cells, strict=True)
        ]
        rows.append([row["width"], f"{row['stable_rank']:.1f}", f"{row['median']:.1e}", *shown])
    heads = ["width", "stable rank", "median σ ÷ σ₁", *(f"k = {k}" for k in ranks)]
    return f"{_markdown(heads, rows)}\n\n{_born(content)}"


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"


def _error(row: dict[str, Any]) -> str:
    return f"{row['polar_error']:.2f} ({row['cosine_worst']:.2f})"


def clip_holds(content: dict[str, Any]) -> str:
    """What the clip does to a run that blows up."""
    without, clipped = (content["runs"][name] for name in ("muon", "muonclip"))
    return (
        f"Made to blow up (learning rate {content['learning_rate']:g}, threshold {content['threshold']:g}, "
        f"{content['steps']} steps), Muon alone reaches a logit of {without['largest_logit']:.0f}; with the clip the "
        f"largest is {clipped['largest_logit']:.0f}, for the statistic lags a step behind the weights."
    )


def sharding(content: dict[str, Any]) -> str:
    """What eight devices send and compute, against Optax's."""
    heads = ["24 matrices 512 × 2048, 8 devices", "", "MiB sent", "collectives", "flops ÷ an even share"]
    rows = []
    for row in content["rows"].values():
        for name, key in (("Optax", "optax"), ("muonjax", "muonjax_auto")):
            own = row[key]
            rows.append(
                [
                    row["title"] if name == "Optax" else "",
                    name,
                    f"{own['mebibytes']:.1f}",
                    own["collectives"],
                    f"{own['redundancy']:.2f}",
                ]
            )
    return (
        f"{_markdown(heads, rows)}\n\nPer device and step, counted in the compiled program; an even share is the same "
        f"optimizer's work on one device, divided by eight. {_born(content)}"
    )


def sharding_explicit(content: dict[str, Any]) -> str:
    """The same table under explicit axis types."""
    rows = content["rows"].values()
    counted = ("mebibytes", "collectives", "flops")
    same = all(row["muonjax_explicit"][key] == row["muonjax_auto"][key] for row in rows for key in counted)
    fails = sorted({row["optax_explicit"] for row in rows if row["optax_explicit"] != "runs"})
    count = sum(row["optax_explicit"] != "runs" for row in rows)
    equal = "the same numbers" if same else "other numbers (see the JSON)"
    return (
        f"With explicit axis types and no Distribution: {equal}. Optax's raises {' and '.join(fails)} in {count} of "
        f"the {len(rows)} layouts."
    )


def sharding_modes(content: dict[str, Any]) -> str:
    """Fewer matrices than devices."""
    rows = []
    for row in content["modes"]:
        for number, (mode, cost) in enumerate(row["modes"].items()):
            rows.append(
                [
                    "" if number else row["title"],
                    f'"{mode}"{" (auto)" * cost["auto"]}',
                    f"{cost['redundancy']:.2f}",
                    f"{cost['mebibytes']:.0f}",
                    cost["collectives"],
                ]
            )
    heads = ["matrices and mesh", "mode", "flops ÷ an even share", "MiB sent", "collectives"]
    return f"{_markdown(heads, rows)}\n\nOf the busiest device, as `plan` says, in float32. {_born(content)}"


def sharding_llama(content: dict[str, Any]) -> str:
    """A whole model."""
    rows = [
        [
            row["title"],
            f"{row['imbalance']:.2f}",
            f"{row['plan_seconds']:.1f}",
            f"{row['compile_seconds']:.0f}",
        ]
        for row in content["llama"]
    ]
    heads = ["224 matrices", "busiest device ÷ mean", "seconds to plan", "seconds to compile"]
    return f"{_markdown(heads, rows)}\n\n{_born(content)}"


def sharding_memory(content: dict[str, Any]) -> str:
    """Temporary memory of `orthogonalize`."""
    rows = []
    for row in content["memory"]:
        temporary, needed = row["temporary_mebibytes"], row["share_and_group_mebibytes"]
        rows.append([row["title"], f"{temporary:.1f}", f"{needed:.1f}", f"{temporary / needed:.2f}"])
    heads = ["a device", "temporary MiB", "its share of the momentum + its largest group, MiB", "ratio"]
    return f"{_markdown(heads, rows)}\n\n{_born(content)}"


def symmetric_product(content: dict[str, Any]) -> str:
    """What blocks save on a CPU, and where the rule takes them."""
    rows = []
    for result in content["results"]:
        plain, blocked, reference = (result["variants"][name] for name in ("plain", "blocked", "reference"))
        rows.append(
            [
                f"{' × '.join(map(str, result['shape']))}, {result['dtype']}",
                f"{1e3 * plain['seconds']:.2f} ms",
                _ratio(reference),
                _ratio(blocked),
                f'"{result["rule"]}"',
            ]
        )
    heads = ["X", "XLA's X Xᵀ, not mirrored", '"reference"', '"blocked"', "`None` takes"]
    return (
        f"{_markdown(heads, rows)}\n\nMedians, and quartiles, of the ratios to XLA's own product in the same "
        f"round. {_born(content)}"
    )


def aot_hopper(content: dict[str, Any]) -> str:
    """What each choice of tiles compiled to."""
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in content["results"]:
        tiles = row["tiles"]
        key = (tiles["rows"] * tiles["block"], tiles["block"], tiles["stages"], tiles["slots"], row["addend"])
        cases.setdefault(key, []).append(row)
    rows = [
        [
            f"{height}×{width}",
            stages,
            slots,
            "yes" if addend else "no",
            height // 2 * width // 128,
            max(row["registers"] for row in same),
            max(row["spilled_bytes"] for row in same),
        ]
        for (height, width, stages, slots, addend), same in sorted(cases.items())
    ]
    heads = [
        "tile",
        "stages",
        "squares waiting",
        "with C",
        "accumulators a thread",
        "registers a thread",
        "bytes spilled",
    ]
    born = content["born"]
    return (
        f"{_markdown(heads, rows)}\n\n{len(content['results'])} cases, {born['device']}; jax "
        f"{born['versions']['jax']}, ptxas {born['versions']['ptxas']}. A thread holds its accumulators after "
        "`setmaxnreg`, beyond the registers that ptxas counts for the launch."
    )


def aot_hopper_mesh(content: dict[str, Any]) -> str:
    """What a bare `jit` on a mesh compiled to."""
    mesh = content["mesh"]
    sent = ", ".join(mesh["collectives"]) or "no collective"
    return (
        f"Compiled ahead of time for {mesh['devices']} GPUs that share out the batch of "
        f"{' × '.join(map(str, mesh['shape']))} under a bare `jit`: each launches "
        f"{', '.join(mesh['launched_on_each'])}, with {sent}."
    )


def preset_training(content: dict[str, Any]) -> str:
    """What a better polar factor is worth in training."""
    rows = [
        [
            row["preset"],
            f"{row['learning_rate']:g}",
            f"{row['held_out']:.3f}",
            f"{row['ratio']:.3f}",
            f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}",
        ]
        for row in content["presets"]
    ]
    heads = ["iteration", "best learning rate", "held-out loss, mean", "÷ Optax's", "over the seeds"]
    seeds = content["presets"][0]["seeds"]
    return f"{_markdown(heads, rows)}\n\n{content['steps']} steps, {seeds} seeds. {_born(content)}"


def _whole_tasks(content: dict[str, Any]) -> list[str]:
    """The tasks of which every optimizer's best rate is bracketed, and which several seeds have run."""
    tasks = dict.fromkeys(row["task"] for row in content["best"])
    return [
        task
        for task in tasks
        if all(row["bracketed"] and row["seeds"] > 1 for row in content["best"] if row["task"] == task)
    ]


def training(content: dict[str, Any]) -> str:
    """Every optimizer at its best rate."""
    heads = ["", "", "best rate", "held-out loss", "accuracy", "a step ÷ AdamW's"]
    rows = [
        [
            row["task"],
            row["optimizer"],
            f"{row['learning_rate']:.2g}",
            f"{row['held_out']:.3f} ± {row['spread']:.3f}",
            f"{row['accuracy']:.3f}",
            f"{row['ratio']:.2f}",
        ]
        for row in content["best"]
        if row["task"] in _whole_tasks(content)
    ]
    seeds = min(row["seeds"] for row in content["best"] if row["task"] in _whole_tasks(content))
    return (
        f"{_markdown(heads, rows)}\n\n{content['steps']} steps; mean and standard deviation of {seeds} seeds. "
        f"{_born(content)}"
    )


def training_answers(content: dict[str, Any]) -> str:
    """The questions, answered task by task."""
    whole = _whole_tasks(content)
    rows, rates = [], []
    for answer in (a for a in content["answers"] if a["task"] in whole):
        if answer["question"] == "rate":
            rates.append(f"{2 ** answer['factors_of_two']:g} ({answer['task']}, {answer['of']})")
            continue
        gap = answer["gap"]
        shares = [answer.get("steps"), answer.get("time") if answer.get("steps") else None]
        rows.append(
            [
                answer["task"],
                answer["of"],
                answer["against"],
                f"{gap['mean']:+.4f} ({gap['low']:+.4f} to {gap['high']:+.4f})",
                *("" if share is None else f"{share:.2f}" for share in shares),
            ]
        )
    heads = ["", "", "against", "held-out loss, nats (over the seeds)", "its steps", "its time"]
    return (
        f"{_markdown(heads, rows)}\n\n"
        "The loss is the first one's minus the other's. Steps and time: what it takes to stay below AdamW's final "
        f"loss, in units of AdamW's. Best learning rates, in units of AdamW's: {', '.join(rates)}."
    )


def qk_clip_drift(content: dict[str, Any]) -> str:
    """What happens to the neighbours of a head that is clipped at every step."""
    heads = [
        "`shared_keys`",
        "hot head's logit",
        "calm heads' logits (20 at first)",
        "key weights",
        "calm query weights",
    ]
    rows = [
        [
            f'`"{row["shared_keys"]}"`',
            f"{row['hot_logit']:.0f}",
            f"{row['calm_logit']:.2g}",
            f"×{row['key_weight']:.2g}",
            f"×{row['calm_query_weight']:.3g}",
        ]
        for row in content["rows"]
    ]
    return f"{_markdown(heads, rows)}\n\n{_born(content)}"


def max_logits(content: dict[str, Any]) -> str:
    """What measuring the logits costs beside attention."""
    heads = ["program", "time against attention alone (quartiles)", "temporary memory, MiB"]
    rows = [
        [
            row["program"],
            _ratio(row),
            f"{row['temporary_mib']:.0f}",
        ]
        for row in content["rows"]
    ]
    shape = f"batch {content['batch']}, {content['length']} positions, {content['heads']} heads of {content['size']}"
    return f"{_markdown(heads, rows)}\n\nCausal, {shape}, {content['dtype']}; {_born(content)}"


def mla_clip_holds(content: dict[str, Any]) -> str:
    """Latent attention that blows up, with and without the clip."""
    without, clipped = content["rows"]
    return (
        f"In {content['steps']} steps at a rate of {content['learning_rate']:g}, Muon alone reaches a logit of "
        f"{without['largest_logit']:,.0f}, and its loss, {without['loss_lowest_20']:.2f} at its lowest mean over 20 "
        f"steps, climbs back to {without['loss_last_20']:.2f}. With the clip at "
        f"{content['threshold']:g} the largest logit is {clipped['largest_logit']:.0f}, for the statistic lags a step "
        f"behind the weights, and the loss falls to {clipped['loss_last_20']:.2f}. Of all heads at all steps the clip "
        f"scaled {clipped['share_above_threshold']:.0%}.\n\n{_born(content)}"
    )


def adversarial_input(content: dict[str, Any]) -> str:
    """What was tried, and how often it went wrong."""
    rows = [[row["input"], f"{row['passed']:,}", row["failed"]] for row in content["rows"]]
    passed, failed = (sum(row[kind] for row in content["rows"]) for kind in ("passed", "failed"))
    rows.append(["**all**", f"**{passed:,}**", f"**{failed}**"])
    return f"{_markdown(['input', 'examples passed', 'failed'], rows)}\n\n{_born(content)}"


def long_runs(content: dict[str, Any]) -> str:
    """Where the weights went, and what the analysis says."""
    heads = [
        "gradients",
        "precision",
        "fixed point",
        "RMS at the end",
        "largest of all steps",
        "bound",
        "finite",
    ]
    rows = [
        [
            row["gradients"],
            row["precision"],
            f"{row['fixed_point']:.4f}",
            f"{row['final_rms']:.4f}",
            f"{row['largest_rms']:.4f}",
            f"{row['bound']:.4f}",
            "yes" if row["finite"] else "**no**",
        ]
        for row in content["weights"]
    ]
    settings = f"η = {content['rate']:g}, λ = {content['weight_decay']:g}, r = {content['rms']:g}"
    return f"{_markdown(heads, rows)}\n\n{content['steps']:,} steps, {settings}. {_born(content)}"


def long_runs_logits(content: dict[str, Any]) -> str:
    """The largest attention logit of all steps."""
    heads = ["", "precision", "largest logit", "bound", "finite"]
    rows = [
        [
            "muonclip" if row["clip"] else "muon",
            row["precision"],
            f"{row['largest_logit']:.3f}",
            f"{row['bound']:.3f}" if row["clip"] else "",
            "yes" if row["finite"] else "**no**",
        ]
        for row in content["logits"]
    ]
    threshold = content["logits"][0]["threshold"]
    return (
        f"{_markdown(heads, rows)}\n\nThreshold {threshold:g}, {content['steps']:,} steps. {_born(content)}"
    )


def killed_runs(content: dict[str, Any]) -> str:
    """What became of runs and of checkpoints."""
    killed = content["killed"]
    sentence = (
        f"{killed['kills']} kills of {killed['runs']} runs of {killed['steps']} steps, {killed['while_writing']} of "
        f"them while a checkpoint was being written: {killed['runs_with_the_same_bits']} of {killed['runs']} runs "
        "ended with the parameters of an uninterrupted one, bit for bit, and with its losses at every step."
    )
    outcomes = ("refused", "same bits", "other bits", "crashed")
    rows = [[row["damage"], *(row[outcome] for outcome in outcomes)] for row in content["damaged"]]
    heads = [
        "a file of the newest checkpoint",
        "refused",
        "restored the same bits",
        "restored others",
        "crashed",
    ]
    return f"{sentence}\n\n{_markdown(heads, rows)}\n\n{_born(content)}"


def versions(content: dict[str, Any]) -> str:
    """Which versions pass."""
    heads = ["python", "jax", "flax", "optax", "commit", "passed", "failed", "skipped"]
    rows = [[row[head] for head in heads] for row in content["rows"]]
    return _markdown(heads, rows)


def msign_accuracy(content: dict[str, Any]) -> str:
    """Relative error of each gradient, by shape and condition number."""
    columns = [
        f"{mode}, {dtype}" for mode in ("polynomial", "polar") for dtype in ("float64", "float32", "bfloat16")
    ]
    rows = [
        [
            f"{row['shape']}, {row['condition']:g}",
            *(f"{row[column]:.1e}" for column in (*columns, "article, float64")),
        ]
        for row in content["accuracy"]
    ]
    heads = ["shape, condition", *columns, "Su's, float64"]
    return f"{_markdown(heads, rows)}\n\n{_born(content)}"


def msign_value(content: dict[str, Any]) -> str:
    """Polar error of the value in float32 beside that of an SVD, and what rounding x alone would do."""
    columns = {
        "msign": "value, float32",
        "SVD": "value, float32 SVD",
        "half an ulp of x": "value, half an ulp of x",
    }
    rows = [
        [f"{row['shape']}, {row['condition']:g}", *(f"{row[column]:.1e}" for column in columns.values())]
        for row in content["accuracy"]
    ]
    return _markdown(["shape, condition", *columns], rows)


def msign_truncated(content: dict[str, Any]) -> str:
    """Distance of a truncated schedule's gradients from the polar factor's."""
    columns = ["polynomial", "polar", "polar, polish=3"]
    rows = [[f"{row['condition']:g}", *(f"{row[c]:.1e}" for c in columns)] for row in content["truncated"]]
    return _markdown(["condition", *columns], rows)


def msign_deficient(content: dict[str, Any]) -> str:
    """What the polynomial's slope at zero does to a rank-deficient gradient."""
    rows = [
        [
            row["steps"],
            f"{row['slope at zero']:,.0f}",
            f"{row['polynomial, float64']:.1e}",
            f"{row['polynomial, float32']:.1e}",
            format(row["gradient's size"], ",.0f"),
        ]
        for row in content["deficient"]
    ]
    heads = [
        "steps",
        "slope at zero",
        "error, float64",
        "error, float32",
        "gradient's norm × that of x / that of the cotangent",
    ]
    return _markdown(heads, rows)


def msign_memory(content: dict[str, Any]) -> str:
    """Temporary memory of each way to differentiate."""
    columns = [name for name in content["memory"][0] if name != "case"]
    rows = [[row["case"], *(f"{row[name]:.1f}" for name in columns)] for row in content["memory"]]
    return f"{_markdown(['float32', *columns], rows)}\n\n{_born(content)}"


def msign_time(content: dict[str, Any]) -> str:
    """Time of each way to differentiate, against automatic differentiation in the same process."""
    rows = [
        [
            row["case"],
            row["variant"],
            _ratio(row),
        ]
        for row in content["time"]
        if row["variant"] != "plain autodiff, unrolled"
    ]
    heads = ["float32", "", "time against plain autodiff (quartiles)"]
    return f"{_markdown(heads, rows)}\n\n{_born(content)}"


def test_time_training(content: dict[str, Any]) -> str:
    """Loss of the two memories, and what each derivative costs in training."""
    names = {"msign": "msign", "linear": "linear attention"}
    rows = [
        [names[run["memory"]], run["gradient"] or "", f"{run['learning_rate']:g}", f"{run['fresh_loss']:.3f}"]
        for run in content["runs"]
    ]
    table = _markdown(["memory", "derivative of msign", "rate", "loss on fresh sequences"], rows)
    costs = [
        [row["gradient"], f"{row['temporary_mib']:.0f}", f"{row['milliseconds']:.0f}"]
        for row in content["gradients"]
    ]
    cost = _markdown(["derivative", "temporary memory of a training step, MiB", "ms"], costs)
    count = content["runs"][0]["parameters"]
    return (
        f"{count:,} parameters each, {content['steps']} steps, one seed; 1 is the loss of knowing nothing."
        f"\n\n{table}\n\n"
        f"A training step of a wider model, `{' '.join(content['wide'])}`:\n\n{cost}\n\n{_born(content)}"
    )


def hadamard_memory(content: dict[str, Any]) -> str:
    """Temporary memory of a gradient with LoHa adapters."""
    names = ["plain", "jax.checkpoint", "hadamard_weight", "hadamard_linear, auto"]
    rows = [
        [row["layers"], row["tokens"], *(f"{row[name]:.0f}" for name in names)]
        for row in content["memory"]
        if row["tokens"] in (64, 1024, 4096)
    ]
    heads = ["layers", "tokens", *(name.removesuffix(", auto") for name in names)]
    return f"{_markdown(heads, rows)}\n\nTemporary memory in MiB. {_born(content)}"


def hadamard_time(content: dict[str, Any]) -> str:
    """Time of the same gradients in units of plain differentiation's."""
    names = ["jax.checkpoint", "hadamard_weight", "hadamard_linear, rows", "hadamard_linear, kronecker"]
    found = {(row["layers"], row["tokens"], row["variant"]): row for row in content["time"]}
    rows = []
    for layers, tokens in dict.fromkeys(key[:2] for key in found):
        cells = [found[layers, tokens, name] for name in names]
        rows.append(
            [
                layers,
                tokens,
                *(_ratio(c) for c in cells),
            ]
        )
    return f"{_markdown(['layers', 'tokens', *names], rows)}\n\nTime (quartiles) in units of plain. {_born(content)}"


def hadamard_accuracy(content: dict[str, Any]) -> str:
    """The worst error of any gradient."""
    worst = {
        row["variant"]: max(v for v in row.values() if v != row["variant"]) for row in content["accuracy"]
    }
    plain = worst.pop("plain")
    return (
        f"The gradients of every variant, form and argument lie within {max(worst.values()):.1e} (relative) of the "
        f"same in float64; plain differentiation's within {plain:.1e}."
    )


def loha_finetune(content: dict[str, Any]) -> str:
    """Adapters by two optimizers, each at its best rate of those tried."""
    best = {}
    for run in content["runs"]:
        name = run["optimizer"]
        best[name] = min(best.get(name, run), run, key=lambda r: r["held_out"])
    heads = [
        "",
        "held-out loss by rate",
        "merged, at the best",
        "trainable parameters",
        "optimizer state, MiB",
        "peak temporary memory, MiB",
    ]
    rows = []
    for name, run in best.items():
        runs = [r for r in content["runs"] if r["optimizer"] == name]
        losses = ", ".join(
            f"**{r['held_out']:.3f}** ({r['learning_rate']:g})"
            if r is run
            else f"{r['held_out']:.3f} ({r['learning_rate']:g})"
            for r in runs
        )
        rows.append(
            [
                name,
                losses,
                f"{run['held_out_merged']:.3f}",
                f"{run['trainable']:,} of {content['parameters']:,}",
                f"{run['state_mib']:.2f}",
                f"{run['temporary_mib']:.0f}",
            ]
        )
    apart = max(run["merged_difference"] for run in content["runs"])
    return (
        f"{_markdown(heads, rows)}\n\nBefore: {content['before']:.3f}. {content['steps']} steps, rank "
        f"{content['rank']}, one seed; merged and unmerged logits differ by at most {apart:.1e}. {_born(content)}"
    )


BLOCKS = {
    "aot_hopper": aot_hopper,
    "aot_hopper.mesh": aot_hopper_mesh,
    "clip_holds": clip_holds,
    "adversarial_input": adversarial_input,
    "killed_runs": killed_runs,
    "grouping": grouping,
    "grouping.compile": grouping_compile,
    "long_runs": long_runs,
    "long_runs.logits": long_runs_logits,
    "hadamard.accuracy": hadamard_accuracy,
    "hadamard.memory": hadamard_memory,
    "hadamard.time": hadamard_time,
    "loha_finetune": loha_finetune,
    "max_logits": max_logits,
    "mla_clip_holds": mla_clip_holds,
    "msign.accuracy": msign_accuracy,
    "msign.deficient": msign_deficient,
    "msign.memory": msign_memory,
    "msign.time": msign_time,
    "msign.truncated": msign_truncated,
    "msign.value": msign_value,
    "muon_step": muon_step,
    "newton_schulz": newton_schulz,
    "newton_schulz.exact": newton_schulz_exact,
    "preset_training": preset_training,
    "qk_clip_drift": qk_clip_drift,
    "sharding": sharding,
    "sharding.explicit": sharding_explicit,
    "sharding.llama": sharding_llama,
    "sharding.memory": sharding_memory,
    "sharding.modes": sharding_modes,
    "spectra": spectra,
    "symmetric_product": symmetric_product,
    "test_time_training": test_time_training,
    "training": training,
    "training.answers": training_answers,
    "training_sweep": training_sweep,
    "training_sweep.rates": training_sweep_rates,
    "training_sweep.steps": training_sweep_steps,
    "versions": versions,
}


def render(text: str) -> str:
    """`text` with every block made anew."""

    def block(match: re.Match[str]) -> str:
        name = match.group(1)
        # `msign.memory` is one of several views of msign.json.
        source = name.partition(".")[0]
        content = json.loads((RESULTS / f"{source}.json").read_text())
        return f"<!-- results: {name} -->\n{BLOCKS[name](content)}\n<!-- end -->"

    return re.sub(r"<!-- results: ([\w.]+) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)


def main() -> None:
    """The command."""
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text()
        new = render(text)
        if new != text:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in sys.argv:
                path.write_text(new)
    if "--check" in sys.argv and stale:
        raise SystemExit(f"out of date: {', '.join(stale)}; run python -m benchmarks.report")


if __name__ == "__main__":
    main()
