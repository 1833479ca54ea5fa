"""A jaxpr as one flat list of operations: calls are entered,
loops and branches become operations of their own.

A value is the number of an array. Operations that are no primitives: what a loop carries is one
value, which comes from before the loop and from the end of its body ("carry"); the slices that a
scan takes are "scan_slice" (`scan`: the place of its body), what it collects "scan_stack"; a value
that comes from several branches is a "join"; into and out of a `shard_map` an array is divided
("shard") and whole again ("unshard").
"""

import dataclasses
import functools
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal

from muonjax._inspect.jax_versions import Body, bodies, constants, opened, scan_counts

# In which order such an einsum multiplies its operands depends on their sizes.
LONG_EINSUM = "an einsum of three or more operands (split it)"
# A collective over an axis of a `vmap` is a reduction over an axis of the array.
_COLLECTIVES = {
    "psum": "reduce_sum",
    "psum_invariant": "reduce_sum",
    "pmax": "reduce_max",
    "pmin": "reduce_min",
}
# Operations whose body is entered: calls, loops, branches,
# functions with derivatives or a batching rule of their own.
_CALLS = """
    call closed_call compute_on cond custom_jvp_call custom_vjp_call custom_vmap_call jit remat2
    scan shard_map while xla_metadata_call
"""
_ENTERED = frozenset(_CALLS.split())


def _split(x: jax.Array, sizes: Sequence[int], axis: int) -> list[jax.Array]:
    """`split`, as slices."""
    parts = []
    start = 0
    for size in sizes:
        parts.append(lax.slice_in_dim(x, start, start + size, axis=axis))
        start += size
    return parts


def _padded(
    x: jax.Array, value: jax.Array, padding_config: Sequence[tuple[int, int, int]]
) -> jax.Array:
    """`pad` by `low` and `high` entries, as a concatenation along one axis after the other; others
    stay a `pad` (`_not_entered`)."""
    for axis, (low, high, _) in enumerate(padding_config):
        before = list(x.shape)
        before[axis] = low
        after = list(x.shape)
        after[axis] = high
        sides = lax.broadcast(value, before), x, lax.broadcast(value, after)
        x = lax.concatenate(sides, axis)
    return x


# Operations as others, so that these alone need rules.
_REWRITTEN: dict[str, Callable[..., Any]] = {
    "neg": lambda x: lax.mul(x, np.array(-1).astype(x.dtype)),
    "pad": _padded,
    "split": _split,
    "stack": lambda *xs, axis: lax.concatenate(
        [lax.expand_dims(x, (axis,)) for x in xs], axis
    ),
    "unstack": lambda x, axis: [
        lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])
    ],
}


class Step(NamedTuple):
    """One enclosing equation on the way from the outermost jaxpr to an operation."""

    equation: int  # its index in the enclosing jaxpr
    body: int  # which of its bodies: the branch of a cond, 0 otherwise
    kind: str  # the primitive
    # Where logits are reported, of a scan: whether its iterations are layers, and a leading axis.
    # Otherwise logits are maximized over them.
    layer: bool = False


# The way to a body from the outermost jaxpr, which has the place ().
Place: TypeAlias = tuple[Step, ...]


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """One operation: an equation without a body, or what stands for a part of one with a body,
    such as a "carry"."""

    index: int  # in the list of all: "the number of the operation"
    name: str  # of the primitive, or "carry" and the like
    params: dict[str, Any]
    inputs: tuple[int, ...]  # the values of its operands
    outputs: tuple[int, ...]  # the values of its results
    equation: JaxprEqn  # a "carry" and the like have the one of their loop
    place: Place  # of the body that it is in


@functools.lru_cache(1024)
def _transforms(name_stack: Any) -> frozenset[str]:
    """The names of JAX's transformations around an operation."""
    # A user's scope of the same name is no `Transform`.
    scopes = name_stack.stack
    return frozenset(x.name for x in scopes if type(x).__name__ == "Transform")


@functools.lru_cache(1024)
def _is_long_einsum(name_stack: Any) -> bool:
    """Whether operations in these scopes are those of a `jnp.einsum` that sums over axes of three
    or more operands."""
    for scope in name_stack.stack:
        # `jnp.einsum` names its scope by its subscripts: "bqd, dhk, bkd -> bhq".
        operands, arrow, result = scope.name.replace(" ", "").partition("->")
        if arrow and operands.count(",") > 1 and not set(operands) <= {",", *result}:
            return True
    return False


class Graph:
    """The operations of a function in an order in which they can run.

    `jnp.tanh(x @ w)` with w, a parameter, as value 0 and x as value 1 has the nodes dot_general
    with inputs (1, 0) and outputs (2,), and tanh with inputs (2,) and outputs (3,).
    """

    def __init__(self, closed: Body, count: int, given: Sequence[Any]):
        """The operations of `closed`.

        Args:
          closed: The jaxpr.
          count: How many of its inputs, the first ones, are parameters.
          given: Arrays that the function was called with and that are not inputs of the jaxpr. The
            jaxpr has them as constants, whose numbers are no part of the program.
        """
        jaxpr = opened(closed)
        self._given = given
        # Tables that `_walk` fills, below. A value is the number of an array.
        self.nodes: list[Node] = []
        # By value: the operation that makes it, if it is no argument and no constant.
        self.makers: dict[int, Node] = {}
        self.maker = self.makers.get  # None for an argument or a constant
        # By value: its shape and dtype, and its variable in each body where it has one: where it is
        # made, inside of a `jit` that takes it, and outside of one that returns it. A `Probe` names
        # logits by the variable of one body.
        self.avals: list[Any] = []
        self.variables: list[dict[Place, Any]] = []
        # What the function is given: parameters and data. An array that it closes over is data as
        # well if its numbers are no part of the program: a tracer, a random key,
        # or one that was `given`. `_walk` adds these.
        inputs = [self._new(v, ()) for v in jaxpr.invars]
        self.parameters = inputs[:count]
        self.arguments = inputs[count:]
        # All other arrays that it closes over, by value: `table` in `x * 2.0 + table`.
        self.constants: dict[int, Any] = {}
        # By value, the numbers that rules read: the literal 2.0, constants of one number and
        # constant indices. `follow` adds what the program computes from them alone.
        self.known: dict[int, Any] = {}
        # By value, the results of `possible_numbers.numbers_in`, which fills it.
        self.possible_numbers: dict[int, Any] = {}
        # By the index of a loop's first operation: its "carry" operations, one for each array that
        # it carries, and the operations of its body, which follow them.
        self.loops: dict[int, tuple[range, range]] = {}
        # By the place of a body: the equations that it is in, from the inside to the outside.
        self.callers: dict[Place, list[JaxprEqn]] = {(): []}
        self.outputs = self._walk(closed, inputs, ())
        # By value: the numbers of the operations that take it.
        self.readers: dict[int, list[int]] = defaultdict(list)
        for node in self.nodes:
            for x in node.inputs:
                self.readers[x].append(node.index)
        # The data, and what is made of them: what comes to a loop from the end of its body is in
        # what it carries only one round later.
        self.of_data = set(self.arguments)
        size = 0
        while size < len(self.of_data):
            size = len(self.of_data)
            for node in self.nodes:
                if not self.of_data.isdisjoint(node.inputs):
                    self.of_data.update(node.outputs)
        # The operations that an output depends on, and those that a gradient of the outputs comes
        # back to.
        self.live = self._producers(self.upstream(self.outputs))
        self.trained = self._producers(self.upstream(self.outputs, with_gradient=True))

    def _producers(self, values: Iterable[int]) -> set[int]:
        """The operations that make these values."""
        return {self.makers[x].index for x in values if x in self.makers}

    # How the list is made.

    def _new(self, variable: Any, place: Place) -> int:
        """A new value for a variable of the body at `place`."""
        self.avals.append(variable.aval)
        self.variables.append({place: variable})
        return len(self.avals) - 1

    def _constants(self, body: Body, place: Place) -> list[int]:
        """The values of the arrays that a body closes over. Each is noted as data (`arguments`) or,
        if rules may decide by its numbers, in `constants`, and a small one in `known` too."""
        values = [self._new(v, place) for v in opened(body).constvars]
        # A plain jaxpr has variables for its constants and not their values: they are None here.
        for x, array in itertools.zip_longest(values, constants(body)):
            # Data, by whose numbers nothing may be decided: None, a tracer, a random key, or an
            # array that the function was called with. `value_and_grad` traces the parameters alone:
            # to the jaxpr the batch is a constant then, and `_given` has it.
            if not _is_readable(array) or any(
                _is_same(array, given) for given in self._given
            ):
                self.arguments.append(x)
                continue
            self.constants[x] = array
            # Rules compute with one number, as of a mask, and with whole numbers along one axis,
            # which may be the indices of a slice or a look-up. The numbers of all others are for
            # `possible_numbers` alone.
            if array.ndim == 0 or (array.ndim == 1 and not _is_float(array.dtype)):
                self.known[x] = np.asarray(array)
        return values

    def _add(
        self,
        name: str,
        params: dict[str, Any],
        inputs: Sequence[int],
        variables: Sequence[Any],
        equation: JaxprEqn,
        place: Place,
    ) -> list[int]:
        """Appends an operation of the body at `place`; returns the values of its `variables`,
        which are new."""
        outputs = [self._new(v, place) for v in variables]
        # JAX multiplies the operands of such an einsum in an order that depends on their sizes: at
        # another batch size the same program would get other answers. All of its operations get one
        # name, whose rule makes the result unknown (`rules._long_einsum`).
        if _is_long_einsum(equation.source_info.name_stack):
            name = LONG_EINSUM
        index = len(self.nodes)
        node = Node(index, name, params, tuple(inputs), tuple(outputs), equation, place)
        self.nodes.append(node)
        self.makers |= dict.fromkeys(outputs, node)
        return outputs

    def _add_for_each(
        self,
        name: str,
        operands: Sequence[Sequence[int]],
        variables: Sequence[Any],
        equation: JaxprEqn,
        place: Place,
        **params: Any,
    ) -> list[int]:
        """Appends an operation with one result for each variable,
        such as a "join" for each output of a `cond`.

        `operands` has the first operands of all these operations, then the second ones, ...:
        [[1, 2], [3, 4]] are the operands (1, 3) of the first operation and (2, 4) of the second.
        """
        results = []
        for variable, *inputs in zip(variables, *operands, strict=True):
            results += self._add(name, params, inputs, [variable], equation, place)
        return results

    def _walk(self, body: Body, inputs: Sequence[int], place: Place) -> list[int]:
        """Appends the operations of a jaxpr on these values; returns the values of its results.

        `place` is the way to this jaxpr through the bodies around it, () for the outermost.
        """
        jaxpr = opened(body)
        variables = [*jaxpr.invars, *jaxpr.constvars]
        given = [*inputs, *self._constants(body, place)]
        values: dict[Any, int] = dict(zip(variables, given, strict=True))

        def read(atom: Any) -> int:
            if not isinstance(atom, Literal):
                return values[atom]
            # A number that stands in the equation, as 2.0 in x * 2.0, is a value of its own.
            value = self._new(atom, place)
            self.known[value] = atom.val
            return value

        for position, eqn in enumerate(jaxpr.eqns):
            operands = [read(atom) for atom in eqn.invars]
            # A `jit` or a loop is entered. All else is appended as an operation, or as a few
            # simpler ones; a kernel is one operation, though it may have a body.
            if eqn.primitive.name in _ENTERED:
                outputs = self._add_bodies(eqn, position, operands, place)
            else:
                outputs = self._not_entered(eqn, operands, place)
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _not_entered(self, eqn: JaxprEqn, inputs: list[int], place: Place) -> list[int]:
        """Appends an equation that is not entered, perhaps as other operations; returns the values
        of its results.

        A `split` becomes slices, and a `psum` over an axis of a `vmap` a `reduce_sum`.
        """
        name = eqn.primitive.name
        variables = eqn.outvars
        if name in _COLLECTIVES:
            # Under `jax.vmap(f, axis_name="batch")` JAX has replaced "batch" by the number of an
            # axis of each operand. An axis of a mesh keeps its name. A sum over it leaves every
            # entry where it is (`SAME`): over such axes alone it remains a `psum`, and next to an
            # axis of a `vmap` they are left out.
            axes = tuple(axis for axis in eqn.params["axes"] if isinstance(axis, int))
            if axes:
                reduction = _COLLECTIVES[name]
                return self._add_for_each(
                    reduction, [inputs], variables, eqn, place, axes=axes
                )
        # A `pad` with zeros between the entries, as `associative_scan` has it, or with a negative
        # padding is no concatenation, and stays a `pad`. Only a `pad` has this parameter.
        padding = eqn.params.get("padding_config", ())
        stays_pad = any(inside or min(low, high) < 0 for low, high, inside in padding)
        if name not in _REWRITTEN or stays_pad:
            return self._add(name, eqn.params, inputs, variables, eqn, place)
        # In place of the equation, the operations that `_REWRITTEN` says it with are appended.
        rewriting = functools.partial(_REWRITTEN[name], **eqn.params)
        rewritten = jax.make_jaxpr(rewriting)(*(self.avals[x] for x in inputs))
        for operation in rewritten.eqns:
            operation.source_info = eqn.source_info  # the user's line, and JAX's scopes
        outputs = self._walk(rewritten, inputs, place)
        # The rewriting has new variables. Those of the program take their place.
        self._also_in(outputs, variables, place)
        return outputs

    def _add_bodies(
        self, eqn: JaxprEqn, position: int, inputs: list[int], place: Place
    ) -> list[int]:
        """Appends what an equation with bodies does, such as a `jit` or a `scan`;
        returns the values of its results.

        `position`: its index among the equations of the body at `place`.
        """
        name = eqn.primitive.name
        entered: list[tuple[Body, Place]] = []
        for i, body in enumerate(bodies(eqn)):
            inner = (*place, Step(position, i, name))
            self.callers[inner] = [eqn, *self.callers[place]]
            entered.append((body, inner))
        if name == "cond":
            # The first input says which branch runs; each branch takes all other inputs. A result
            # is the "join" of the first input, as that of a `select_n` says which case is taken,
            # and of this result of every branch.
            which, *operands = inputs
            branches = [self._enter(*branch, operands) for branch in entered]
            indices = [which] * len(eqn.outvars)
            return self._add_for_each(
                "join", [indices, *branches], eqn.outvars, eqn, place
            )
        # `bodies` gives the body of a `while` before its condition, which is not followed.
        if name in ("scan", "while"):
            return self._loop(eqn, *entered[0], inputs)
        # All others have one body: the derivatives of a `custom_jvp` or a `custom_vjp` are
        # Python's functions, and no jaxprs.
        ((body, inner),) = entered
        if name == "shard_map":
            # A device has a shard of each array, with fewer entries along some axes: what the body
            # takes and gives are other arrays than those outside.
            # A shard is an array of the body, so its place is `inner`.
            variables = opened(body).invars
            shards = self._add_for_each("shard", [inputs], variables, eqn, inner)
            outputs = self._enter(body, inner, shards)
            return self._add_for_each("unshard", [outputs], eqn.outvars, eqn, place)
        # No operation is added for the call itself. `_enter` notes that its inputs have the
        # variables of the body too, and what the body returns has those of the call's results.
        outputs = self._enter(body, inner, inputs)
        self._also_in(outputs, eqn.outvars, place)
        return outputs

    def _also_in(
        self, values: Sequence[int], variables: Sequence[Any], place: Place
    ) -> None:
        """Notes that these values have these variables in this body too."""
        for x, v in zip(values, variables, strict=True):
            self.variables[x][place] = v

    def _enter(self, body: Body, inner: Place, inputs: Sequence[int]) -> list[int]:
        """Appends the operations of a body; returns the values of its results."""
        # Inside, the inputs of the call have the variables of the body.
        self._also_in(inputs, opened(body).invars, inner)
        return self._walk(body, inputs, inner)

    def _loop(
        self, eqn: JaxprEqn, body: Body, inner: Place, inputs: list[int]
    ) -> list[int]:
        """Appends the body of a scan or a while once; returns the values of the loop's results.

        `lax.scan(lambda x, w: (x @ w, x), x0, weights)` becomes carry(x0, end),
        scan_slice(weights), dot_general, whose result is `end`, and scan_stack(carry). The results
        are `end` and the value of scan_stack.
        """
        # The inputs are [constants, carried arrays, arrays that a scan slices]. Those of a while
        # begin with the constants of its condition, which is not followed,
        # and it slices and stacks nothing.
        if eqn.primitive.name == "scan":
            start, carried = scan_counts(eqn)
        else:
            inputs = inputs[eqn.params["cond_nconsts"] :]
            start = eqn.params["body_nconsts"]
            carried = len(eqn.outvars)
        stop = start + carried
        variables = opened(body).invars
        # A carry operation for each carried array, with one operand so far; they are the first
        # operations of the loop.
        first = len(self.nodes)
        carry = self._add_for_each(
            "carry", [inputs[start:stop]], variables[start:stop], eqn, inner
        )
        # The certificate has to know whose iterations these are: `scan` is the place of the body.
        slices = self._add_for_each(
            "scan_slice", [inputs[stop:]], variables[stop:], eqn, inner, scan=inner
        )
        outputs = self._enter(body, inner, [*inputs[:start], *carry, *slices])
        # carry(x0) becomes carry(x0, end): from the second iteration on the array comes from the
        # end of the body.
        for k, end in enumerate(outputs[:carried], start=first):
            self.nodes[k].inputs += (end,)
        # `follow` repeats the body until what is known of the carried arrays stays the same.
        # Without any, as in `lax.map`, it follows the body once.
        if carry:
            begin = first + carried  # of the body, after the "carry" operations
            self.loops[first] = range(first, begin), range(begin, len(self.nodes))
        # What a scan collects of each iteration is an array [iterations, ...] outside of it: the
        # place without its last step.
        stacked = self._add_for_each(
            "scan_stack",
            [outputs[carried:]],
            eqn.outvars[carried:],
            eqn,
            inner[:-1],
            scan=inner,
        )
        # Outside, the carried arrays are those of the last iteration. So they get no variable
        # there, unlike the results of a `jit`: logits have to be measured in each iteration.
        return [*outputs[:carried], *stacked]

    # What is asked of it.

    def enclosing(self, operation: int) -> list[JaxprEqn]:
        """The equation of an operation, and of the calls and loops that it is in,
        from the inside to the outside."""
        node = self.nodes[operation]
        return [node.equation, *self.callers[node.place]]

    def derivatives(self, operation: int) -> frozenset[str]:
        """The derivatives that it belongs to and that the function takes by itself: "jvp",
        and "transpose" backward."""
        equations = self.enclosing(operation)
        names = [_transforms(x.source_info.name_stack) for x in equations]
        return frozenset().union(*names)

    def upstream(
        self,
        values: Iterable[int],
        with_gradient: bool = False,
        without: Container[int] = (),
    ) -> set[int]:
        """These values, and all values that they depend on.

        Args:
          values: The values to begin with.
          with_gradient: Leaves out those that no gradient comes back to, and what only they depend
            on: indices, as of an argmax, and the results of a `stop_gradient`.
          without: Operations where the search ends: their results are among the values, and their
            operands are not, unless another operation takes these.
        """
        upstream = set()
        pending = list(values)
        while pending:
            value = pending.pop()
            node = self.maker(value)
            is_stopped = node is not None and node.name == "stop_gradient"
            # Floats have a gradient. Quantized weights and their products are integers and count as
            # having one, since a `custom_vjp` passes it on where such weights train.
            has_gradient = self.is_followed(value) and not is_stopped
            if value in upstream or (with_gradient and not has_gradient):
                continue
            upstream.add(value)
            if node is not None and node.index not in without:
                pending += node.inputs
        return upstream

    def line(self, operation: int) -> str:
        """File and line of the user's code that an operation comes from, such as "model.py:41"."""
        # From the inside to the outside: a library's function may be traced once,
        # with no line of the user's.
        for equation in self.enclosing(operation):
            for frame in getattr(equation.source_info.traceback, "frames", ()):
                if not any(part in frame.file_name for part in _LIBRARIES):
                    return f"{_shown(frame.file_name)}:{frame.line_num}"
        # JAX's choice of a frame, where the user's code is installed as a library.
        return source_info_util.summarize(self.nodes[operation].equation.source_info)

    def shape(self, value: int) -> tuple[int, ...]:
        return self.avals[value].shape

    def shapes(self, node: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of an operation's first operand and of its first result."""
        return self.shape(node.inputs[0]), self.shape(node.outputs[0])

    def is_float(self, value: int) -> bool:
        # The token of an ordered effect has no dtype.
        return _is_float(getattr(self.avals[value], "dtype", bool))

    def is_followed(self, value: int) -> bool:
        """Whether rules follow what it is made of: floats and quantized numbers, and no indices,
        as of an argmax."""
        # A product of int8 gives int32, and a quantized weight is int8 or int4.
        node = self.maker(value)
        is_product = node is not None and node.name in PRODUCTS
        is_quantized = getattr(self.avals[value], "dtype", bool) in _QUANTIZED
        return is_product or is_quantized or self.is_float(value)


@functools.cache
def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def _is_readable(array: Any) -> bool:
    """Whether the program contains the numbers of this array."""
    # Under an enclosing transformation a constant may be a tracer, or a key of random numbers.
    if isinstance(array, Tracer) or not hasattr(array, "dtype"):
        return False
    return not jnp.issubdtype(array.dtype, jax.dtypes.extended)


def _is_same(constant: Any, given: Any) -> bool:
    """Whether this constant of a jaxpr is an array that the function was called with,
    or a copy of it.

    Equal numbers count as a copy: a constant that is taken for an argument is not read,
    which may cost a refusal.
    """
    # An array of JAX's becomes a constant as it is. An array of NumPy's may be reshaped, as in
    # `embedding[tokens.reshape(-1)]`, and JAX copies its int64 to int32.
    if isinstance(constant, jax.Array) or not isinstance(given, np.ndarray):
        return constant is given
    return np.array_equal(np.ravel(constant), np.ravel(given).astype(constant.dtype))


PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
_QUANTIZED = tuple(map(jnp.dtype, (jnp.int4, jnp.int8, jnp.uint4, jnp.uint8)))
_LIBRARIES = (
    "site-packages",
    "dist-packages",
    "/muonjax/_inspect/",
    "/muonjax/loha.py",
    "/muonjax/linen.py",
    "<frozen",
    "/lib/python3",
)


def _shown(file: str) -> str:
    """The name of a file, or `In[3]` of a notebook's cell, whose file has a number for a name."""
    # IPython knows which cell has a file's name, such as "/tmp/ipykernel_12/345.py".
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cell = shell.compile.format_code_name(file) if shell is not None else None
    return cell[1] if cell else file.rpartition("/")[2]
