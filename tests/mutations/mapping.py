"""Which tests are run on a break of a file: its own first, then those of the code that uses it."""

import pathlib

from tests.mutations.breaks import ROOT

# Besides the tests named after a file, and those of its room. The longest path that fits counts.
USED_BY = {
    "muonjax/__init__": "optimizers/test_first_mistakes.py",
    "muonjax/__main__": "test_device_check.py",
    "muonjax/_clip/": "reliability/test_adversarial_attention.py inspect/test_value_and_grad.py",
    "muonjax/_clip/clip_by_statistic": "clip/test_qk_clip.py optimizers/test_first_mistakes.py",
    "muonjax/_common/": "optimizers/test_optimizers.py optimizers/test_orthogonalize.py",
    "muonjax/_common/arguments": "optimizers test_strict_modes.py clip msign mesh",
    "muonjax/_common/linalg": "newton_schulz msign optimizers/test_orthogonalize.py",
    "muonjax/_common/nnx_models": "nnx inspect/test_inspect.py inspect/test_value_and_grad.py names",
    "muonjax/_common/explicit_axes": "mesh optimizers/test_orthogonalize.py",
    "muonjax/_common/platform_policy": "test_platform_policy.py newton_schulz optimizers/test_orthogonalize.py mesh",
    "muonjax/_common/trees": "test_trees.py inspect/test_inspect.py names optimizers clip nnx",
    "muonjax/_inspect/": "inspect/test_inspect.py inspect/test_measure.py inspect/test_programs.py",
    "muonjax/_matrices/": "optimizers/test_orthogonalize.py names/test_routes.py mesh",
    "muonjax/_mesh/": "mesh/test_layouts.py reliability/test_restored_elsewhere.py clip/test_qk_clip_on_a_mesh.py",
    "muonjax/_names/": "zoo",
    "muonjax/_newton_schulz/": "reliability/test_adversarial_matrices.py test_platform_policy.py",
    "muonjax/_optimizers/": "optimizers/test_first_mistakes.py reliability/test_restored_elsewhere.py clip",
    "muonjax/_transforms/": "optimizers/test_optimizers.py optimizers",
    "muonjax/_transforms/momentum": "optimizers/test_int8_momentum.py mesh/test_explicit.py optimizers",
    "muonjax/linen": "linen clip/test_in_flax.py",
    "muonjax/loha": "loha linen nnx",
    "muonjax/nnx": "nnx clip/test_in_flax.py inspect/test_inspect.py",
    "muonjax/optax_contrib": "optimizers/test_optimizers.py",
    "pallas_kernels/": "newton_schulz/test_full_precision.py newton_schulz/test_half_precision.py",
}


def tests_of(file: str) -> list[str]:
    """Paths for pytest: the file's doctests, the tests of its name, of what uses it, and of its room."""
    path = pathlib.Path(file)
    own = sorted(
        str(p.relative_to(ROOT))
        for p in ROOT.glob(f"tests/**/test_{path.stem.strip('_')}.py")
    )
    users = USED_BY.get(
        max(filter(file.startswith, USED_BY), key=len, default=""), ""
    ).split()
    # Settings: what they are unless given, and what they refuse.
    named = [
        f"tests/{name}"
        for name in ("test_public_api.py", "reliability/test_nonsense.py", *users)
    ]
    missing = [name for name in named if not (ROOT / name).exists()]
    if missing := missing + [
        key for key in USED_BY if not any(ROOT.glob(f"{key.rstrip('/')}*"))
    ]:
        raise SystemExit(
            f"tests/mutations/mapping.py names what is not there: {missing}"
        )
    room = f"tests/{path.parent.name.strip('_')}"
    return [
        file,
        *dict.fromkeys([*own, *named, *([room] if (ROOT / room).exists() else [])]),
    ]
