"""Training data made once, and one thread per test: tensors of a few numbers gain nothing from more threads."""

from collections.abc import Iterator

import pytest
import torch

from tests.dspark_model.training_run import Data


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """A verifier with answers to learn by heart."""
    return Data(tmp_path_factory.mktemp("training"))
