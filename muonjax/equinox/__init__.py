"""Dimension numbers of the parameters of an Equinox model; needs the extra `equinox`."""

from muonjax.equinox._routing import dimension_numbers as dimension_numbers
