"""Count what names get right on the trees of public models: `python -m tests.zoo` writes benchmarks/results/zoo.json.

The rows of other libraries, whose rules need them installed, stay as they are.
"""

import collections
import math
import warnings

from benchmarks.common import measure
from muonjax._names.routes import routes
from tests.zoo.reader import matches, params, read_zoo


def counted(zoo):
    """How many leaves, parameters and trees are right, open (matrices that go to Adam with a warning) or wrong."""
    row = collections.Counter()
    for leaves in zoo.values():
        answers = routes(params(leaves))
        judged = set()
        for leaf in leaves:
            answer = answers[leaf.path]
            verdict = "open" if answer.is_open else "wrong"
            # Also a leaf that a warning names, and that is Adam's.
            if matches(answer.numbers, leaf.right):
                verdict = "right"
            judged.add(verdict)
            row[f"leaves_{verdict}"] += 1
            row[f"parameters_{verdict}"] += math.prod(leaf.shape)
        # The worst of its leaves.
        row["trees_" + next(v for v in ("wrong", "open", "right") if v in judged)] += 1
    return {
        f"{what}_{verdict}": row[f"{what}_{verdict}"]
        for what in ("leaves", "parameters", "trees")
        for verdict in ("right", "open", "wrong")
    }


if __name__ == "__main__":
    with warnings.catch_warnings(action="ignore"):
        ours = counted(read_zoo())
    table = measure.read("zoo")
    rows = measure.replaced(table["rows"], {"trees": "all", "rule": "muonjax"}, ours)
    measure.write("zoo", {"rows": rows})
