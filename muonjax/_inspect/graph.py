"""A jaxpr as one flat list of operations: calls are entered, loops and branches become operations of their own.

A value is the number of an array. Operations that are no primitives: what a loop carries is one value, which comes from
before the loop and from the end of its body ("carry"); the slices that a scan takes are "scan_slice" (`scan`: the place
of its body), what it collects "scan_stack"; a value that comes from several branches is a "join"; into and out of a
`shard_map` an array is divided ("shard") and whole again ("unshard").
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from muonjax._inspect.versions import (
    EXTENSIBLE,
    Body,
    bodies,
    constants,
    opened,
    scan_counts,
    while_counts,
)

# In which order such an einsum multiplies its operands depends on their sizes.
LONG_EINSUM = "an einsum of three or more operands"
# A collective over an axis of a `vmap` is a reduction over an axis of the array.
_COLLECTIVES = {
    "psum": "reduce_sum",
    "psum_invariant": "reduce_sum",
    "pmax": "reduce_max",
    "pmin": "reduce_min",
}
_ENTERED = EXTENSIBLE | {"custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "custom_lin"}


def _without(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    return lax.reshape(x, [n for axis, n in enumerate(x.shape) if axis not in axes])


def _split(x: jax.Array, sizes: Sequence[int], axis: int) -> list[jax.Array]:
    ends = zip(sizes, itertools.accumulate(sizes), strict=True)
    return [lax.slice_in_dim(x, end - size, end, axis=axis) for size, end in ends]


def _tiled(x: jax.Array, reps: Sequence[int]) -> jax.Array:
    shape = [n for pair in zip(reps, x.shape, strict=True) for n in pair]
    repeated = lax.broadcast_in_dim(x, shape, range(1, 2 * x.ndim, 2))
    return lax.reshape(repeated, [n * size for n, size in zip(reps, x.shape, strict=True)])


def _padded(
    x: jax.Array, value: jax.Array, padding_config: Sequence[tuple[int, int, int]]
) -> jax.Array:
    every = zip(x.shape, padding_config, strict=True)
    if any(inside or n + min(low, 0) + min(high, 0) < 0 for n, (low, high, inside) in every):
        return lax.pad(x, value, padding_config)  # not followed
    for axis, (low, high, _) in enumerate(padding_config):
        x = lax.slice_in_dim(x, max(-low, 0), x.shape[axis] - max(-high, 0), axis=axis)
        sizes = [[*x.shape[:axis], max(n, 0), *x.shape[axis + 1 :]] for n in (low, high)]
        before, after = (lax.broadcast_in_dim(value, size, ()) for size in sizes)
        x = lax.concatenate([y for y in (before, x, after) if y.shape[axis]], axis)
    return x


# Operations as others, so that these alone need rules.
_REWRITTEN: dict[str, Callable[..., Any]] = {
    "neg": lambda x: lax.mul(x, np.array(-1).astype(x.dtype)),
    "pad": _padded,
    "split": _split,
    "squeeze": lambda x, dimensions: _without(x, dimensions),
    "stack": lambda *xs, axis: lax.concatenate([lax.expand_dims(x, (axis,)) for x in xs], axis),
    "tile": _tiled,
    "unstack": lambda x, axis: [_without(y, (axis,)) for y in _split(x, [1] * x.shape[axis], axis)],
}


@functools.lru_cache(4096)
def _rewritten(name: str, arrays: Sequence[Any], params: Sequence[tuple[str, Any]]) -> ClosedJaxpr:
    return jax.make_jaxpr(functools.partial(_REWRITTEN[name], **dict(params)))(*arrays)


class Step(NamedTuple):
    """One enclosing equation on the way from the outermost jaxpr to an operation."""

    equation: int  # its index in the enclosing jaxpr
    body: int = 0  # which of its bodies: the branch of a cond, 0 otherwise
    kind: str = ""  # the primitive
    # Where logits are reported:
    layer: bool = (
        False  # of a scan: its iterations are layers, and a leading axis; otherwise maximized over
    )


Place: TypeAlias = tuple[Step, ...]


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """One operation."""

    index: int  # in the list of all
    name: str
    params: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    equation: JaxprEqn | None
    place: Place
    passes: str  # of a gradient that the function takes by itself: "forward" or "backward"


@functools.lru_cache(1024)
def _pass(name_stack: Any) -> str:
    # And no scope of a user's.
    transforms = [x.name for x in name_stack.stack if type(x).__name__ == "Transform"]
    return "backward" if "transpose" in transforms else "forward" if "jvp" in transforms else ""


@functools.lru_cache(1024)
def _is_long_einsum(name_stack: Any) -> bool:
    """Whether operations in these scopes are those of a `jnp.einsum` that sums over axes of three or more operands."""
    for scope in name_stack.stack:
        operands, arrow, result = scope.name.replace(" ", "").partition("->")
        if arrow and operands.count(",") > 1 and not set(operands) <= {",", *result}:
            return True
    return False


class Loop(NamedTuple):
    """The "carry" operations of a loop, and where the operations of its body end that come after them."""

    carries: range
    last: int


class Graph:
    """The operations of a function in an order in which they can run."""

    def __init__(self, closed: Body, parameters: range, given: Sequence[Any] = ()):
        """The operations of `closed`.

        Args:
          closed: The jaxpr.
          parameters: Which of its inputs are parameters.
          given: Arrays that the function was called with and that are not inputs of the jaxpr. The
            jaxpr has them as constants, whose numbers are no part of the program.
        """
        jaxpr = opened(closed)
        self._given = given
        self.nodes: list[Node] = []
        self.loops: dict[int, Loop] = {}  # by its first operation
        self.avals: list[Any] = []
        # The values of literals, of constant numbers and of constant indices.
        self.known: dict[int, Any] = {}
        # The variable of each value, in the body where it is first seen.
        self.variables: list[Any] = []
        self.callers: dict[Place, JaxprEqn] = {}  # of each body, by its place
        inputs = [self._new(v) for v in jaxpr.invars]
        self.parameters = [inputs[i] for i in parameters]
        self.arguments = [x for i, x in enumerate(inputs) if i not in parameters]
        self.constants: list[int] = []  # arrays that the function closes over, or one inside of it
        self.closed_over: dict[int, Any] = {}  # the values of those that the program contains
        self.numbers: dict[int, Any] = {}  # what `constants.numbers_in` found
        # Where else a value has a variable: inside of the calls that get it, or outside of the one that returns it.
        self.elsewhere: dict[int, list[tuple[Place, Any]]] = {}
        self.outputs = self._walk(jaxpr, self._constants(closed), inputs, ())
        self.producer = {out: i for i, node in enumerate(self.nodes) for out in node.outputs}
        # Operations that an output of the function depends on, or a gradient that the function takes.
        self.live = self._before_outputs(lambda i: self.nodes[i].inputs)
        # Those that a gradient of the outputs comes back to.
        self.trained = {
            i
            for i in self._before_outputs(self._inputs_with_gradient)
            if not self._stops_gradient(i)
        }

    def _stops_gradient(self, operation: int) -> bool:
        return self.nodes[operation].name == "stop_gradient"

    def _inputs_with_gradient(self, operation: int) -> tuple[int, ...]:
        return () if self._stops_gradient(operation) else self.nodes[operation].inputs

    def _before_outputs(self, inputs: Callable[[int], Iterable[int]]) -> set[int]:
        """The operations before the outputs; `inputs` says which inputs of an operation are followed."""
        values = self.upstream(self.outputs, inputs)
        operations = {self.producer[x] for x in values if x in self.producer}
        if any(self.nodes[i].passes == "backward" for i in operations):
            # The backward pass need not use what the forward pass returns.
            ends = [x for node in self.nodes if node.passes == "forward" for x in node.outputs]
            values |= self.upstream(ends, inputs)
        return {self.producer[x] for x in values if x in self.producer}

    @functools.cached_property
    def readers(self) -> dict[int, list[int]]:
        """The operations that take a value."""
        readers: dict[int, list[int]] = {x: [] for x in range(len(self.avals))}
        for i, node in enumerate(self.nodes):
            for x in node.inputs:
                readers[x].append(i)
        return readers

    def _new(self, variable: Any) -> int:
        self.avals.append(variable.aval)
        self.variables.append(variable)
        return len(self.avals) - 1

    def _constants(self, body: Body) -> list[int]:
        """The arrays that a body closes over."""
        numbers = [self._new(v) for v in opened(body).constvars]
        self.constants += numbers
        for x, array in zip(numbers, constants(body), strict=False):
            if _is_readable(array) and not any(_is_same(array, given) for given in self._given):
                self.closed_over[x] = array
                if _is_index(array):
                    self.known[x] = np.asarray(array)
        return numbers

    def _add(
        self,
        name: str,
        params: dict[str, Any],
        inputs: Sequence[int],
        variables: Sequence[Any],
        equation: JaxprEqn | None,
        place: Place,
    ) -> list[int]:
        """Appends an operation of the body at `place`; returns the values of its `variables`, which are new."""
        outputs = [self._new(v) for v in variables]
        passes = ""
        if equation is not None:
            scopes = equation.source_info.name_stack
            passes = _pass(scopes)
            name = LONG_EINSUM if _is_long_einsum(scopes) else name
        node = Node(
            index=len(self.nodes),
            name=name,
            params=params,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            equation=equation,
            place=place,
            passes=passes,
        )
        self.nodes.append(node)
        return outputs

    def _add_for_each(
        self,
        name: str,
        operands: Sequence[Sequence[int]],
        variables: Sequence[Any],
        equation: JaxprEqn | None,
        place: Place,
        **params: Any,
    ) -> list[int]:
        """Appends an operation with one result for each variable, such as a "join" for each output of a `cond`.

        `operands` has a list for each operand of these operations, which are taken in parallel: operation k gets
        [values[k] for values in operands].
        """
        results = []
        for k, variable in enumerate(variables):
            inputs = [values[k] for values in operands]
            results += self._add(name, params, inputs, [variable], equation, place)
        return results

    def _walk(
        self,
        jaxpr: Any,
        consts: Sequence[int],
        args: Sequence[int],
        place: Place,
        source: Any = None,
    ) -> list[int]:
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: Any) -> int:
            if not isinstance(atom, Literal):
                return env[atom]
            self.known[number := self._new(atom)] = atom.val
            return number

        for position, eqn in enumerate(jaxpr.eqns):
            inputs = [read(atom) for atom in eqn.invars]
            inside = bodies(eqn) if eqn.primitive.name in _ENTERED else []
            if inside:
                outputs = self._enclosing(
                    eqn, position, [body for _, body in inside], inputs, place
                )
            else:
                outputs = self._single(eqn, inputs, place, source)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _single(
        self, eqn: JaxprEqn, inputs: list[int], place: Place, source: JaxprEqn | None
    ) -> list[int]:
        """An equation without a body; it rewrites `source`, if that is given."""
        name = eqn.primitive.name
        if name in _COLLECTIVES:
            axes = tuple(axis for axis in eqn.params["axes"] if isinstance(axis, int))
            if axes:
                return self._add_for_each(
                    _COLLECTIVES[name], [inputs], eqn.outvars, eqn, place, axes=axes
                )
        if name not in _REWRITTEN or source is not None:
            return self._add(name, eqn.params, inputs, eqn.outvars, source or eqn, place)
        avals: list[Any] = [v.aval for v in eqn.invars]
        arrays = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)
        other = _rewritten(name, arrays, tuple(eqn.params.items()))
        outputs = self._walk(other.jaxpr, (), inputs, place, eqn)
        self._also_in(outputs, eqn.outvars, place)
        return outputs

    def _enclosing(
        self,
        eqn: JaxprEqn,
        position: int,
        inside: Sequence[Body],
        inputs: list[int],
        place: Place,
    ) -> list[int]:
        """An equation with bodies, number `position` in its own body."""
        name = eqn.primitive.name
        places = [(*place, Step(position, i, name)) for i in range(len(inside))]
        self.callers |= dict.fromkeys(places, eqn)
        if name == "scan":
            constants, carried = scan_counts(eqn)
            return self._loop(eqn, inside[0], places[0], inputs, constants, carried)
        if name == "while":
            conditions, constants = while_counts(eqn)
            inputs, carried = inputs[conditions:], len(eqn.outvars)
            return self._loop(eqn, inside[0], places[0], inputs, constants, carried)
        if name == "cond":
            which, *operands = inputs
            branches = [
                self._enter(body, operands, inner)
                for body, inner in zip(inside, places, strict=True)
            ]
            indices = [which] * len(eqn.outvars)
            return self._add_for_each("join", [indices, *branches], eqn.outvars, eqn, place)
        return self._call(eqn, inside[0], places[0], inputs)

    def _also_in(self, values: Sequence[int], variables: Sequence[Any], place: Place) -> None:
        """These values have these variables in this body too."""
        for x, v in zip(values, variables, strict=True):
            self.elsewhere.setdefault(x, []).append((place, v))

    def _call(self, eqn: JaxprEqn, body: Body, inner: Place, inputs: list[int]) -> list[int]:
        is_divided = eqn.primitive.name == "shard_map"
        if is_divided:
            inputs = self._add_for_each("shard", [inputs], opened(body).invars, eqn, inner)
        outputs = self._enter(body, inputs, inner)
        if is_divided:
            outputs = self._add_for_each("unshard", [outputs], eqn.outvars, eqn, inner[:-1])
        self._also_in(outputs, eqn.outvars, inner[:-1])
        return outputs

    def _enter(self, body: Body, inputs: Sequence[int], place: Place) -> list[int]:
        jaxpr = opened(body)
        self._also_in(inputs, jaxpr.invars, place)
        return self._walk(jaxpr, self._constants(body), inputs, place)

    def _loop(
        self, eqn: JaxprEqn, body: Body, inner: Place, inputs: list[int], consts: int, carried: int
    ) -> list[int]:
        """A scan or a while: its inputs are constants, then what is carried, then what is sliced."""
        first, after = len(self.nodes), consts + carried
        variables = opened(body).invars
        carry = self._add_for_each(
            "carry", [inputs[consts:after]], variables[consts:after], None, inner
        )
        sliced = self._add_for_each(
            "scan_slice", [inputs[after:]], variables[after:], eqn, inner, scan=inner
        )
        outs = self._enter(body, [*inputs[:consts], *carry, *sliced], inner)
        for i, out in enumerate(outs[:carried]):  # its second source is the end of the body
            self.nodes[first + i].inputs += (out,)
        if carry:
            self.loops[first] = Loop(range(first, first + carried), len(self.nodes))
        stacked = self._add_for_each(
            "scan_stack", [outs[carried:]], eqn.outvars[carried:], eqn, inner[:-1]
        )
        return [*outs[:carried], *stacked]

    def upstream(self, values: Iterable[int], inputs: Callable[[int], Iterable[int]]) -> set[int]:
        """These values and all that they depend on; `inputs` says which inputs of an operation are followed."""
        found, pending = set(), list(values)
        while pending:
            if (value := pending.pop()) not in found:
                found.add(value)
                pending += inputs(self.producer[value]) if value in self.producer else ()
        return found

    def data_before(self, values: Iterable[int]) -> set[int]:
        """The arrays that these values depend on and whose numbers are no part of the program."""
        upstream = self.upstream(values, lambda i: self.nodes[i].inputs)
        return upstream.intersection((*self.arguments, *self.constants)) - self.closed_over.keys()

    def variables_of(self, value: int) -> dict[Place, Any]:
        """The variable that a value has in each body where it has one."""
        made = self.producer.get(value)
        found = {} if made is None else {self.nodes[made].place: self.variables[value]}
        return found | dict(self.elsewhere.get(value, ()))

    def line(self, operation: int) -> str:
        """File and line of the user's code that an operation comes from, or a call of the library's that has it."""
        node = self.nodes[operation]
        around = [self.callers[node.place[:depth]] for depth in range(len(node.place), 0, -1)]
        return next(filter(None, map(_line_of, [node.equation, *around])), "")

    def is_stack_of_scalars(self, value: int) -> bool:
        made = [self.nodes[self.producer[value]]] if value in self.producer else []
        inputs = [x for node in made if node.name == "concatenate" for x in node.inputs]
        singles = [self.nodes[self.producer[x]].inputs for x in inputs if x in self.producer]
        return 0 < len(inputs) == len(singles) and all(
            xs and self.shape(xs[0]) == () for xs in singles
        )

    def shape(self, value: int) -> tuple[int, ...]:
        return self.avals[value].shape

    def is_float(self, value: int) -> bool:
        return _is_float(getattr(self.avals[value], "dtype", None))

    def is_followed(self, value: int) -> bool:
        """Whether it is a number, perhaps a quantized one or a sum of those, and no index, as of an argmax."""
        if self.is_float(value):
            return True
        made = self.nodes[self.producer[value]].name if value in self.producer else ""
        return made in PRODUCTS or getattr(self.avals[value], "dtype", None) in _QUANTIZED


@functools.cache
def _is_float(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _is_readable(array: Any) -> bool:
    """Whether the program contains the numbers of this array."""
    if isinstance(array, Tracer) or not hasattr(array, "dtype"):
        return False
    return not jnp.issubdtype(array.dtype, jax.dtypes.extended)


def _is_same(constant: Any, given: Any) -> bool:
    """Whether this constant of a jaxpr is an array that the function was called with, or a view of it."""
    if constant is given or isinstance(constant, jax.Array) or not isinstance(given, np.ndarray):
        return constant is given
    numbers = np.asarray(constant)
    if np.may_share_memory(numbers, given):
        return True
    # JAX copies numbers of 64 bits, if it has those of 32 bits alone.
    is_copied = given.dtype.kind in "iuf" and given.dtype.itemsize == 8
    if not is_copied or numbers.size != given.size:
        return False
    copied = given.reshape(-1).astype(numbers.dtype)
    return np.array_equal(numbers.reshape(-1), copied, equal_nan=True)


def _is_index(array: Any) -> bool:
    """Whether it is a number, as of a mask that the function closes over, or the indices of one axis."""
    return array.ndim == 0 or (array.ndim == 1 and not jnp.issubdtype(array.dtype, jnp.inexact))


PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
_QUANTIZED = tuple(map(jnp.dtype, (jnp.int4, jnp.int8, jnp.uint4, jnp.uint8)))
_LIBRARIES = ("site-packages", "dist-packages", "/muonjax/_inspect/", "<frozen", "/lib/python3")


def _line_of(equation: JaxprEqn | None) -> str:
    """File and line of the user's code that made an equation: "model.py:41"; "" where a library traced it once."""
    if equation is None:
        return ""
    frames: Iterator[Any] = iter(getattr(equation.source_info.traceback, "frames", ()))
    for frame in frames:
        if not any(part in frame.file_name for part in _LIBRARIES):
            return f"{_shown(frame.file_name)}:{frame.line_num}"
    where = source_info_util.summarize(equation.source_info).split(" ")[0]
    return ":".join(where.rpartition("/")[2].split(":")[:2])


def _shown(file: str) -> str:
    """The name of a file, or `In[3]` of a notebook's cell, whose file has a number for a name."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cell = shell.compile.format_code_name(file) if shell is not None else None
    return cell[1] if cell else file.rpartition("/")[2]
