"""Finds attention's logits in a jaxpr, for tests: a product with batch axes that reaches a maximum or a custom softmax.

Heads are given by their axes in the logits. A scan is one of layers if it slices a parameter.
"""

from collections.abc import Iterator

from jax.extend.core import Literal

from muonjax._inspect.graph import Step
from muonjax._inspect.report import Probe
from muonjax._inspect.versions import bodies, opened, scan_counts

ELEMENTWISE = {
    "mul",
    "div",
    "add",
    "sub",
    "select_n",
    "convert_element_type",
    "tanh",
    "max",
    "reshape",
    "transpose",
}


def finder(*heads):
    def find(closed, leaves):
        jaxpr = opened(closed)
        probes = list(search(jaxpr, (), set(jaxpr.invars[:leaves]), set(), heads))
        return [(f"site{i}", probe) for i, probe in enumerate(probes)]

    return find


def search(jaxpr, path, parameters, logits, heads) -> Iterator[Probe]:
    """Adds to `logits` the variables of `jaxpr` that are images of logits."""
    for i, eqn in enumerate(jaxpr.eqns):
        name = eqn.primitive.name
        variables = [None if isinstance(v, Literal) else v for v in eqn.invars]
        marked = [v in logits for v in variables]
        product = (
            name == "dot_general" and eqn.params["dimension_numbers"][1][0] and not parameters & {*variables}
        )
        if product or (name in ELEMENTWISE and any(marked)):
            logits |= {*eqn.outvars}
        elif (name == "reduce_max" and marked[0]) or (name.startswith("custom_jvp") and any(marked)):
            variable = variables[marked.index(True)]
            yield Probe(path, variable, heads)
        elif name not in ("custom_jvp_call", "custom_vjp_call", "reduce"):
            for b, (key, body) in enumerate(bodies(eqn)):
                if key == "cond_jaxpr":
                    continue
                inner = opened(body)
                given = variables[len(variables) - len(inner.invars) :]  # of a cond without its index
                inside = {v for v, outer in zip(inner.invars, given, strict=True) if outer in parameters}
                layer = name == "scan" and any(v in inside for v in inner.invars[sum(scan_counts(eqn)) :])
                found = {v for v, outer in zip(inner.invars, given, strict=True) if outer in logits}
                step = Step(i, b, layer=layer)
                yield from search(inner, (*path, step), inside, found, heads)
                if name in ("jit", "pjit"):
                    logits |= {o for o, v in zip(eqn.outvars, inner.outvars, strict=True) if v in found}
