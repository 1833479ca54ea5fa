"""What differs between versions of JAX in the parameters of equations that contain a jaxpr.

Everything that reads or extends such parameters is here; no module of `jax._src` is imported.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

Body: TypeAlias = Jaxpr | ClosedJaxpr  # JAX 0.12 has one type for both


def bodies(eqn: JaxprEqn) -> list[Body]:
    """The jaxprs that an equation runs: the branches of a `cond`,
    and of a `while` its body before its condition."""
    # JAX sorts by name: "body_jaxpr" comes before "cond_jaxpr".
    return [x for x in jax.tree.leaves(eqn.params) if isinstance(x, Body)]


def opened(body: Body) -> Jaxpr:
    """The jaxpr without the values of its constants."""
    return body.jaxpr if isinstance(body, ClosedJaxpr) else body


def constants(body: Body) -> Sequence[Any]:
    """The values of a jaxpr's constants."""
    return getattr(body, "consts", ())


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many of a scan's inputs are constants, and how many are carried;
    the others are sliced."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # trees, since JAX 0.12
    return len(consts), len(carry)


def with_bodies(
    eqn: JaxprEqn, new: Sequence[ClosedJaxpr], count: int
) -> dict[str, Any]:
    """An equation's parameters with the jaxprs `new` as its bodies, in the order of `bodies`.

    Each returns `count` values more. Parameters that have an entry for each output get `count`
    entries more, which leave the new outputs where JAX puts them by itself: for a `jit` with one
    output and a count of 1, out_shardings=(s,) becomes (s, UNSPECIFIED). The equation is a `cond`,
    or has one body: it is not a `while`, in which no logits are measured.
    """
    remaining = iter(new)

    def replaced(parameter: Any) -> Any:
        if not isinstance(parameter, Body):
            return parameter
        # If the equation holds a plain jaxpr, as `checkpoint` does, it gets a plain jaxpr.
        jaxpr = next(remaining)
        return jaxpr if isinstance(parameter, ClosedJaxpr) else jaxpr.jaxpr

    params: dict[str, Any] = jax.tree.map(replaced, eqn.params)
    # Since JAX 0.12 a scan has in `ft_out` a tree of what it carries and one of what it stacks. The
    # new outputs are stacked: the second tree gets one leaf more for each. Only leaves and their
    # order count, so the new tree may have the old one as its first child.
    if "ft_out" in params:
        carry, stacked = params["ft_out"].unpack()
        tree = type(params["ft_out"])
        maxima = [_one_stacked_output()] * count
        params["ft_out"] = tree(carry, tree(stacked, *maxima))
    for setting, unspecified in _unspecified().items():
        if setting in params:
            params[setting] = (*params[setting], *[unspecified] * count)
    return params


@functools.cache
def _unspecified() -> dict[str, Any]:
    """By the name of a parameter of a `jit` or a `compute_on`,
    its entry for an output that JAX places by itself."""
    (eqn,) = jax.make_jaxpr(jax.jit(lambda x: x))(0.0).eqns
    return {
        "out_shardings": eqn.params["out_shardings"][0],
        "out_layouts": eqn.params["out_layouts"][0],
        "out_memory_spaces": jax.memory.Space.Device,
    }


@functools.cache
def _one_stacked_output() -> Any:
    """The tree of what a scan stacks if that is one array, since JAX 0.12."""
    scan = functools.partial(jax.lax.scan, lambda x, _: (x, x), length=1)
    (eqn,) = jax.make_jaxpr(scan)(0.0).eqns
    _, stacked = eqn.params["ft_out"].unpack()
    return stacked
