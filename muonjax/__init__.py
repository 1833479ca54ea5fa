"""Muon and MuonClip for JAX: Optax gradient transformations that train the matrices of any model."""

from muonjax import optax_contrib as optax_contrib
from muonjax._clip.max_logits import max_logits as max_logits
from muonjax._clip.max_logits import max_logits_bound as max_logits_bound
from muonjax._clip.qk_clip import apply_qk_clip as apply_qk_clip
from muonjax._clip.qk_clip import qk_clip as qk_clip
from muonjax._clip.scaled_entries import Scale as Scale
from muonjax._clip.signal_clip import signal_clip as signal_clip
from muonjax._clip.site import Site as Site
from muonjax._clip.site_constructors import fused_qkv_site as fused_qkv_site
from muonjax._clip.site_constructors import mha_site as mha_site
from muonjax._clip.site_constructors import mla_site as mla_site
from muonjax._common import model_registry as _models
from muonjax._inspect.program import Program as Program
from muonjax._inspect.program import inspect as inspect
from muonjax._inspect.value_and_grad import value_and_grad as value_and_grad
from muonjax._matrices.matrix_view import FusedDimensionNumbers as FusedDimensionNumbers
from muonjax._matrices.matrix_view import MuonDimensionNumbers as MuonDimensionNumbers
from muonjax._mesh.distribution import Distribution as Distribution
from muonjax._mesh.host_memory import offload as offload
from muonjax._mesh.state_shardings import state_shardings as state_shardings
from muonjax._msign.mcsgn import mcsgn as mcsgn
from muonjax._msign.msign import msign as msign
from muonjax._msign.sylvester import sylvester as sylvester
from muonjax._names.routes import dimension_numbers as dimension_numbers
from muonjax._names.tabulate import tabulate as tabulate
from muonjax._newton_schulz.coefficients import JORDAN as JORDAN
from muonjax._newton_schulz.coefficients import YOU as YOU
from muonjax._newton_schulz.coefficients import polar_express as polar_express
from muonjax._newton_schulz.polar_factor import newton_schulz as newton_schulz
from muonjax._newton_schulz.settings import NewtonSchulz as NewtonSchulz
from muonjax._optimizers.muon import adamclip as adamclip
from muonjax._optimizers.muon import muon as muon
from muonjax._optimizers.muon import muonclip as muonclip
from muonjax._optimizers.muon import muonh as muonh
from muonjax._optimizers.muon import normuon as normuon
from muonjax._transforms.cautious_weight_decay import (
    cautious_weight_decay as cautious_weight_decay,
)
from muonjax._transforms.ema_nesterov import ema_nesterov as ema_nesterov
from muonjax._transforms.ema_nesterov import ema_nesterov_params as ema_nesterov_params
from muonjax._transforms.hyperball import hyperball as hyperball
from muonjax._transforms.metrics import metrics as metrics
from muonjax._transforms.momentum import cast_momentum as cast_momentum
from muonjax._transforms.momentum import trace as trace
from muonjax._transforms.monitor import monitor as monitor
from muonjax._transforms.orthogonalize import match_rms as match_rms
from muonjax._transforms.orthogonalize import normalize_neurons as normalize_neurons
from muonjax._transforms.orthogonalize import orthogonalize as orthogonalize
from muonjax.loha import adapter_mask as adapter_mask
from muonjax.loha import hadamard_linear as hadamard_linear

__version__ = "0.2.0"

# muonjax.nnx imports Flax, so it is loaded only with the first NNX model.
_models.register("flax.nnx", module="muonjax.nnx")


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
    return [*globals(), "linen", "nnx"]
