"""What the adversarial tests share: the check of an error's text, and unusual numbers."""

import re

import numpy as np

import muonjax

BAD = [np.nan, np.inf, -np.inf]


def names_its_call(error):
    """Whether an error is one of muonjax's: of the two kinds that it raises, and it begins with the call's name."""
    name = re.match(r"(?:muonjax\.)?(\w+)", str(error))
    public = {*dir(muonjax), "dimension_numbers", "symmetric_product"}
    return (
        isinstance(error, (ValueError, TypeError))
        and name is not None
        and name[1] in public
    )
