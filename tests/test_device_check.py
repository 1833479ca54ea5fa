"""`python -m muonjax` finds what is wrong on a device, and ships what it needs."""

import jax
import numpy as np
import pytest

import muonjax.__main__ as device_check
from muonjax.__main__ import main
from pallas_kernels import _xla_product
from tests.tools.tiers import thorough


@pytest.mark.thorough
def test_a_device_where_all_is_right(capsys):
    assert main(["--quick"]) == 0
    *lines, verdict = capsys.readouterr().out.splitlines()
    assert verdict == "Everything is right."
    ran = {line.split(",")[0] for line in lines if "at most" in line}
    assert ran == {"fast", "balanced", "accurate", "'reference'", "'blocked'"}
    timed = [line.split(":")[0] for line in lines if "compiles in" in line]
    assert timed == ["Optax", "fast", "balanced", "accurate"]


@pytest.fixture
def one_quick_check(monkeypatch):
    """Without the times, which do not depend on what the test breaks."""
    monkeypatch.setattr(device_check, "times", lambda _: iter(()))
    monkeypatch.setattr(
        device_check, "PRESETS", {"accurate": device_check.PRESETS["accurate"]}
    )
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.thorough
@pytest.mark.usefixtures("one_quick_check")
def test_a_kernel_that_is_wrong_gives_exit_status_1(monkeypatch, capsys):
    right = _xla_product.blocked_product
    monkeypatch.setattr(
        _xla_product, "blocked_product", lambda *a, **k: 1.02 * right(*a, **k)
    )
    assert main(["--quick"]) == 1
    out = capsys.readouterr().out
    assert "WRONG: 'blocked', float32" in out
    assert "FAILED" in out.splitlines()[-1]


@pytest.mark.thorough
@pytest.mark.usefixtures("one_quick_check")
def test_a_kernel_that_does_not_compile_gives_exit_status_1(monkeypatch, capsys):
    def fails(*_, **__):
        raise jax.errors.JaxRuntimeError("no such instruction")

    monkeypatch.setattr(_xla_product, "blocked_product", fails)
    assert main(["--quick"]) == 1
    assert "no such instruction" in capsys.readouterr().out


@pytest.mark.nan
@pytest.mark.usefixtures("one_quick_check")
@pytest.mark.parametrize(
    "broken", [thorough("nan"), thorough("lower precision"), thorough("not orthogonal")]
)
def test_results_that_are_off_give_exit_status_1(broken, monkeypatch, capsys):
    right = device_check.newton_schulz
    change = {
        "nan": lambda y: y.at[2, 5].set(np.nan),
        "lower precision": lambda y: (
            y + 0.05 * jax.random.normal(jax.random.key(0), y.shape)
        ),
        "not orthogonal": lambda y: 1.3 * y,
    }[broken]
    monkeypatch.setattr(
        device_check, "newton_schulz", lambda x, settings: change(right(x, settings))
    )
    assert main(["--quick"]) == 1
    assert "WRONG: accurate" in capsys.readouterr().out
