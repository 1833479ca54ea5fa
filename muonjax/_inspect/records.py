"""What the rules record while a function is followed: uses of parameters,
products that make attention, layers.

A rule either follows a parameter through an operation, or records a use, which ends there: a
product, a sum with data, a look-up. The result of a product is followed on as a projection, and
what happens to its columns is recorded with the product: which are used together as parts, which
count heads or experts. A projection ends without a record where operations keep no column,
as a mean over all of them.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from muonjax._inspect.graph import Graph, Node
from muonjax._inspect.layouts import Region, whole
from muonjax._inspect.values import (
    ADDED,
    DATA,
    NOISE,
    OF_PRODUCTS,
    PARAMETER,
    PRODUCT_OF_PARAMETERS,
    AxisFact,
    Kind,
    Logits,
    Operand,
    ParameterView,
    Product,
    Projection,
    Use,
    Value,
)


class Uses:
    """What is done with the parameters."""

    def __init__(self) -> None:
        # By operation, parameter, and the number of the view, `k` in `record`.
        self.by_operation: dict[tuple[int, int, int], Use] = {}
        # By operation and the number of the view.
        self.products: dict[tuple[int, int], Product] = {}
        # For each parameter, its axes along which products with slices of it are added up.
        self.summed_slices: dict[int, set[int]] = defaultdict(set)
        # For each parameter, what one factor for all of it depends on, such as its spectral norm.
        self.scales: dict[int, int] = defaultdict(int)
        # Parameters that are added to a layer's result and lie along its columns alone, as the bias
        # [heads, size] of queries does.
        self.biases: set[int] = set()


class AttentionRecords:
    """Operations that may be attention, by the number of a product that may give its logits,
    as queries @ keys.T.
    """

    def __init__(self) -> None:
        # The key of most dictionaries, and what the sets hold, is the number (`Node.index`) of the
        # operation queries @ keys.T, "the product" below. The exceptions are `calls`, by the number
        # of a call, and `value_parts`, by layer.

        # The left and the right operand of the product. Which one is the queries is found later,
        # by the axes that count keys (`Operand.is_query`), which `softmaxes` has.
        self.operands: dict[int, tuple[Operand, Operand]] = {}
        # For each product a list with a pair for each weights @ values to which its logits were
        # followed: the logits that softmax takes, and the axes of queries @ keys.T that count keys.
        self.softmaxes: dict[int, list[tuple[Logits, frozenset[int]]]] = defaultdict(
            list
        )
        # From the product to an operation that multiplies exponentials of it by an array, perhaps
        # values, where the logits were lost before, or are no softmax's; or one that scales weights
        # @ values by another sum than softmax's. It may be an attention, which is listed and
        # refused. The product itself stands there if a number was subtracted that differs from key
        # to key.
        self.other_readers: dict[int, int] = {}
        # Products whose exponentials may be the weights of an attention, so that `record_weights`
        # notes their other readers. A product of two activations is here at once, one by learned
        # queries or frozen keys after a sum of its exponentials, as in a softmax. A sum along
        # columns of a parameter does not count: it makes one of the `routers`.
        self.candidates: set[int] = set()
        # Products whose softmax is along columns of a parameter, as of a router, an output head or
        # learned keys: its weights may choose experts, or entries of a codebook.
        self.routers: set[int] = set()
        # By the number of a call with three arrays, perhaps a kernel of attention, whose logits
        # can't be seen: the parameters of the projections that it takes.
        self.calls: dict[int, tuple[ParameterView, ...]] = {}
        # By layer that gives values: the region of its columns that the first attention takes. If a
        # later one takes other columns, the function writes heads one by one, and the parameters
        # of that attention are left to names.
        self.value_parts: dict[Product, Region] = {}


class Records:
    """What one pass over the operations finds out."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.nodes = graph.nodes
        self.line = graph.line
        self.shape = graph.shape
        self.shapes = graph.shapes
        # The numbers of a value, if the program contains them; None otherwise.
        self.known = graph.known.get
        self.values: list[Value] = [Value()] * len(graph.avals)
        self.uses = Uses()
        self.attention = AttentionRecords()
        # Operations that show whether a matrix before them is an output head. Before a product by
        # parameters, or of two activations, it is not.
        self.layers: set[int] = set()
        # A matrix before a product by another one that does not train is taken for a hidden layer,
        # with a warning.
        self.frozen_layers: set[int] = set()
        # Before an operation that may be a layer, what looks like a head is left to its name.
        self.possible_layers: set[int] = set()
        # The last operation without any rule, which may do anything, so that nothing is decided;
        # -1 if there is none.
        self.unlisted = -1
        for leaf, parameter in enumerate(graph.parameters):
            view = ParameterView(leaf, whole(graph.shape(parameter)))
            self.values[parameter] = Value(PARAMETER, (view,))
        for array in (*graph.arguments, *graph.constants):
            self.values[array] = self._input(array)

    def _input(self, array: int) -> Value:
        """The value of an argument that is no parameter, or of an array that the function closes
        over: data, or a key of random numbers.

        By the fact "input" products know patches of images (`product_rules._cuts_input`).
        """
        dtype = getattr(self.graph.avals[array], "dtype", float)
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return Value(NOISE)
        shape = self.graph.shape(array)
        # A scalar that the function closes over, `alpha = jnp.float32(0.5)`, is a number of the
        # program, as 0.5 is; an index is not.
        if array in self.graph.constants and not shape and self.graph.is_float(array):
            return Value()
        return Value(DATA, facts=(AxisFact("input", whole(shape)),))

    def inputs(self, node: Node) -> list[Value]:
        """The values of an operation's operands."""
        return [self.values[x] for x in node.inputs]

    def operand(
        self, node: Node, k: int, summed: Sequence[int] = (), batch: Sequence[int] = ()
    ) -> Operand:
        """Operand number `k` of a product, without its `sources`."""
        array = node.inputs[k]
        shapes = self.shape(array), self.shape(node.outputs[0])
        return Operand(self.values[array], array, *shapes, summed, batch)

    # What the rules record.

    def record(
        self,
        node: Node,
        kind: Kind,
        view: ParameterView,
        what: str = "",
        *,
        k: int = 0,
        **axes: Any,
    ) -> Product | None:
        """Records what an operation does with a parameter.

        A later record of the same operation, parameter and `k` replaces it, as in the next round of
        a loop, whose body is followed until nothing changes.

        Args:
          node: The operation.
          kind: One of `Kind`.
          view: The parameter, as the operation sees it.
          what: What is done, in words, or the name of the operation,
            where the kind does not say it.
          k: The number of this view among those that a layer multiplies by: in x @ (w + a @ b) w
            has 0, a has 1 and b has 2. It tells both views of w in x @ (w + w.T) apart. Other
            operations record each parameter once, with 0.
          axes: Rows, columns and the other attributes of `Use`.

        Returns:
          The `Product`, to which later operations add what becomes of it; None for any other kind.
        """
        product = None
        if kind == "product":
            products = self.uses.products
            # Bits from `OF_PRODUCTS` on stand for products in `Value.depends_on`. If an earlier
            # round made this product, `setdefault` drops `new` and returns the one that is there,
            # with its bit and what was noted of its columns. Its `use` is that of the last round.
            new = Product(OF_PRODUCTS << len(products))
            product = products.setdefault((node.index, k), new)
        use = Use(kind, what, node.index, view, product=product, **axes)
        self.uses.by_operation[node.index, view.leaf, k] = use
        if product is not None:
            product.use = use
        return product

    def record_views(
        self, node: Node, what: str, values: Iterable[Value], kind: Kind = "other"
    ) -> None:
        """Records a use that is no product, of all the parameters in these values."""
        for value in values:
            for view in value.views:
                # Factors of queries @ w: which of them is a learned input, and no matrix, is not
                # followed. But a sum, as of a @ b and a frozen matrix, is that of an adapter, and
                # a single number, as u @ w @ v, is a norm or a penalty.
                if view.inner and view.layout.shape and what != ADDED:
                    self.record(node, "unknown", view, PRODUCT_OF_PARAMETERS)
                else:
                    self.record(node, kind, view, what)

    def record_choice_by_labels(
        self, value: Value, axes: Sequence[int], labels: Value
    ) -> None:
        """Records the products of which labels choose a column,
        as those of a cross-entropy do: output heads.

        The columns lie along `axes` of the value, in its projections.
        """
        if labels.depends_on & PARAMETER or not labels.depends_on & DATA:
            return
        for projection in value.projections:
            if projection.layout.runs_along(axes):
                projection.product.is_read_by_labels = True

    def record_weights(self, node: Node, weights: Value, values: Value) -> None:
        """Records that an operation multiplies `weights` by `values`,
        if `weights` may be those of a softmax.

        Rules call it where no logits were followed to `weights`, or where the operation is not
        followed itself. So there may be an attention that was lost on the way:
        `clippable_attention` refuses to clip it.
        """
        # The product of whose exponentials the weights are made, such as queries @ keys.T; -1 if
        # there is none.
        product = weights.exponential_of
        # In softmax's division exp(x) / sum(exp(x)) two arrays are made of the exponentials, and
        # none of them is the values. A gain, which depends on no data, isn't either.
        may_be_values = values.depends_on & DATA and values.exponential_of != product
        # queries @ keys.T is a candidate at once: the sum of its exponentials may come later, as in
        # (exp(scores) @ values) / sum(exp(scores)). x @ c, of a parameter c, is one only after a
        # sum of exp(x @ c): without a sum, as in exp(x @ c) * y, it is a gate. A sum along the
        # columns of c is that of a router or an output head, and makes no candidate.
        if may_be_values and product in self.attention.candidates:
            self.attention.other_readers.setdefault(product, node.index)

    def record_parts(self, projections: Iterable[Projection]) -> None:
        """Records that an operation takes the columns of each of these together,
        and no others: they are parts.

        It is called before `after_nonlinearity`: what an operation later takes says nothing about
        parts.
        """
        for projection in projections:
            if projection.unmixed:
                projection.product.parts.add(projection.layout.region)

    def record_reduced(
        self, projections: Iterable[Projection], axes: Sequence[int]
    ) -> None:
        """Records that an operation mixes columns of layers along `axes`,
        such as a norm or a maximum.

        The columns that it takes are one part. But a norm of each gate of an LSTM, x @ w as [4, 16]
        along the last axis, takes all columns and mixes groups of 16. They may still be four parts.
        Whether later slices cut between the groups is not followed: if there are parts in the end,
        `matrix_axes` leaves the parameter to names (`has_mixed_groups`).
        """
        for projection in projections:
            # What columns are used for that were mixed before says nothing about parts.
            if not projection.unmixed:
                continue
            layout = projection.layout
            # It takes all columns, in groups that are mixed each for itself: other axes of the
            # array go over the groups.
            if layout.runs_not_along(axes) and not layout.region:
                projection.product.has_mixed_groups = True
            else:
                self.record_parts([projection])

    def record_heads(
        self, projections: Iterable[Projection], axes: Sequence[int]
    ) -> None:
        """Records that columns along these axes count heads."""
        for projection in projections:
            layout = projection.layout
            projection.product.heads.update(
                (run, layout.region) for run in layout.runs_along(axes)
            )
