"""Result blocks of the msign benchmarks."""

from benchmarks.common.blocks import Block

MODES = ("polynomial", "polar")
DTYPES = ("float64", "float32", "bfloat16")
CASE = {"shape, condition": "{shape}, {condition:g}"}
BASELINE = "plain autodiff, unrolled"

BLOCKS = {
    "msign.accuracy": Block(
        rows="accuracy",
        columns={
            **CASE,
            **{f"{mode}, {dtype}": f"{{{mode}, {dtype}:.1e}}" for mode in MODES for dtype in DTYPES},
            "Su's, float64": "{article, float64:.1e}",
        },
    ),
    "msign_half_precision": Block(
        columns={
            **CASE,
            **{name: f"{{{name}:.1e}}" for name in ("polynomial", "polynomial, 5 steps", "polar")},
        },
    ),
    "msign.value": Block(
        rows="accuracy",
        columns={
            **CASE,
            "msign": "{value, float32:.1e}",
            "SVD": "{value, float32 SVD:.1e}",
            "half an ulp of x": "{value, half an ulp of x:.1e}",
        },
        text="{table}",
    ),
    "msign.truncated": Block(
        rows="truncated",
        columns={
            "condition": "{condition:g}",
            **{name: f"{{{name}:.1e}}" for name in ("polynomial", "polar", "polar, polish=3")},
        },
        text="{table}",
    ),
    "msign.deficient": Block(
        rows="deficient",
        columns={
            "steps": "{steps}",
            "slope at zero": "{slope at zero:,.0f}",
            "error, float64": "{polynomial, float64:.1e}",
            "error, float32": "{polynomial, float32:.1e}",
            "gradient's norm × that of x / that of the cotangent": "{gradient's size:,.0f}",
        },
        text="{table}",
    ),
    "msign.memory": Block(
        rows="memory",
        columns=lambda content: {
            "float32": "{case}",
            **{name: f"{{{name}:.1f}}" for name in content["memory"][0] if name != "case"},
        },
    ),
    "msign.time": Block(
        rows=lambda content: [row for row in content["time"] if row["variant"] != BASELINE],
        columns={
            "float32": "{case}",
            "": "{variant}",
            "time against plain autodiff (quartiles)": "{row:quartiles}",
        },
    ),
    "test_time_training": Block(
        rows="runs",
        columns={
            "memory": lambda row: {"msign": "msign", "linear": "linear attention"}[row["memory"]],
            "derivative of msign": "{gradient}",
            "learning rate": "{learning_rate:g}",
            "loss on fresh sequences": "{fresh_loss:.3f}",
        },
        text="{runs[0][parameters]:,} parameters each, {steps} steps, one seed; 1 is the loss of a model that knows "
        "nothing.\n\n{table}\n\nA training step of a wider model, `{flags}`:\n\n{costs}\n\n{machine}",
        values=lambda content: {"flags": " ".join(content["wide"]), "costs": COSTS.render(content)},
    ),
}
COSTS = Block(
    rows="gradients",
    columns={
        "derivative": "{gradient}",
        "temporary memory of a training step, MiB": "{temporary_mib:.0f}",
        "ms": "{milliseconds:.0f}",
    },
    text="{table}",
)
