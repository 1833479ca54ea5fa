"""Where in the model a product is: what its result goes to, over operations that are no products."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from muonjax._inspect.records import Records
from muonjax._inspect.values import Use

# What the result of a product reaches without another product on the way. "frozen layer": only matrices that do not
# train, perhaps a transform of the outputs. "inner gradient": only a gradient that the function takes by itself.
Destination: TypeAlias = Literal["output", "layer", "frozen layer", "inner gradient"]


class Ends:
    """The values from which a layer, a gradient or an output of the function can be reached.

    A path goes over all operations but `stop_gradient` and those of a backward pass; a path to the outputs does not go
    over products either.

    Attributes:
      trained: Operations that a gradient comes back to, without those of a backward pass that the function has itself.
      products: Those of them that are products by parameters, of activations, or by matrices that do not train.
      to_products: Values from which a path leads to a product by parameters or of activations.
      to_frozen: Values from which a path leads to a product by a matrix that does not train.
      to_gradients: Values from which a path leads to a backward pass.
      to_outputs: Values from which a path leads to an output of the function, without a product on the way.
      unknown_after: By value, an operation without a rule that a path leads to; it may be a product.
    """

    def __init__(self, records: Records):
        graph = self.graph = records.graph
        self.read_by_labels = records.uses.read_by_labels
        # Operations, by their numbers.
        backward = {
            i for i in graph.trained if graph.nodes[i].gradient_pass == "backward"
        }
        self.trained = graph.trained - backward
        products = records.layers.products & self.trained
        frozen = records.layers.frozen & self.trained
        self.products = products | frozen
        # The values from which a path leads to these operations.
        self.to_products = self._values_before(products)
        self.to_frozen = self._values_before(frozen)
        self.to_gradients = self._values_before(backward)
        # Backward from the outputs, and not over products.
        self.to_outputs = graph.upstream(
            self._without_indices(graph.outputs), self._inputs_unless_product
        )
        # A value may come before several operations without a rule: the last of them counts.
        self.unknown_after: dict[int, int] = {}
        for i in sorted(records.layers.without_rule):
            self.unknown_after |= dict.fromkeys(self._values_before([i]), i)

    def destination(self, use: Use) -> Destination:
        """Where the result of a product by a parameter goes to.

        The first kernel of tanh(x @ w1) @ w2 has "layer", and the second, whose result becomes the loss, "output".
        """
        # In x @ (a @ b) the columns of a meet the factor b, as `inner` says, which is the next layer.
        if use.columns and use.columns in use.view.inner:
            return "layer"
        (value,) = self.graph.nodes[use.node].outputs
        is_output = value in self.to_outputs
        if is_output and use.node in self.read_by_labels:  # a cross-entropy follows it
            return "output"
        if value in self.to_products:
            return "layer"
        # Only matrices that do not train follow, as a frozen head, a critic, or a transform of the outputs.
        if value in self.to_frozen:
            return "frozen layer"
        # As a layer that is trained inside of the function, or a network whose derivatives make the loss.
        is_for_gradient = value in self.to_gradients and not is_output
        return "inner gradient" if is_for_gradient else "output"

    def _values_before(self, operations: Iterable[int]) -> set[int]:
        """The inputs of these operations, and all values from which a path leads to one."""
        operands = [x for i in operations for x in self.graph.nodes[i].inputs]
        return self.graph.upstream(self._without_indices(operands), self._inputs)

    def _inputs(self, operation: int) -> list[int]:
        """The inputs of an operation that a path goes over."""
        node = self.graph.nodes[operation]
        if node.gradient_pass == "backward" or node.name == "stop_gradient":
            return []
        return self._without_indices(node.inputs)

    def _inputs_unless_product(self, operation: int) -> list[int]:
        return [] if operation in self.products else self._inputs(operation)

    def _without_indices(self, values: Iterable[int]) -> list[int]:
        """Without indices, as of an argmax: they end a path."""
        return [x for x in values if self.graph.is_followed(x)]
