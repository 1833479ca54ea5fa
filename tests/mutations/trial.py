"""A copy of the repository with one break at a time, and its tests until one fails."""

import functools
import itertools
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

from tests.mutations.breaks import ROOT, SOURCES, Break
from tests.mutations.mapping import tests_of

# Each run is forked from a process that has imported what takes long, and has not used JAX.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    ["flax.nnx", "flax.linen", "optax", "equinox", "hypothesis", "pytest", "scipy.linalg"]
)


def copy_of_the_repository(folder: pathlib.Path) -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


class First:
    """A plugin of pytest that sends the first test that fails."""

    def __init__(self, pipe):
        self.pipe = pipe

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.pipe.send(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def run_pytest(folder: str, tests: tuple[str, ...], pipe) -> None:
    """In a process of its own, which takes nothing of this repository but the copy."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "benchmarks", *SOURCES)]:
        del sys.modules[name]
    sys.path[:0] = [folder, f"{folder}/examples"]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    pipe.send("begun")
    code = pytest.main(["-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests], plugins=[First(pipe)])
    pipe.send("no import" if code else "")


def failed_test(folder: pathlib.Path, tests: tuple[str, ...], limit: float | None = None) -> str:
    """The first of the quick tests that fails, or an empty string."""
    here, there = processes.Pipe(duplex=False)
    process = processes.Process(target=run_pytest, args=(str(folder), tests, there))
    process.start()
    there.close()
    assert here.recv() == "begun"
    try:
        return here.recv() if here.poll(limit) else "no end"
    except EOFError:
        return "a crash"
    finally:
        process.kill()
        process.join()


class Trial:
    """A copy of the repository, with one break at a time."""

    def __init__(self, folder: str):
        self.folder = pathlib.Path(folder)
        copy_of_the_repository(self.folder)
        self.later = itertools.count(int(time.time()) + 3600)  # bytecode is told by its second and size

    @functools.cache  # noqa: B019
    def seconds_without_a_break(self, tests: tuple[str, ...]) -> float:
        start = time.perf_counter()
        if by := failed_test(self.folder, tests):
            raise SystemExit(f"Without any break {by} fails. Mend that first.")
        return time.perf_counter() - start

    def found_by(self, one: Break) -> str:
        tests, path = tuple(tests_of(one.file)), self.folder / one.file
        limit = 60 + 4 * self.seconds_without_a_break(tests)
        sound = path.read_text()
        try:
            self.write(path, one.apply(sound))
            return failed_test(self.folder, tests, limit)
        finally:
            self.write(path, sound)

    def write(self, path: pathlib.Path, text: str) -> None:
        path.write_text(text)
        os.utime(path, (second := next(self.later), second))
