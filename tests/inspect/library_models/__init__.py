"""Models that nobody here wrote, as functions at tiny sizes, with what is right for each of their parameters.

The right answers, and the sizes of those models that a library makes from a configuration, are the data of the files
`*.toml`: a table for each model. Its `make` is a function in the file of makers that the first line names.
"""

import os

from tests.inspect.library_models.model import MODELS, Model

os.environ.setdefault("KERAS_BACKEND", "jax")  # Before anything imports Keras.

__all__ = ["MODELS", "Model"]
