"""Muon and MuonClip for JAX: Optax gradient transformations that train the matrices of any
model."""

from muonjax import optax_contrib
from muonjax._clip.max_logits import max_logits, max_logits_bound
from muonjax._clip.qk_clip import apply_qk_clip, qk_clip
from muonjax._clip.scale import Scale
from muonjax._clip.signal_clip import signal_clip
from muonjax._clip.site import Site
from muonjax._clip.site_constructors import fused_qkv_site, mha_site, mla_site
from muonjax._inspect.program import Program, inspect
from muonjax._inspect.value_and_grad import value_and_grad
from muonjax._matrices.matrix_view import FusedDimensionNumbers, MuonDimensionNumbers
from muonjax._mesh.distribution import Distribution
from muonjax._mesh.host_memory import offload
from muonjax._mesh.state_shardings import state_shardings
from muonjax._msign.msign import msign
from muonjax._names.routes import dimension_numbers
from muonjax._names.tabulate import tabulate
from muonjax._newton_schulz.coefficients import JORDAN, YOU, polar_express
from muonjax._newton_schulz.polar_factor import newton_schulz
from muonjax._newton_schulz.settings import NewtonSchulz
from muonjax._optimizers.muon import adamclip, muon, muonclip, muonh, normuon
from muonjax._transforms.cautious_weight_decay import cautious_weight_decay
from muonjax._transforms.ema_nesterov import ema_nesterov, ema_nesterov_params
from muonjax._transforms.hyperball import hyperball
from muonjax._transforms.match_rms import match_rms
from muonjax._transforms.metrics import metrics
from muonjax._transforms.momentum import cast_momentum, trace
from muonjax._transforms.monitor import monitor
from muonjax._transforms.normalize_neurons import normalize_neurons
from muonjax._transforms.orthogonalize import orthogonalize
from muonjax.loha import adapter_mask, hadamard_linear

__all__ = [
    "JORDAN",
    "YOU",
    "Distribution",
    "FusedDimensionNumbers",
    "MuonDimensionNumbers",
    "NewtonSchulz",
    "Program",
    "Scale",
    "Site",
    "adamclip",
    "adapter_mask",
    "apply_qk_clip",
    "cast_momentum",
    "cautious_weight_decay",
    "dimension_numbers",
    "ema_nesterov",
    "ema_nesterov_params",
    "fused_qkv_site",
    "hadamard_linear",
    "hyperball",
    "inspect",
    "match_rms",
    "max_logits",
    "max_logits_bound",
    "metrics",
    "mha_site",
    "mla_site",
    "monitor",
    "msign",
    "muon",
    "muonclip",
    "muonh",
    "newton_schulz",
    "normalize_neurons",
    "normuon",
    "offload",
    "optax_contrib",
    "orthogonalize",
    "polar_express",
    "qk_clip",
    "signal_clip",
    "state_shardings",
    "tabulate",
    "trace",
    "value_and_grad",
]

__version__ = "0.2.0"


def __getattr__(name: str):
    from difflib import get_close_matches
    from importlib import import_module

    # They import Flax, which need not be loaded without them.
    if name in ("linen", "nnx"):
        return import_module(f"muonjax.{name}")
    # As Python suggests names, but also for a name in another case, such as muonjax.Muon.
    near = get_close_matches(name.lower(), [n for n in globals() if n[0] != "_"], 1)
    raise AttributeError(
        f"muonjax has no attribute {name!r}{f'. Did you mean {near[0]}?' if near else ''}"
    )


def __dir__():
    return sorted({*globals(), "linen", "nnx"})
