"""A copy of the repository with one break at a time, and its tests until one fails."""

import itertools
import json
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
SECONDS = ROOT / ".pytest_cache" / "mutations.json"  # of each test
UNKNOWN = 0.2  # seconds of a test that has not run yet
# Each run is forked from a process that has imported what takes long, and has not used JAX.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    [
        "flax.nnx",
        "flax.linen",
        "optax",
        "equinox",
        "hypothesis",
        "pytest",
        "scipy.linalg",
    ]
)


def copy_of_the_repository(folder: pathlib.Path) -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


class Quickest:
    """A plugin of pytest: the quick tests come first; which fail and how long each takes is sent.

    Seconds are those of a core, not of the clock, which tells how busy the machine is.
    """

    def __init__(self, pipe, seconds: dict[str, float]):
        self.pipe = pipe
        self.seconds = seconds

    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: self.seconds.get(item.nodeid, UNKNOWN))

    def pytest_runtest_logstart(self):
        self.begin = time.process_time()
        resource.setrlimit(
            resource.RLIMIT_CPU, (int(self.begin) + LONGEST, resource.RLIM_INFINITY)
        )

    pytest_sessionstart = pytest_runtest_logstart

    def pytest_runtest_logfinish(self, nodeid):
        self.pipe.send((nodeid, time.process_time() - self.begin))

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.pipe.send((report.nodeid, None))

    pytest_collectreport = pytest_runtest_logreport


def run_pytest(
    folder: str, tests: list[str], options: list[str], plugin: Quickest
) -> None:
    """In a process of its own, which takes nothing of this repository but the copy."""
    for name in [
        name
        for name in sys.modules
        if name.split(".")[0] in ("tests", "benchmarks", *SOURCES)
    ]:
        del sys.modules[name]
    sys.path[:0] = [folder, f"{folder}/examples"]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    sys.dont_write_bytecode = False  # the next run takes what this one compiled
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    code = pytest.main(
        ["-q", "--tb=no", "-p", "no:cacheprovider", *options, *tests], plugins=[plugin]
    )
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        plugin.pipe.send(("no import", None))


class Trial:
    """A copy of the repository, with one break at a time."""

    def __init__(self, folder: str):
        self.folder = pathlib.Path(folder)
        copy_of_the_repository(self.folder)
        self.seconds: dict[str, float] = (
            json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
        )
        self.later = itertools.count(
            int(time.time()) + 3600
        )  # bytecode is told by its second and size

    def found_by(self, one: Break) -> str:
        """The first of its tests that fails, or an empty string if none does."""
        path = self.folder / one.file
        sound = path.read_text()
        try:
            self.write(path, one.apply(sound))
            return next(iter(self.failures(tests_of(one.file), "-x")), "")
        finally:
            self.write(path, sound)

    def fail_anyway(self, tests: set[str]) -> list[str]:
        """Those of these tests that fail without a break, which find none."""
        return (
            self.failures(sorted(test for test in tests if "::" in test))
            if tests
            else []
        )

    def failures(self, tests: list[str], *options: str) -> list[str]:
        """Which of these tests fail; with the option "-x" the first."""
        here, there = processes.Pipe(duplex=False)
        plugin = Quickest(there, self.seconds)
        process = processes.Process(
            target=run_pytest, args=(str(self.folder), tests, options, plugin)
        )
        process.start()
        there.close()
        failed = []
        try:
            while True:
                name, seconds = here.recv()
                if seconds is None:
                    failed.append(name)
                else:
                    self.seconds[name] = seconds
        except EOFError:
            process.join()
        SECONDS.parent.mkdir(exist_ok=True)
        SECONDS.write_text(json.dumps(self.seconds))
        ends = {0: [], -signal.SIGXCPU: ["no end"]}
        return failed + ends.get(process.exitcode, ["a crash"])

    def write(self, path: pathlib.Path, text: str) -> None:
        path.write_text(text)
        os.utime(path, (second := next(self.later), second))
