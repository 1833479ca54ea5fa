"""Decide from its uses which optimizer takes a parameter, and as which matrices.

The first that holds of these, each with its line: whole numbers; never used; used by an operation
that is not followed, or only in a gradient that the function takes, and left to names; looked up;
in no product; an output head of a loss; in products with vectors alone; in a last product without a
loss, and left to names; an embedding of patches. All others are matrices, if their products agree.
"""

from typing import NamedTuple

from muonjax._inspect.matrix_axes import Contradiction, matrices_of
from muonjax._inspect.move_rules import SAME
from muonjax._inspect.possible_numbers import numbers_in
from muonjax._inspect.product_destination import Ends
from muonjax._inspect.records import Records
from muonjax._inspect.values import (
    ADDED,
    OF_PRODUCTS,
    PARAMETER,
    PRODUCT_OF_PARAMETERS,
    Use,
    grouped,
)
from muonjax._matrices.matrix_view import DimensionNumbers

_SAME = frozenset(SAME.split())


class Decision(NamedTuple):
    """What becomes of one parameter."""

    numbers: DimensionNumbers | None  # None: Adam
    why: str
    per_head: DimensionNumbers | None = None  # with a matrix for each attention head
    by_names: bool = False  # nothing is decided; its name does, and a warning says so
    trains: bool = True  # it has a gradient, and meets data
    # A bias, a gain, but for axes that count layers: weight decay is not for it.
    is_vector: bool = False
    # What can't be told, for a warning: it is decided, but may be something else.
    doubt: str = ""


def decide(records: Records, is_loss: bool) -> list[Decision]:
    """One decision for each parameter, in the order of the tree.

    `is_loss`: the function returns a number, so that its last products are output heads.
    """
    decider = _Decider(records, is_loss)
    # What is done where no gradient comes back, as in a teacher with the same parameters,
    # says nothing of them.
    by_leaf = grouped(
        (use.view.leaf, use)
        for use in records.uses.by_operation.values()
        if use.node in records.graph.trained
    )
    return [
        decider.decide(leaf, by_leaf.get(leaf, []))
        for leaf in range(len(records.graph.parameters))
    ]


class _Decider:
    """Decides on the parameters of one function, a loss or a model."""

    def __init__(self, records: Records, is_loss: bool):
        self.records, self.graph, self.is_loss = records, records.graph, is_loss
        self.ends = Ends(records)
        self.takes_gradients = any(
            "transpose" in self.graph.derivatives(i) for i in self.graph.live
        )

    def decide(self, leaf: int, uses: list[Use]) -> Decision:
        """The decision on a parameter with these uses, by the cases at the top of this file.

        `Decision(None, why)` is AdamW, and `_left_to_names` leaves the parameter to its name.
        """
        if not self.graph.is_float(self.graph.parameters[leaf]):
            return Decision(None, "whole numbers")
        if not uses:
            return self._without_uses(leaf)
        # The number of an operation that may be anything, so that nothing can be decided;
        # -1 if there is none.
        unlisted = self.records.unlisted
        if unlisted >= 0:
            return self._left_to_names(self.graph.nodes[unlisted].name, unlisted)
        # In x @ (w / norm(w)) the norm is no use of w.
        uses = self._without_scales(leaf, uses)
        for use in uses:
            if use.kind == "unknown":
                return self._left_to_names(use.what, use.node)
        in_gradient = [use for use in uses if self._is_in_gradient(use)]
        others = [use for use in uses if use not in in_gradient]
        products = [use for use in others if use.kind == "product"]
        # A loss with a gradient of the model in it, such as WGAN's penalty, uses each kernel
        # backward too. What follows a product there is no layer of the model. So only a product
        # outside of the gradient can show that a layer follows; if none does, the name decides.
        # If one does, the uses in the gradient do not count from here on.
        is_followed = any(self.ends.destination(use) != "output" for use in products)
        if in_gradient and not is_followed:
            return self._left_to_names(
                "a gradient inside of the function", in_gradient[0].node
            )
        # x @ w[i], with w [experts, d, f] and an index that data give, chooses a matrix along axis
        # 0, and then multiplies by it: such an axis is one of the product's loops.
        # That is no look-up in a table.
        visited_axes = {run for use in products for run in use.view.layout.loops}
        for use in others:
            # The rows of a look-up are the axes along which the index chooses.
            if use.kind == "looked up" and not visited_axes.issuperset(use.rows):
                why = f"looked up: {self.graph.line(use.node)}"
                if products:
                    why += f", and multiplied: {self.graph.line(products[0].node)}"
                return Decision(None, why)
        if products:
            return self._of_products(products)
        return self._without_product(others)

    def _is_in_gradient(self, use: Use) -> bool:
        """Whether it belongs to the forward or the backward pass of a gradient,
        and not of `jax.jvp` alone.

        What is added, as a bias, shows what it is there too.
        """
        if use.what == ADDED:
            return False
        transforms = self.graph.derivatives(use.node)
        return self.takes_gradients and not transforms.isdisjoint(["jvp", "transpose"])

    def _without_scales(self, leaf: int, uses: list[Use]) -> list[Use]:
        """The uses of a parameter without the products that make a number by which all of it is
        scaled.

        x @ (w / s), with a spectral norm s = u @ w @ v, has two products that make s,
        and one that uses w as a matrix.
        """
        scales = self.records.uses.scales[leaf]
        return [
            use for use in uses if use.kind != "product" or not use.product.bit & scales
        ] or uses

    def _adam(self, why: str, node: int, by_names: bool = False) -> Decision:
        """AdamW, for a reason with the line of an operation; `by_names` leaves it to names,
        with a warning."""
        return Decision(None, f"{why}: {self.graph.line(node)}", by_names=by_names)

    def _left_to_names(self, what: str, node: int) -> Decision:
        """Its name decides, because of what is done in an operation."""
        return self._adam(f"{what} is not followed", node, by_names=True)

    def _without_uses(self, leaf: int) -> Decision:
        """Why nothing that trains uses a parameter."""
        graph = self.graph
        readers = [i for i in graph.readers[graph.parameters[leaf]] if i in graph.live]
        if not readers:
            why = "never used"
        elif graph.trained.isdisjoint(readers):
            why = f"no gradient comes back to it: {graph.line(readers[0])}"
        else:
            # As in a penalty, or if its mean over an axis, which is not followed, meets data later.
            why = f"in no product with data that was followed: {graph.line(readers[0])}"
        return Decision(None, why, trains=False)

    def _without_product(self, uses: list[Use]) -> Decision:
        """The decision on a parameter that is in no product with data,
        such as one that is added, by its first use."""
        # Axes with more than one entry in a use. A bias [layers, d] has one, d: an iteration of a
        # scan over layers uses one entry of the other axis.
        axes = set()
        for use in uses:
            # A factor of a @ b that meets data in no product, as where positions a @ b are added to
            # the input. Which factor is a matrix is not followed.
            if use.view.inner:
                return self._left_to_names(PRODUCT_OF_PARAMETERS, use.node)
            axes |= {run.axis for run in use.view.layout.runs if run.positions.size > 1}
        # "alone": an operation that is not followed and meets no data, such as the determinant in a
        # penalty. It does not show what the parameter is: another use does,
        # or else its name has to.
        others = [use for use in uses if use.kind != "alone"]
        first, *_ = others or uses
        decision = self._adam(first.what, first.node, by_names=not others)
        # Weight decay is not for vectors. `biases` has those that are added along the columns of a
        # layer's result alone: such a vector may have two axes, as a bias [heads, size].
        return decision._replace(
            is_vector=len(axes) < 2 or first.view.leaf in self.records.uses.biases
        )

    def _of_products(self, products: list[Use]) -> Decision:
        """The decision on a parameter that multiplies activations.

        `Decision(numbers, ...)` gives it to Muon as these matrices, and `_adam` to AdamW; with
        `by_names` its name decides, with a warning.
        """
        # "layer", "output", or "frozen layer", if only matrices that do not train follow.
        destinations = {self.ends.destination(use) for use in products}
        # No layer follows any of them: an output head, whatever its shape is. AdamW takes it, or
        # its name decides if an operation after it may be a layer.
        if self.is_loss and destinations == {"output"}:
            return self._head(products)
        # Products by vectors, and by depthwise kernels, do not count from here on.
        matrices = [use for use in products if use.is_matrix]
        if not matrices:
            is_depthwise = products[0].kernel.is_depthwise
            why = "a depthwise convolution" if is_depthwise else "multiplied by vectors"
            return self._adam(why, products[0].node)
        first = matrices[0].node
        # No layer follows where it is a matrix. If the function is no loss, this may be a head, or
        # give features that a loss takes. A loss gets here only if the parameter multiplies as a
        # vector too, and a layer follows that product: then this one may be a head or not.
        if all(self.ends.destination(use) == "output" for use in matrices):
            return self._adam("last product", first, by_names=True)
        # The first layer of a vision transformer, a convolution or a product with a reshaped image.
        # A product with windows of features, as where a later layer halves the image, is a layer as
        # any other: its activation depends on earlier products.
        if all(
            use.kernel.is_patch
            and self.records.values[use.activation].depends_on < OF_PRODUCTS
            for use in matrices
        ):
            return self._adam(
                "an embedding of patches, windows that do not overlap", first
            )
        try:
            # The axes; the same with a matrix for each head; the reason, with a line
            numbers, per_head, why = matrices_of(self.records, matrices)
        except Contradiction as problem:
            # Its message has the lines of the products: `_adam` would add another one.
            return Decision(None, str(problem), by_names=True)
        # What else it may be, such as a table, for a warning; "" if nothing. It is still Muon's.
        doubt = self._doubt(matrices)
        # Only matrices that don't train follow: it is a hidden layer before frozen ones,
        # or a head whose result a fixed matrix transforms. One doubt is told, this one first.
        if self.is_loss and "layer" not in destinations:
            doubt = "a hidden layer, or an output head: what follows it does not train"
        if doubt:
            doubt = f"{doubt}: {self.graph.line(first)}"
        return Decision(numbers, why, per_head, doubt=doubt)

    def _head(self, products: list[Use]) -> Decision:
        """The decision on a parameter that no layer follows: AdamW,
        but its name decides if that is not sure."""
        for use in products:
            (result,) = self.graph.nodes[use.node].outputs
            unknown = self.ends.unknown_after.get(result)
            if unknown is not None:
                return self._left_to_names(self.graph.nodes[unknown].name, unknown)
        return self._adam("an output head, as no product follows it", products[0].node)

    def _is_table(self, uses: list[Use]) -> bool:
        """Whether all that the products multiply is numbers of the program.

        So is a table of positions that is resized, or one of coefficients of fixed functions.
        """
        activations = [use.activation for use in uses]
        if any(self.records.values[x].depends_on & PARAMETER for x in activations):
            return False
        return bool(self.graph.arguments) and self.graph.of_data.isdisjoint(activations)

    def _is_softmax_of_layer(self, array: int) -> bool:
        """Whether an array is softmax(x @ w), as the weights with which a Gumbel softmax chooses
        from a codebook."""
        product = self.records.values[array].exponential_of
        if product not in self.records.attention.routers:
            return False
        # What depends on the softmax as well, such as a later layer's input, comes from other
        # operations. A cast of it is the softmax still.
        node = self.graph.maker(array)
        while node is not None and node.name in _SAME:
            node = self.graph.maker(node.inputs[0])
        return node is not None and node.name == "div"

    def _doubt(self, matrices: list[Use]) -> str:
        """What else than a layer the matrices may be; "" if nothing."""
        if self._is_table(matrices):
            return "a layer, or a table: it is multiplied by numbers of the program, and by no data"
        for use in matrices:
            numbers = numbers_in(self.graph, use.activation)
            # Many numbers are one NaN.
            if numbers is not None and len(numbers) > 1:
                return "a layer, or a table whose rows few numbers choose, such as zeros and ones"
            if self._is_softmax_of_layer(use.activation):
                return "a layer, or a table whose rows a softmax chooses"
        return ""
