"""Recipes on eight devices have the losses of one device."""

import numpy as np
import pytest
from jax.sharding import AxisType

from tests.examples.programs import EXAMPLES


@pytest.fixture(autouse=True)
def recipes(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES / "recipes"))


def check(losses, expected):
    """Equal up to float32's rounding in another order of sums, and the training is one that learns."""
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["muon", "normuon", "muonh"])
@pytest.mark.parametrize("mesh", [(8, 1), (4, 2)])
def test_nnx_metadata(name, mesh, capsys):
    from nnx_fsdp import train

    check(train(*mesh, name), train(1, 1, name))
    rows, columns = 32 // mesh[0], 64 // mesh[1]
    assert (
        f"each device has ({rows}, {columns}) of up/kernel" in capsys.readouterr().out
    )


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_zero1(kind, capsys):
    from zero1 import train

    check(train(8, kind), train(1, kind))
    momentum = capsys.readouterr().out.splitlines()[0]
    assert momentum in ("each device has (4, 64) of a momentum (32, 64)",
                        "each device has (8, 32) of a momentum (64, 32)")  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("first", "then"), [((8, 1), (2, 4)), ((4, 2), (1, 1)), ((1, 1), (1, 8))]
)
def test_another_mesh(first, then, tmp_path):
    from another_mesh import train

    folder = tmp_path / "checkpoint"
    losses = train(*first, folder) + train(*then, folder, restore=True)
    check(losses, train(1, 1, tmp_path / "whole", steps=6))
