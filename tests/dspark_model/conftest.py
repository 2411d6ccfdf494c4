"""Training data made once, and one thread per test."""

import pytest

from tests.dspark_model.training_run import Data
from tests.single_thread import single_thread  # noqa: F401 - used by every test here


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """A verifier with answers to learn by heart."""
    return Data(tmp_path_factory.mktemp("training"))
