"""Dimension numbers of the parameters of a Linen model: those of any tree."""

from muonjax._routing.dimension_numbers import dimension_numbers as dimension_numbers
