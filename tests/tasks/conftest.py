"""What several tests of stages share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_verifier import make_tiny_verifier


@pytest.fixture(scope="session")
def tiny_verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder in float32; read only."""
    return make_tiny_verifier(tmp_path_factory.mktemp("tiny") / "verifier", dtype="float32")
