"""What a program says as it refuses its flags or its folder; run here, for Python and JAX take longer to start."""

import contextlib
import importlib
import io
import sys
from unittest import mock

import pytest


def refusal(script, *arguments):
    argv = mock.patch.object(sys, "argv", [f"{script}.py", *map(str, arguments)])
    with argv, contextlib.redirect_stderr(io.StringIO()) as printed, pytest.raises(SystemExit) as ended:
        importlib.import_module(script).main()
    assert ended.value.code  # Python prints a text, and exits with status 1
    return f"{printed.getvalue()}{ended.value.code}"
