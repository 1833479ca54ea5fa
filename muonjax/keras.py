"""Any Optax transformation as an optimizer of Keras 3 on its JAX backend."""
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false
# Keras is imported by who imports this module, and need not be installed.

from __future__ import annotations

import functools
from typing import Any

import jax
import keras
import optax


class Optimizer(keras.optimizers.Optimizer):
    """An Optax transformation as a Keras optimizer, for Keras 3 with the backend JAX.

    The transformation gets the model's variables as nested dicts with the names that Keras gives them, such as
    `params["transformer"]["query"]["kernel"]`: `muonjax.tabulate(optimizer.params(model.trainable_variables))`. All of
    its state are variables of the optimizer, so that Keras saves and restores it with `save_weights`.

    Args:
      transformation: Such as `muonjax.muon(2e-3)`, with its own learning rate and weight decay.
      learning_rate: A factor, or a schedule of factors, on top of the transformation's; callbacks can change it.
      **settings: Of `keras.optimizers.Optimizer`: `global_clipnorm`, `gradient_accumulation_steps`, `use_ema`, ….

    Raises:
      ValueError: When it is built, two variables with the same path; when it is made, another backend.

    Example:
      >>> import keras, muonjax
      >>> from muonjax.keras import Optimizer
      >>> model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)])
      >>> model.compile(Optimizer(muonjax.muon(2e-3)), "mse")
    """

    def __init__(
        self, transformation: optax.GradientTransformation, learning_rate: Any = 1.0, **settings: Any
    ):
        if keras.backend.backend() != "jax":
            raise ValueError(
                f"muonjax.keras.Optimizer needs Keras's backend 'jax', not {keras.backend.backend()!r}: set the "
                "environment variable KERAS_BACKEND=jax before keras is imported."
            )
        super().__init__(learning_rate=learning_rate, **settings)
        self.transformation = transformation

    def params(self, variables: list[Any], values: list[Any] | None = None) -> dict[str, Any]:
        """The tree that the transformation gets: `values`, by default those of `variables`, by Keras's paths."""
        tree: dict[str, Any] = {}
        for variable, value in zip(variables, values or [v.value for v in variables], strict=True):
            *layers, name = variable.path.split("/")
            node = functools.reduce(lambda node, layer: node.setdefault(layer, {}), layers, tree)
            if name in node:
                raise ValueError(
                    f"muonjax.keras.Optimizer: two variables are called {variable.path!r}; give their layers a name=."
                )
            node[name] = value
        return tree

    def build(self, variables: list[Any]) -> None:
        """Makes the transformation's state, as variables of this optimizer."""
        if self.built:
            return
        super().build(variables)
        leaves, self._structure = jax.tree.flatten(self.transformation.init(self.params(variables)))
        self._state = [
            self.add_variable(leaf.shape, dtype=leaf.dtype.name, name=f"state_{i}")
            for i, leaf in enumerate(leaves)
        ]
        for variable, leaf in zip(self._state, leaves, strict=True):
            variable.assign(leaf)

    @property
    def state(self) -> Any:
        """The transformation's state, such as for `muonjax.metrics`."""
        return self._structure.unflatten([variable.value for variable in self._state])

    def _backend_update_step(self, grads: list[Any], trainable_variables: list[Any], learning_rate: Any):
        params = self.params(trainable_variables)
        updates, state = self.transformation.update(
            self.params(trainable_variables, grads), self.state, params
        )
        for variable, leaf in zip(self._state, jax.tree.leaves(state), strict=True):
            variable.assign(leaf)
        variables = self.params(trainable_variables, trainable_variables)
        jax.tree.map(lambda variable, update: variable.assign_add(learning_rate * update), variables, updates)
