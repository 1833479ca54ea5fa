"""Check this device: accuracy, kernels and speed, with a verdict.

    python -m muonjax [--quick] [--json]

About a minute on an accelerator, two on a small CPU. The exit status is 1 if any result is not finite, or off by more
than is stated.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from muonjax import _device_check


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m muonjax", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small matrices, whose times mean nothing")
    parser.add_argument("--json", action="store_true", help="print JSON alone, to attach to an issue")
    given = parser.parse_args(arguments)
    report = _device_check.report(quick=given.quick)
    print(json.dumps(report, indent=1) if given.json else "\n".join(_lines(report)))
    return 0 if report["ok"] else 1


def _lines(report: dict[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    yield f"{report['device']} ({report['platform']}), {report['date']}; {versions}"
    yield "\nWhat depends on the platform, for a float32 matrix of 768 x 3072"
    for choice in report["policy"]:
        yield f"  {choice['rule']}: {choice['choice']}\n      {choice['reason']}"
    yield "\nErrors beside float64: of polar factors the root mean square, of symmetric products relative"
    for row in report["checks"]:
        found = row.get("reason") or f"{row['error']:.2g} (at most {row['stated']:.2g})"
        yield f"  {_mark(row)}{row['check']}: {found}"
    yield f"\n{report['timed']}, ms; in parentheses: in units of Optax's"
    for row in report["times"]:
        cells = [f"{name} {ms:.1f} ({ms / row['ms']['Optax']:.2f})" for name, ms in row["ms"].items()]
        yield f"  {_mark(row)}{row['dtype']}: {', '.join(cells)}"
    yield "\n" + report["verdict"]


def _mark(row: dict[str, Any]) -> str:
    return "" if row["ok"] else "WRONG: "


if __name__ == "__main__":
    sys.exit(main())
