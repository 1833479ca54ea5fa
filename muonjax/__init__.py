"""Muon and MuonClip for JAX: Optax gradient transformations for people who train Flax models."""

from muonjax._coefficients import JORDAN as JORDAN
from muonjax._coefficients import NEWTON_SCHULZ as NEWTON_SCHULZ
from muonjax._coefficients import YOU as YOU
from muonjax._coefficients import polar_express as polar_express
from muonjax._match_rms import match_rms as match_rms
from muonjax._matrix_view import MuonDimensionNumbers as MuonDimensionNumbers
from muonjax._newton_schulz import NewtonSchulz as NewtonSchulz
from muonjax._newton_schulz import newton_schulz as newton_schulz
from muonjax._orthogonalize import orthogonalize as orthogonalize
