"""Equal stretches of a jaxpr as calls of one function, which JAX then linearizes and transposes once.

`jax.make_jaxpr` inlines the small functions of `jax.numpy`, whose derivatives JAX finds in its caches: without those,
80 unrolled layers take almost twice as long to differentiate. A stretch is what one line of the user's code does, up
to a product. Where the calls are traced they are inlined: nothing is left of them in the program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from muonjax._program import versions
from muonjax._program.versions import opened


def shared(closed: ClosedJaxpr) -> ClosedJaxpr:
    """`closed` with calls in place of its stretches; what has a body or an effect stays as it is."""
    jaxpr, new, start = opened(closed), [], 0
    last: dict[Any, int] = {
        v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if isinstance(v, Var)
    }
    last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if isinstance(v, Var)}
    for stop, eqn in enumerate(jaxpr.eqns, 1):
        if stop == len(jaxpr.eqns) or not _belong_together(eqn, jaxpr.eqns[stop]):
            kept = [v for e in jaxpr.eqns[start:stop] for v in e.outvars if last.get(v, 0) >= stop]
            new.append(_as_call(jaxpr.eqns[start:stop], kept) if _is_plain(eqn) else eqn)
            start = stop
    return versions.extended(closed, new, [])


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
        and _is_plain(a)
        and _is_plain(b)
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


def _as_call(eqns: Sequence[JaxprEqn], outputs: list[Any]) -> JaxprEqn:
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
