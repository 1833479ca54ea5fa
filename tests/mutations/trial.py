"""A copy of the repository with one break at a time, and its tests until one fails."""

import itertools
import multiprocessing
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.mutations.breaks import ROOT, SOURCES, Break
from tests.mutations.mapping import tests_of

LONGEST = 100  # seconds of a core that one quick test may take; a loop without an end takes more
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


class Failures:
    """A plugin of pytest that sends which tests fail, and ends one that never ends."""

    def __init__(self, pipe):
        self.pipe = pipe

    def pytest_runtest_logstart(self):
        """Of its own time and not the clock's, which tells how busy the machine is."""
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + LONGEST, resource.RLIM_INFINITY))

    pytest_sessionstart = pytest_runtest_logstart

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.pipe.send(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def run_pytest(folder: str, tests: list[str], options: list[str], pipe) -> None:
    """In a process of its own, which takes nothing of this repository but the copy."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "benchmarks", *SOURCES)]:
        del sys.modules[name]
    sys.path[:0] = [folder, f"{folder}/examples"]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    sys.dont_write_bytecode = False  # the next run takes what this one compiled
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    code = pytest.main(
        ["-q", "--tb=no", "-p", "no:cacheprovider", *options, *tests], plugins=[Failures(pipe)]
    )
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        pipe.send("no import")


def failures(folder: pathlib.Path, tests: list[str], *options: str) -> list[str]:
    """Which of these tests fail; with the option "-x" the first."""
    here, there = processes.Pipe(duplex=False)
    process = processes.Process(target=run_pytest, args=(str(folder), tests, options, there))
    process.start()
    there.close()
    failed = []
    try:
        while True:
            failed.append(here.recv())
    except EOFError:
        process.join()
    ends = {0: [], -signal.SIGXCPU: ["no end"]}
    return failed + ends.get(process.exitcode, ["a crash"])


class Trial:
    """A copy of the repository, with one break at a time."""

    def __init__(self, folder: str):
        self.folder = pathlib.Path(folder)
        copy_of_the_repository(self.folder)
        self.later = itertools.count(int(time.time()) + 3600)  # bytecode is told by its second and size

    def found_by(self, one: Break) -> str:
        """The first of its tests that fails, or an empty string."""
        path = self.folder / one.file
        sound = path.read_text()
        try:
            self.write(path, one.apply(sound))
            return next(iter(failures(self.folder, tests_of(one.file), "-x")), "")
        finally:
            self.write(path, sound)

    def fail_anyway(self, tests: set[str]) -> list[str]:
        """Those of these tests that fail without a break, which find none."""
        return failures(self.folder, sorted(test for test in tests if "::" in test)) if tests else []

    def write(self, path: pathlib.Path, text: str) -> None:
        path.write_text(text)
        os.utime(path, (second := next(self.later), second))
