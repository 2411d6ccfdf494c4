"""These tests need speculators, which has an environment of its own: `make peer-test`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

MISSING = importlib.util.find_spec("speculators") is None
if MISSING:
    collect_ignore_glob = ["test_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out, and how to run it."""
    if MISSING:
        terminalreporter.write_line("tests/peer: left out, speculators is not installed here; run `make peer-test`")


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
