"""Name the attentions of a program by the paths of their parameters, and write what a clip scales as sites."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from muonjax._clip.place_sites import module_of
from muonjax._clip.site import Site
from muonjax._inspect.clippable_attention import Call, attentions
from muonjax._inspect.records import Records


def named_attentions(records: Records, paths: Iterable[str]) -> list[Call]:
    """The attentions that train, with name and site, in the order of the program.

    An attention with its queries in "block_0/attn/q" and its keys in "block_0/attn/k" is named by its module,
    "block_0/attn". If several attentions share a module, each is named by its queries, "block_0/attn/q".

    Args:
      records: The program.
      paths: The paths of its parameters.
    """
    calls = attentions(records)
    path_of = dict(enumerate(paths))
    # For each attention the smallest module that has the parameters of its queries and keys.
    modules = []
    for attention in calls:
        parts = (*attention.spans, *attention.views)
        modules.append(module_of([path_of[part.leaf] for part in parts]))
    named = []
    count_of: Counter[str] = Counter()
    for attention, module in zip(calls, modules, strict=True):
        # It can't be clipped.
        if not attention.spans:
            named.append(attention._replace(name=module))
            continue
        name = module or "max_logits"
        if modules.count(module) > 1:
            name = path_of[attention.spans[0].leaf]
        # Heads of one projection, written one by one, have the same queries.
        count_of[name] += 1
        if count_of[name] > 1:
            name = f"{name}:{count_of[name]}"
        # The paths of a site's scales are those below the site's `path`, which is "" here: the root of the tree.
        scales = tuple(
            dataclasses.replace(span.scale, path=path_of[span.leaf])
            for span in attention.spans
        )
        # The axes that count layers are the same in all parameters of an attention; None without a scan.
        layers = attention.spans[0].stack or None
        site = Site(path="", scales=scales, signal=name, scan_axis=layers, exact=True)
        named.append(attention._replace(name=name, site=site))
    return named
