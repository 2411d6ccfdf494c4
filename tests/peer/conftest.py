"""These tests need speculators, which has an environment of its own: `make peer-test`."""

from __future__ import annotations

import importlib.util

import pytest

from tests.single_thread import single_thread  # noqa: F401 - used by every test here

MISSING = importlib.util.find_spec("speculators") is None
if MISSING:
    collect_ignore_glob = ["test_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out, and how to run it."""
    if MISSING:
        terminalreporter.write_line("tests/peer: left out, speculators is not installed here; run `make peer-test`")
