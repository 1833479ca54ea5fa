"""Muon and MuonClip for JAX: Optax gradient transformations for people who train Flax models."""

from muonjax import optax_contrib as optax_contrib
from muonjax._adapters.hadamard_linear import hadamard_linear as hadamard_linear
from muonjax._adapters.layers import adapter_mask as adapter_mask
from muonjax._cautious_weight_decay import cautious_weight_decay as cautious_weight_decay
from muonjax._clipped_optimizers import adamclip as adamclip
from muonjax._clipped_optimizers import muonclip as muonclip
from muonjax._clipping.factors import Scale as Scale
from muonjax._clipping.max_logits import max_logits as max_logits
from muonjax._clipping.max_logits import max_logits_bound as max_logits_bound
from muonjax._clipping.qk_clip import apply_qk_clip as apply_qk_clip
from muonjax._clipping.qk_clip import qk_clip as qk_clip
from muonjax._clipping.signal_clip import SignalRule as SignalRule
from muonjax._clipping.signal_clip import signal_clip as signal_clip
from muonjax._clipping.sites import Site as Site
from muonjax._clipping.sites import fused_qkv_site as fused_qkv_site
from muonjax._clipping.sites import mha_site as mha_site
from muonjax._clipping.sites import mla_site as mla_site
from muonjax._ema_nesterov import ema_nesterov as ema_nesterov
from muonjax._ema_nesterov import ema_nesterov_params as ema_nesterov_params
from muonjax._hyperball import hyperball as hyperball
from muonjax._inspect import Program as Program
from muonjax._inspect import inspect as inspect
from muonjax._match_rms import match_rms as match_rms
from muonjax._matrix_view import FusedDimensionNumbers as FusedDimensionNumbers
from muonjax._matrix_view import MuonDimensionNumbers as MuonDimensionNumbers
from muonjax._mesh.distribution import Distribution as Distribution
from muonjax._mesh.state_shardings import state_shardings as state_shardings
from muonjax._momentum import cast_momentum as cast_momentum
from muonjax._momentum import trace as trace
from muonjax._monitor.metrics import metrics as metrics
from muonjax._monitor.monitor import monitor as monitor
from muonjax._msign.mcsgn import mcsgn as mcsgn
from muonjax._msign.msign import msign as msign
from muonjax._msign.sylvester import sylvester as sylvester
from muonjax._newton_schulz.coefficients import JORDAN as JORDAN
from muonjax._newton_schulz.coefficients import NEWTON_SCHULZ as NEWTON_SCHULZ
from muonjax._newton_schulz.coefficients import YOU as YOU
from muonjax._newton_schulz.coefficients import polar_express as polar_express
from muonjax._newton_schulz.polar_factor import newton_schulz as newton_schulz
from muonjax._newton_schulz.settings import NewtonSchulz as NewtonSchulz
from muonjax._normalize_neurons import normalize_neurons as normalize_neurons
from muonjax._offload import offload as offload
from muonjax._optimizers import muon as muon
from muonjax._optimizers import muonh as muonh
from muonjax._optimizers import normuon as normuon
from muonjax._orthogonalize import orthogonalize as orthogonalize
from muonjax._routing.dimension_numbers import dimension_numbers as dimension_numbers
from muonjax._routing.tabulate import tabulate as tabulate
from muonjax._value_and_grad import value_and_grad as value_and_grad

__version__ = "0.1.0"


def __getattr__(name: str):
    from difflib import get_close_matches
    from importlib import import_module

    if name in ("linen", "nnx"):  # They import Flax, which need not be loaded without them.
        return import_module(f"muonjax.{name}")
    near = get_close_matches(name.lower(), [n for n in globals() if n[0] != "_"], 1)
    raise AttributeError(
        f"module 'muonjax' has no attribute {name!r}{f'. Did you mean {near[0]}?' if near else ''}"
    )


def __dir__():
    return [*globals(), "linen", "nnx"]
