"""Every way in which a file of hidden states can be wrong is named."""

from __future__ import annotations

import fcntl
import threading

import pytest
import torch
from safetensors.torch import save_file

from tasks.states_file import StatesError, read_states

IDS = [5, 6, 7]


@pytest.fixture
def written(tmp_path):
    def write(states=None, ids=IDS):
        if states is None:
            states = torch.arange(1, 25, dtype=torch.bfloat16).reshape(3, 2, 4)
        path = tmp_path / "request.safetensors"
        (tmp_path / "request.safetensors.lock").touch()
        save_file({"hidden_states": states, "token_ids": torch.tensor(ids)}, path)
        return path

    return write


def with_value(value, where):
    states = torch.ones(3, 2, 4)
    states[where] = value
    return states


def test_a_good_file_is_read_and_removed_on_request(written):
    path = written()
    states, ids = read_states(path, IDS, num_states=2)
    assert states.dtype == torch.bfloat16
    assert torch.equal(states.float().flatten(), torch.arange(1, 25).float())
    assert ids.tolist() == IDS
    read_states(path, IDS, delete=True)
    assert list(path.parent.iterdir()) == []
    with pytest.raises(StatesError, match="is missing"):
        read_states(path, IDS)


@pytest.mark.parametrize(
    ("states", "ids", "message"),
    [
        (None, [5, 9, 7], "first difference at 1"),
        (torch.ones(2, 2, 4), [5, 6], "2 of them, expected 3; first difference at 2"),
        (torch.ones(2, 2, 4), IDS, "shape"),
        (torch.ones(3, 3, 4), IDS, "shape"),
        (with_value(float("nan"), (2, 0, 3)), IDS, "not finite"),
        (with_value(0.0, (1, 1)), IDS, r"all-zero states in layer slots \[1\]"),
    ],
)
def test_a_wrong_file_is_refused(written, states, ids, message):
    path = written(states, ids)
    with pytest.raises(StatesError, match=message):
        read_states(path, IDS, num_states=2, delete=True)
    assert not path.exists()


def test_a_torn_file_is_refused(written):
    path = written()
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(StatesError, match="unreadable"):
        read_states(path, IDS)


def test_reading_waits_for_the_writer(written):
    path = written()
    whole = path.read_bytes()
    path.write_bytes(b"")
    with path.with_name(path.name + ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def finish():
            path.write_bytes(whole)
            fcntl.flock(lock, fcntl.LOCK_UN)

        threading.Timer(0.2, finish).start()
        assert read_states(path, IDS)[1].tolist() == IDS
