"""The general rule: any signal that is linear in its factors, of which QK-Clip is one."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import muonjax
from tests.clip.attentions import X, multi_head, normal, zero_update


def max_output(params, group=1, whole=False):
    y = jnp.abs(X @ params["out"]["kernel"] + params["out"]["bias"]).max((0, 1))
    return y.max() if whole else y.reshape(-1, group).max(1)


def output_site(entries=None):
    return muonjax.Site(
        path="out",
        scales=(
            muonjax.Scale(path="kernel", rank=2, entries=entries),
            muonjax.Scale(path="bias", rank=1, entries=entries, optional=True),
        ),
    )


@pytest.mark.parametrize(("entries", "signal"), [
    (None, max_output),
    (3, functools.partial(max_output, group=8)),
    (1, functools.partial(max_output, whole=True)),
])  # fmt: skip
def test_max_output(entries, signal):
    """The largest output of each output dimension, of each group of eight, of the layer."""
    params = {"out": {"kernel": normal(16, 24), "bias": normal(24, seed=1, scale=2.0)}}
    before = signal(params)
    threshold = float(jnp.median(before)) if before.ndim else 7.0
    tx = muonjax.signal_clip(threshold, output_site(entries))
    zeros = jax.tree.map(jnp.zeros_like, params)
    statistics = {"out": before}
    updates, state = jax.jit(tx.update)(
        zeros, tx.init(params), params, signals=statistics
    )
    np.testing.assert_allclose(
        signal(optax.apply_updates(params, updates)),
        jnp.minimum(before, threshold),
        rtol=3e-6,
    )
    assert muonjax.metrics(state)["qk_clip/num_clipped"] == int(
        (before > threshold).sum()
    )
    assert set(state.maxima) == {"out"}


@pytest.mark.thorough
def test_qk_clip_is_an_instance_of_signal_clip():
    params, maxima, site = multi_head()
    scales = tuple(dataclasses.replace(s, power=0.5) for s in site.scales)
    tx = muonjax.signal_clip(5.0, dataclasses.replace(site, scales=scales))
    statistics = {"max_logits": maxima(params)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(zeros, tx.init(params), params, signals=statistics)
    expected, _ = zero_update(muonjax.qk_clip(5.0, site), params, statistics)
    chex.assert_trees_all_close(
        optax.apply_updates(params, updates), expected, rtol=1e-6
    )


@pytest.mark.parametrize("powers", [(1.0, 1.0), (0.5, 0.25)])
def test_powers_must_sum_to_one(powers):
    """The first are a misprint in circulation, which clips twice."""
    scales = tuple(
        muonjax.Scale(path=f"{n}/kernel", rank=3, axes=(-2, -1), factor=n, power=p)
        for n, p in zip(("query", "key"), powers, strict=True)
    )
    with pytest.raises(ValueError, match="must sum to 1"):
        muonjax.signal_clip(5.0, muonjax.Site(path="a", scales=scales))


def test_a_bias_must_scale_with_its_kernel():
    scales = (
        muonjax.Scale(path="kernel", rank=2, power=0.5),
        muonjax.Scale(path="bias", rank=1, power=0.25),
        muonjax.Scale(path="scale", rank=1, power=0.25, factor="scale"),
    )
    with pytest.raises(ValueError, match="a kernel and its bias have one power"):
        muonjax.signal_clip(5.0, muonjax.Site(path="a", scales=scales))


def test_entries_that_share_a_parameter_cannot_each_scale_it():
    _, _, site = multi_head()
    scales = tuple(dataclasses.replace(s, power=0.5) for s in site.scales)
    site = dataclasses.replace(site, scales=scales)
    muonjax.signal_clip(5.0, site).init(multi_head(4, 4)[0])
    with pytest.raises(
        ValueError,
        match=r"several entries of 'max_logits' share 'key/kernel': .*power=0",
    ):
        muonjax.signal_clip(5.0, site).init(multi_head(4, 2)[0])


def test_signals_are_needed():
    tx = muonjax.signal_clip(5.0, output_site())
    params = {"out": {"kernel": jnp.ones((4, 2))}}
    with pytest.raises(
        ValueError, match=r"signal_clip: update needs signals: .*signals=signals"
    ):
        tx.update(params, tx.init(params), params)
