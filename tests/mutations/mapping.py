"""Which tests are run on a break of a file: its own first, then those of the code that uses it."""

import pathlib

from tests.mutations.breaks import ROOT

_STEPS = ["tests/newton_schulz/test_iteration.py", "tests/newton_schulz/test_half_precision.py"]
_ROUTES = ["tests/names", "tests/zoo"]
_MESH = ["tests/mesh/test_layouts.py", "tests/mesh/test_exchange.py", "tests/mesh/test_distribution.py"]

# Beside the tests that are named as a file or its folder are. The longest path that fits counts.
USED_BY = {
    "muonjax/_newton_schulz/": ["tests/newton_schulz", "tests/reliability/test_adversarial_matrices.py"],
    "muonjax/_common/platform": [
        *_STEPS,
        "tests/optimizers/test_orthogonalize.py",
        "tests/mesh/test_explicit.py",
    ],
    "muonjax/_common/linalg": [*_STEPS, "tests/msign", "tests/optimizers/test_orthogonalize.py"],
    "muonjax/_matrices/matrix_view": [
        "tests/optimizers/test_orthogonalize.py",
        "tests/names/test_dimension_numbers.py",
    ],
    "muonjax/_matrices/batching": ["tests/optimizers/test_orthogonalize.py"],
    "muonjax/_optimizers/muon": [
        "tests/optimizers/test_first_mistakes.py",
        "tests/optimizers/test_optimizers.py",
    ],
    "muonjax/_optimizers/muonclip": ["tests/optimizers/test_optimizers.py", "tests/clip/test_qk_clip.py"],
    "muonjax/_transforms/orthogonalize": [
        "tests/optimizers/test_optimizers.py",
        "tests/optimizers/test_monitor.py",
    ],
    "muonjax/_transforms/update_size": ["tests/optimizers/test_optimizers.py"],
    "muonjax/_transforms/momentum": [
        "tests/optimizers/test_optimizers.py",
        "tests/optimizers/test_int8_momentum.py",
        "tests/mesh/test_explicit.py",
    ],
    "muonjax/_common/arguments": [
        "tests/optimizers/test_first_mistakes.py",
        "tests/optimizers/test_optimizers.py",
        "tests/clip/test_strict_modes.py",
    ],
    "muonjax/_optimizers/partition": [
        "tests/optimizers/test_first_mistakes.py",
        "tests/reliability/test_restored_elsewhere.py",
        "tests/optimizers/test_optimizers.py",
    ],
    "muonjax/_transforms/": ["tests/optimizers/test_monitor.py", "tests/optimizers/test_metrics.py"],
    "muonjax/_inspect/program": ["tests/inspect/test_inspect.py"],
    "muonjax/_inspect/value_and_grad": ["tests/inspect/test_value_and_grad.py"],
    "muonjax/_names/": _ROUTES,
    "muonjax/_common/trees": ["tests/inspect/test_inspect.py", "tests/clip/test_watch.py"],
    "muonjax/_inspect/": [
        "tests/inspect/test_inspect.py",
        "tests/inspect/test_report.py",
        "tests/inspect/test_value_and_grad.py",
        "tests/inspect/test_programs.py",
    ],
    "muonjax/_clip/": ["tests/clip", "tests/reliability/test_adversarial_attention.py"],
    "muonjax/loha": ["tests/loha", "tests/linen", "tests/nnx"],
    "muonjax/_mesh/": _MESH,
    "muonjax/linen": ["tests/linen", "tests/clip/test_in_flax.py", "tests/names"],
    "muonjax/nnx": [
        "tests/nnx",
        "tests/clip/test_in_flax.py",
        "tests/names",
        "tests/inspect/test_inspect.py",
    ],
    "pallas_kernels/": ["tests/pallas_kernels", *_STEPS],
}


def tests_of(file: str) -> list[str]:
    """Paths for pytest: the file's doctests, the tests of its name, of its folder, and of what uses it."""
    path = pathlib.Path(file)
    tests = (
        pathlib.Path("tests")
        if path.parent.name == "muonjax"
        else pathlib.Path("tests", path.parent.name.strip("_"))
    )
    own, whole = f"{tests}/test_{path.stem.strip('_')}.py", [str(tests)] if tests.name != "tests" else []
    users = USED_BY[fits] if (fits := max(filter(file.startswith, USED_BY), key=len, default="")) else []
    # Settings: what they are unless given, and what they refuse.
    settings = "tests/test_public_api.py", "tests/reliability/test_nonsense.py"
    return [file, *dict.fromkeys(name for name in (own, *settings, *users, *whole) if (ROOT / name).exists())]
