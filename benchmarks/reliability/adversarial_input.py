"""Run tests/reliability with 20,000 adversarial examples and count how many pass.

python -m benchmarks.reliability.adversarial_input               # all at once
python -m benchmarks.reliability.adversarial_input any_matrix    # one test; the counts of the others are kept
"""

import re
import subprocess
import sys
from typing import Any

from benchmarks.common import measure

ROOT = measure.RESULTS.parent.parent
TESTS = {
    "any_matrix": "any matrix: spectra, scales 1e-38 to 1e38, zeros, subnormals, NaN, inf; settings, dtypes",
    "any_axes": "any axes of any shape as rows, columns and batch",
    "any_settings": "any value of any setting",
    "any_tree": "any tree of parameters, any routing",
    "an_update_is_as_long": "three steps of `muon` at any scale, one leaf poisoned",
    "any_queries": "any queries, keys and masks through `max_logits`",
    "any_statistic": "any statistic and threshold through QK-Clip",
}


def count(name: str) -> dict[str, Any]:
    """Examples of one test that passed and failed, without those that hypothesis discards."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/reliability", "-k", name]
    command += ["--hypothesis-profile=nightly", "--hypothesis-show-statistics", "--timeout=0", "-m", ""]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.findall(r"(\d+) passing(?: examples)?, (\d+) failing", done.stdout)
    if not found:
        raise RuntimeError(done.stdout + done.stderr)
    passing, failing = (sum(map(int, column)) for column in zip(*found, strict=True))
    if done.returncode:
        print(done.stdout)
    return {"test": name, "input": TESTS[name], "passed": passing, "failed": failing}


def main() -> None:
    rows = {row["test"]: row for row in measure.read("adversarial_input").get("rows", [])}
    for name in sys.argv[1:] or TESTS:
        rows[name] = count(name)
        measure.write(
            "adversarial_input", {"rows": [rows[test] for test in TESTS if test in rows]}, [rows[name]]
        )


if __name__ == "__main__":
    main()
