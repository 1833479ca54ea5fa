"""Break the sources in many places, one at a time, and count the breaks that a tier of the tests finds.

    python -m tests.mutations --check                    # every snippet of the table is in its file exactly once
    python -m tests.mutations quick                      # the whole table; benchmarks/results/mutations.json
    python -m tests.mutations quick --only _clipping     # those whose file or reason has the word
    python -m tests.mutations quick --missing            # those without a result
    python -m tests.mutations thorough                   # those that the quick tests did not find

A break is found if a test of the tier fails in a copy of the repository that has it. A file's own tests run first, then
those of the code that uses it, until one fails. The same tests must first pass in a copy without a break. Rows that
are not run again keep their results. The thorough tier has all tests of the quick one, so that it is only tried on what
the quick one did not find. All runs share a compilation cache.
"""

import argparse
import concurrent.futures
import itertools
import json
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.common import measure
from tests.mutation_table import AFFECTED, MUTATIONS, Mutation

ROOT = pathlib.Path(__file__).parents[1]
TIERS = {
    "quick": "not thorough and not nightly and not interop",
    "thorough": "not nightly and not interop",
}

LEAST = {"quick": 0.90, "thorough": 0.97}  # shares that must be found


class Outcome(NamedTuple):
    found: bool
    seconds: float
    by: str  # the first test that failed


def affected(file: str) -> list[str]:
    """The tests of a source file, its own first."""
    prefix = max((prefix for prefix in AFFECTED if file.startswith(prefix)), key=len)
    return AFFECTED[prefix]


def unmatched() -> list[Mutation]:
    """Entries of the table whose snippet is not in the file exactly once, or that change nothing."""
    texts = {m.file: (ROOT / m.file).read_text() if (ROOT / m.file).exists() else "" for m in MUTATIONS}
    return [m for m in MUTATIONS if texts[m.file].count(m.old) != 1 or m.old == m.new]


def copy_of_the_repository(folder: pathlib.Path) -> pathlib.Path:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    return folder


def run_tests(folder: pathlib.Path, tier: str, tests: list[str], limit: float | None) -> Outcome | None:
    """None if it takes more than `limit` seconds."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder}{os.pathsep}{folder / 'examples'}",
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "mutations"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "--tb=no",
        "-m",
        TIERS[tier],
        *(["--optimized"] if tier == "thorough" else []),
        *tests,
    ]
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return None
    seconds = time.perf_counter() - start
    if done.returncode not in (0, 1, 2):  # passed, failed, not even imported
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    failed = [
        line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    return Outcome(done.returncode != 0, seconds, failed[0].split(maxsplit=1)[-1] if failed else "")


_later = itertools.count(int(time.time()) + 3600)  # after every copied file


def replace_source(path: pathlib.Path, text: str) -> None:
    """Write the file with a time of its own: Python tells its cached bytecode by the second and the size."""
    path.write_text(text)
    os.utime(path, (second := next(_later), second))


def try_mutation(folder: pathlib.Path, tier: str, mutation: Mutation, limit: float | None) -> Outcome | None:
    path = folder / mutation.file
    sound = path.read_text()
    replace_source(path, sound.replace(mutation.old, mutation.new))
    try:
        return run_tests(folder, tier, affected(mutation.file), limit)
    finally:
        replace_source(path, sound)


def score(
    tier: str, mutations: list[Mutation], jobs: int, limit: float | None, *, sound: bool
) -> Iterator[tuple[Mutation, Outcome | None]]:
    """Each with its outcome, as they come; None where the tests took too long."""
    with tempfile.TemporaryDirectory() as work, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        folders: queue.Queue[pathlib.Path] = queue.Queue()
        for job in range(jobs):
            folders.put(copy_of_the_repository(pathlib.Path(work, str(job))))

        def in_a_copy(call, argument):
            folder = folders.get()
            try:
                return call(folder, tier, argument, limit)
            finally:
                folders.put(folder)

        groups = [] if sound else sorted({tuple(affected(m.file)) for m in mutations})
        for outcome in pool.map(lambda group: in_a_copy(run_tests, list(group)), groups):
            if outcome is None or outcome.found:
                raise SystemExit(
                    f"Without any break the tests fail: {outcome and outcome.by}. Mend that first."
                )
        yield from zip(mutations, pool.map(lambda m: in_a_copy(try_mutation, m), mutations), strict=True)


def known_results() -> list[dict]:
    """A row of the JSON for each entry of the table."""
    path = measure.RESULTS / "mutations.json"
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {(row["file"], row["breaks"]): row for row in known}
    return [rows.get((m.file, m.breaks), {"file": m.file, "breaks": m.breaks}) for m in MUTATIONS]


def write(tier: str, outcomes: dict[Mutation, Outcome]) -> None:
    """Merge with the rows of earlier runs and write the JSON."""
    kept = known_results()
    for m, row in zip(MUTATIONS, kept, strict=True):
        if m in outcomes:
            row[tier] = {
                "found": outcomes[m].found,
                "by": outcomes[m].by,
                "seconds": round(outcomes[m].seconds, 1),
            }
        if row.get("quick", {}).get("found"):
            row["thorough"] = row["quick"]
    share = {}
    for name in TIERS:
        ran = [row[name]["found"] for row in kept if name in row]
        if ran:
            share[name] = {"run": len(ran), "found": sum(ran), "share": sum(ran) / len(ran)}
    measure.write("mutations", {"tiers": share, "in_the_table": len(MUTATIONS), "rows": kept})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tier", nargs="?", choices=TIERS)
    parser.add_argument("--check", action="store_true", help="only compare the table with the sources")
    parser.add_argument("--only", default="", help="a word of the file's name or of the reason")
    parser.add_argument("--missing", action="store_true", help="only those that this tier was not tried on")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, help="seconds after which the tests of one break are given up")
    parser.add_argument("--sound", action="store_true", help="the tests are known to pass without a break")
    arguments = parser.parse_args()
    stale = unmatched()
    for m in stale:
        print(f"{m.file}: not there exactly once, please renew: {m.old!r} ({m.breaks})")
    if arguments.check or arguments.tier is None:
        raise SystemExit(len(stale) > 0)
    tier = arguments.tier
    chosen = [
        m
        for m, row in zip(MUTATIONS, known_results(), strict=True)
        if arguments.only in f"{m.file} {m.breaks}"
        and m not in stale
        and not (arguments.missing and tier in row)
        and not (tier == "thorough" and row.get("quick", {}).get("found"))
    ]
    outcomes: dict[Mutation, Outcome] = {}
    for m, outcome in score(tier, chosen, arguments.jobs, arguments.limit, sound=arguments.sound):
        said = "undecided" if outcome is None else f"found by {outcome.by}" if outcome.found else "SURVIVED"
        print(f"{m.file}: {m.breaks}: {said}", flush=True)
        if outcome is not None:
            outcomes[m] = outcome
            write(tier, outcomes)
    results = [row[tier]["found"] for row in known_results() if tier in row]
    print(f"{tier}: {sum(results)} of {len(results)} found, of {len(MUTATIONS)} in the table")
    if sum(results) < LEAST[tier] * len(results):
        raise SystemExit(f"fewer than {LEAST[tier]:.0%}")


if __name__ == "__main__":
    main()
