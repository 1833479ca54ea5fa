"""Programs, run in this process: Python and JAX take longer to start than most of them run."""

import contextlib
import importlib
import io
import pathlib
import runpy
import sys
from unittest import mock

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run(script, *arguments):
    """What a program of examples/ prints, with its own folder first on the path, as Python puts it."""
    path = EXAMPLES / script
    argv = mock.patch.object(sys, "argv", [script, *map(str, arguments)])
    folder = mock.patch.object(sys, "path", [str(path.parent), *sys.path])
    printed = io.StringIO()
    with (
        argv,
        folder,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue().replace(
        "\r", "\n"
    )  # a progress bar's lines, one for each state


def refusal(script, *arguments):
    """What a program says as it refuses its flags or its folder."""
    argv = mock.patch.object(sys, "argv", [f"{script}.py", *map(str, arguments)])
    with (
        argv,
        contextlib.redirect_stderr(io.StringIO()) as printed,
        pytest.raises(SystemExit) as ended,
    ):
        importlib.import_module(script).main()
    assert ended.value.code  # Python prints a text, and exits with status 1
    return f"{printed.getvalue()}{ended.value.code}"
