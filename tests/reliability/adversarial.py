"""What the adversarial tests share: the number of examples, the check of an error's text, and unusual numbers."""

import re

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

import muonjax

NIGHTLY = settings.get_current_profile_name() == "nightly"
_PROFILE = settings.get_profile("nightly" if NIGHTLY else "daily")

BAD = [np.nan, np.inf, -np.inf]


def share(percent):
    """`percent` of all adversarial examples; the shares of all tests in this folder add up to 100."""
    return settings(_PROFILE, max_examples=_PROFILE.max_examples * percent // 100)


def names_its_call(error):
    """Whether an error is one of muonjax's: of the two kinds that it raises, and it begins with the call's name."""
    name = re.match(r"(?:muonjax\.)?(\w+)", str(error))
    public = {*dir(muonjax), "dimension_numbers", "symmetric_product"}
    return isinstance(error, (ValueError, TypeError)) and name is not None and name[1] in public


def numbers(width=32):
    """Every float of this width: zeros, subnormals, the largest, NaN and infinities among them."""
    return st.floats(width=width)
