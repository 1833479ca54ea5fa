"""Name the attentions of a program by the paths of their parameters,
and write what a clip scales as sites."""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from muonjax._clip.place_sites import module_of
from muonjax._clip.site import Site
from muonjax._inspect.clippable_attention import Call, attentions
from muonjax._inspect.records import Records


class Attention(NamedTuple):
    """One attention of a program.

    Attributes:
      name: The path of its module, of its query projection where several share a module,
        "max_logits" for the only one at the root: the key of its entry in `max_logits`.
      line: File and line of its product of queries and keys.
      site: What a clip scales; None if that would not scale its logits.
      problem: Why not, "" if it can be clipped.
    """

    name: str
    line: str
    site: Site | None
    problem: str


def named_attentions(
    records: Records, paths: Iterable[str]
) -> list[tuple[Attention, Call]]:
    """The attentions that train, with name and site, in the order of the program;
    each with its `Call`, which says where its logits are.

    An attention with its queries in "block_0/attn/q" and its keys in "block_0/attn/k" is named by
    its module, "block_0/attn", or "max_logits" if that is the root. If several attentions share a
    module, refused ones too, each that can be clipped is named by its queries, "block_0/attn/q".
    One that is refused keeps the module's name, which stands only in messages, and has no site.

    Args:
      records: The program.
      paths: The path of each parameter, by its number.
    """
    calls = attentions(records)
    path_of = dict(enumerate(paths))
    # For each attention the smallest module that has the parameters of its queries and keys, the
    # `views`. The `spans`, below, are what the clip scales of these, queries first.
    modules = []
    for call in calls:
        modules.append(module_of([path_of[view.leaf] for view in call.views]))
    named = []
    count_of: Counter[str] = Counter()
    for call, module in zip(calls, modules, strict=True):
        name = module or "max_logits"
        site = None
        # It can be clipped.
        if call.spans:
            if modules.count(module) > 1:
                name = path_of[call.spans[0].leaf]
            # Names are keys of `max_logits`. Heads of one kernel, written one by one, are several
            # attentions with queries of one path: "q", "q:2" and "q:3".
            count_of[name] += 1
            if count_of[name] > 1:
                name = f"{name}:{count_of[name]}"
            # The paths of a site's scales are those below the site's `path`, which is "" here:
            # the root of the tree.
            scales = tuple(
                dataclasses.replace(span.scale, path=path_of[span.leaf])
                for span in call.spans
            )
            # The axes that count layers, the same in all spans; None without a scan.
            layers = call.spans[0].stack or None
            site = Site(
                path="", scales=scales, signal=name, scan_axis=layers, exact=True
            )
        line = records.line(call.operation)
        named.append((Attention(name, line, site, call.problem), call))
    return named
