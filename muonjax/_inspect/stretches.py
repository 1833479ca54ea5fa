"""Equal stretches of a jaxpr as calls of one function, which JAX then linearizes and transposes once.

`jax.make_jaxpr` inlines the small functions of `jax.numpy`, whose derivatives JAX finds in its caches: without those,
80 unrolled layers take almost twice as long to differentiate. A stretch is what one line of the user's code does, up
to a product. Where the calls are traced they are inlined: nothing is left of them in the program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal, Var

from muonjax._inspect import versions


def stretches(
    eqns: Sequence[JaxprEqn], kept: Container[Any], apart: Container[int], last: Mapping[Any, int]
) -> Iterator[tuple[int, Sequence[JaxprEqn], list[Any]]]:
    """The number of each stretch's first operation, its operations, and those of its results that are used elsewhere.

    `kept` are needed too, others up to the `last` operation that reads them; operations `apart` and those that have a
    body or an effect are alone.
    """
    plain = [i not in apart and _is_plain(eqn) for i, eqn in enumerate(eqns)]
    start = 0
    for stop in range(1, len(eqns) + 1):
        if (
            stop < len(eqns)
            and plain[stop - 1]
            and plain[stop]
            and _belong_together(eqns[stop - 1], eqns[stop])
        ):
            continue
        outputs = [v for eqn in eqns[start:stop] for v in eqn.outvars]
        if plain[start]:
            outputs = [v for v in outputs if v in kept or last.get(v, 0) >= stop]
        yield start, eqns[start:stop], outputs
        start = stop


def _is_plain(eqn: JaxprEqn) -> bool:
    try:
        hash(tuple(eqn.params.values()))
    except TypeError:
        return False
    return not eqn.effects and not versions.bodies(eqn)


def _belong_together(a: JaxprEqn, b: JaxprEqn) -> bool:
    """Whether two operations have line, scope and context in common, as a call has only one of each."""
    one, two = a.source_info, b.source_info
    return (
        a.primitive.name != "dot_general"  # or a loop over layers in one line would be one stretch
        and one.name_stack == two.name_stack
        and a.ctx == b.ctx
        and _line(one.traceback) == _line(two.traceback)
    )


@functools.lru_cache(4096)
def _line(traceback: Any) -> str:
    return source_info_util.summarize(source_info_util.new_source_info().replace(traceback=traceback))


@dataclasses.dataclass(frozen=True)
class _Stretch:
    """Operations; equal to others that do the same."""

    key: tuple[Any, ...]
    eqns: Sequence[JaxprEqn] = dataclasses.field(compare=False)
    inputs: Sequence[Any] = dataclasses.field(compare=False)
    outputs: Sequence[Any] = dataclasses.field(compare=False)

    def run(self, *arrays: Any) -> list[Any]:
        values = dict(zip(self.inputs, arrays, strict=True))
        for eqn in self.eqns:
            operands = [x.val if isinstance(x, Literal) else values[x] for x in eqn.invars]
            out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
            values |= zip(eqn.outvars, out if eqn.primitive.multiple_results else [out], strict=True)
        return [values[v] for v in self.outputs]


def as_call(eqns: Sequence[JaxprEqn], outputs: list[Any]) -> JaxprEqn:
    """One operation that does what these do; one with a body or an effect stays as it is."""
    if not _is_plain(eqns[0]):
        return eqns[0]
    made = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)
    read = dict.fromkeys(v for eqn in eqns for v in eqn.invars if isinstance(v, Var))
    inputs: list[Any] = [v for v in read if v not in made]
    number = {v: k for k, v in enumerate((*inputs, *made))}

    def named(atom: Any) -> Any:
        return (atom.aval, np.asarray(atom.val).tobytes()) if isinstance(atom, Literal) else number[atom]

    operations = ((eqn.primitive, *eqn.params.items(), *map(named, eqn.invars)) for eqn in eqns)
    key = (eqns[0].ctx, *(v.aval for v in inputs), *operations, *map(named, outputs))
    call = _call(_Stretch(key, eqns, inputs, outputs))
    return eqns[0].replace(primitive=call.primitive, params=call.params, invars=inputs, outvars=outputs)


@functools.lru_cache(4096)
def _call(stretch: _Stretch) -> JaxprEqn:
    with stretch.eqns[0].ctx.manager:
        (call,) = jax.make_jaxpr(jax.jit(stretch.run))(*(v.aval for v in stretch.inputs)).eqns
    return call.replace(params=call.params | {"inline": versions.inlined()})
