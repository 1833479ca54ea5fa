"""What an editor knows of keywords that are handed on; Pyright checks this file, nothing runs it.

Each line with an "ignore" must have the error that it names, or Pyright reports the comment.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Unpack

import jax.numpy as jnp
import optax

import muonjax
from muonjax._optimizers.muon import MuonSettings


def calls() -> None:
    """Settings of every optimizer."""
    muonjax.muon(1e-3, decay=0.9, mu_dtype=jnp.bfloat16, rms=None)
    muonjax.muon(1e-3, decay="0.9")  # pyright: ignore[reportArgumentType]
    muonjax.muon(1e-3, b2=0.95)  # pyright: ignore[reportCallIssue]
    muonjax.muon(1e-3, None, 0.95)  # pyright: ignore[reportCallIssue]
    muonjax.normuon(1e-3, neuron_decay=0.9, nesterov=False)
    muonjax.normuon(1e-3, nesterov=None)  # pyright: ignore[reportArgumentType]
    muonjax.muonh(1e-2, adam=optax.sgd(0.1))
    muonjax.muonh(1e-2, weight_decay=0.1)  # pyright: ignore[reportCallIssue]
    muonjax.muonclip(
        1e-3,
        threshold=30.0,
        weight_decay=0.1,
        newton_schulz=muonjax.NewtonSchulz.fast(),
    )
    muonjax.muonclip(1e-3, newton_schulz="fast")  # pyright: ignore[reportArgumentType]
    muonjax.muonclip(1e-3, tau=30.0)  # pyright: ignore[reportCallIssue]
    muonjax.adamclip(1e-3, b2=0.95, mask=None)
    muonjax.adamclip(1e-3, rms=0.2)  # pyright: ignore[reportCallIssue]


def handed_on(**settings: Unpack[MuonSettings]) -> optax.GradientTransformation:
    """A function of the user's."""
    return muonjax.muonclip(1e-3, **settings)
