"""Models that nobody here wrote, as functions at tiny sizes, with what is right for each of their parameters."""

import importlib

from tests.inspect.library_models.model import MODELS, Model

for _file in (
    *("transformers_text", "transformers_others", "linen", "nnx", "published", "haiku", "equinox", "plain"),
    # Each in an environment of its own.
    *("maxtext", "levanter", "tunix", "penzai", "keras_hub_text", "keras_hub_others", "gemma"),
):
    importlib.import_module(f"tests.inspect.library_models.{_file}_models")

__all__ = ["MODELS", "Model"]
