"""Run the README's code, and compare the figures in it and in the docs with their JSON files."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.tools.tiers import quick

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@quick("code0", "code1")
@pytest.mark.parametrize(
    "code", re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
)
def test_code_runs(code):
    exec(compile(code, "README.md", "exec"), {})


def test_numbers_are_the_benchmarks():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.report", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_commands_and_links_exist():
    for path in re.findall(r"python (\S+\.py)", README) + re.findall(
        r"\]\(([^)#:]+)\)", README
    ):
        assert (ROOT / path).exists(), path
    extras = re.findall(r'pip install -e "\.\[(\w+)\]"', README)
    assert extras == ["examples", "test"]


def test_importing_muonjax_does_not_import_flax():
    code = "import sys, muonjax; assert 'flax' not in sys.modules; muonjax.nnx; assert 'flax' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
