"""Break the sources one place at a time, and count the breaks that the quick tests find.

    python -m tests.mutations random --seed 1 --number 100   # as many lines of the library, one random break of each
    python -m tests.mutations survivors                      # the random ones that were not found, once more
    python -m tests.mutations rows                           # those of rows.txt

A break is found if one of its tests (mapping.py) fails, or never ends, in a copy of the repository that has it. Results
are in benchmarks/results/mutations.json. A survivor needs a test, or, where no test can tell it from the sources, three
lines in equivalent.txt; these are left out of the score. All runs share a compilation cache.
"""

import argparse
import json
import math
import os
import tempfile

from benchmarks.common import measure
from tests.mutations.breaks import ROOT, Break, candidate_lines, read, sample
from tests.mutations.trial import Trial

LEAST = 0.85  # the share that must be found
KEY = ("file", "old", "new", "which")
RESULTS = measure.RESULTS / "mutations.json"


def interval(found: int, tried: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's, which holds 95 of 100 times the share of all breaks that are found, of which these are a sample."""
    n = max(tried, 1)
    middle = found + z**2 / 2
    wide = z * math.sqrt(found * (n - found) / n + z**2 / 4)
    return (middle - wide) / (n + z**2), min(1.0, (middle + wide) / (n + z**2))


def shares(rows: list[dict]) -> dict:
    """How many were tried, and found at first and by now, without those that change nothing."""
    counted = [row for row in rows if not row["equivalent"]]
    found = sum(bool(row["by"]) for row in counted)
    first = sum(bool(row["first"]) for row in counted)
    low, high = interval(first, len(counted))
    return {
        "tried": len(rows),
        "equivalent": len(rows) - len(counted),
        "found_at_first": first,
        "share_at_first": first / max(len(counted), 1),
        "low": low,
        "high": high,
        "found": found,
        "share": found / max(len(counted), 1),
    }


def write(kept: dict[tuple, dict]) -> dict:
    """The JSON, with a sum of each seed's lines and of the rows by hand."""
    equivalent = {(one.file, one.old, one.new) for one in read("equivalent.txt")}
    rows = sorted(
        kept.values(), key=lambda row: (str(row["set"]), row["file"], row["old"])
    )
    for row in rows:
        row["equivalent"] = (row["file"], row["old"], row["new"]) in equivalent
    names = dict.fromkeys(row["set"] for row in rows)
    sets = {name: shares([row for row in rows if row["set"] == name]) for name in names}
    measure.write("mutations", {"lines": candidate_lines(), "sets": sets, "rows": rows})
    return sets


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["random", "survivors", "rows", "score"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--only", default="", help="a part of the file's name")
    arguments = parser.parse_args()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".pytest_cache" / "mutations")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    kept = {}
    if RESULTS.exists() and "sets" in (known := json.loads(RESULTS.read_text())):
        kept = {
            (row["set"], *(row[name] for name in KEY)): row for row in known["rows"]
        }
    match arguments.what:
        case "random":
            name = f"seed {arguments.seed}"
            drawn = sample(arguments.seed, arguments.number)
            tried = [
                (name, b) for b in drawn if (name, *b[:4]) not in kept
            ]  # go on where it was left
        case "survivors":
            left = [
                (name, Break(*one))
                for (name, *one), r in kept.items()
                if not (r["by"] or r["equivalent"])
            ]
            tried = [
                (name, one) for name, one in left if one.is_there()
            ]  # the others count as not found
        case "rows":
            tried = [("by hand", b) for b in read("rows.txt")]
        case "score":
            tried = []
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(folder)
        finders = set()
        for name, one in tried:
            if arguments.only not in one.file:
                continue
            by = trial.found_by(one)
            print(
                f"{one.file}\n  - {one.old}\n  + {one.new}\n  {by or 'SURVIVED'}",
                flush=True,
            )
            finders.add(by)
            first = kept.get((name, *one[:4]), {}).get("first", by)
            kept[name, *one[:4]] = {
                "set": name,
                **dict(zip(KEY, one, strict=False)),
                "first": first,
                "by": by,
            }
            write(kept)
        if failed := trial.fail_anyway(finders):
            raise SystemExit(
                f"Without any break fail: {failed}. Mend these first, they find nothing."
            )
    sets = write(kept)
    print(json.dumps(sets, indent=1))
    if any(one["share"] < LEAST for one in sets.values()):
        raise SystemExit(f"fewer than {LEAST:.0%}")


if __name__ == "__main__":
    main()
