"""Where in the model a product is: what its result goes to,
over operations that are no products."""

from collections.abc import Iterable
from typing import Literal, TypeAlias

from muonjax._inspect.records import Records
from muonjax._inspect.values import Use

# What the result of a product reaches without another product on the way. "frozen layer": only
# matrices that do not train, perhaps a transform of the outputs.
Destination: TypeAlias = Literal["output", "layer", "frozen layer"]


class Ends:
    """The values from which a layer or an output of the function can be reached,
    along the way of a gradient.

    Attributes:
      to_products: Values from which a path leads to a product by parameters or of activations.
      to_frozen: Values from which a path leads to a product by a matrix that does not train.
      to_outputs: Values from which a path leads to an output of the function,
        without a product on the way.
      unknown_after: By value, an operation that may be a layer and that a path leads to: a long
        einsum, which is not followed, a product with parameters that only scale,
        or one whose result is a single number.
    """

    def __init__(self, records: Records):
        graph = self.graph = records.graph
        # Products by parameters or of two activations, and products by frozen numbers. Only those
        # count to which a gradient comes back: others are on no way from a layer to the loss.
        products = records.layers & graph.trained
        frozen = records.frozen_layers & graph.trained
        # Values from which a path leads to one of these, or past none of them to an output.
        self.to_products = self._values_before(products)
        self.to_frozen = self._values_before(frozen)
        self.to_outputs = graph.upstream(
            graph.outputs, with_gradient=True, without=products | frozen
        )
        # An output head before an operation that may be a layer is left to names. The reason names
        # the last such operation: it overwrites the earlier ones.
        self.unknown_after: dict[int, int] = {}
        for i in sorted(records.possible_layers):
            self.unknown_after |= dict.fromkeys(self._values_before([i]), i)

    def destination(self, use: Use) -> Destination:
        """Where the result of a product by a parameter goes to.

        The first kernel of tanh(x @ w1) @ w2 has "layer", and the second,
        whose result becomes the loss, "output".
        """
        # In x @ (a @ b) the factor b is the next layer after a: the columns of a meet it,
        # so they are in `inner` of a. A product that gives no columns matches none of its entries,
        # which are not empty.
        if use.columns in use.view.inner:
            return "layer"
        (value,) = self.graph.nodes[use.node].outputs
        # Labels choose one of its columns, as in a cross-entropy, and from there a way without
        # another product leads to the loss.
        if value in self.to_outputs and use.product.is_read_by_labels:
            return "output"
        if value in self.to_products:
            return "layer"
        # Only matrices that do not train follow, as a frozen head, a critic,
        # or a transform of the outputs.
        return "frozen layer" if value in self.to_frozen else "output"

    def _values_before(self, operations: Iterable[int]) -> set[int]:
        """The inputs of these operations, and all values from which a path leads to one."""
        operands = [x for i in operations for x in self.graph.nodes[i].inputs]
        return self.graph.upstream(operands, with_gradient=True)
