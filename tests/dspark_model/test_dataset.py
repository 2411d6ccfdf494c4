"""Examples and states on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_model.dataset import Documents, Examples, StatesWriter, write_examples

ROWS = [("a", [5, 6, 7], [0, 1, 1]), ("b", [1], [1]), ("c", [2, 3, 4, 5, 6], [0, 0, 0, 1, 1])]


def states_of(row: int, missing: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States that name their document and position."""
    ids = ROWS[row][1]
    count = len(ids) - missing
    aux = torch.arange(count)[:, None] + 100.0 * row + torch.zeros(count, 4)
    return aux, -aux[:, :2].contiguous(), torch.tensor(ids[:count])


def write(folder: Path, per_shard: int = 2) -> None:
    write_examples(folder / "train.safetensors", ROWS)
    writer = StatesWriter(folder, "train", per_shard)
    for row in range(3):
        writer.add(*states_of(row))
    writer.flush()


def test_examples_round_trip(tmp_path):
    write_examples(tmp_path / "train.safetensors", ROWS)
    examples = Examples(tmp_path / "train.safetensors")
    assert (len(examples), examples.ids, examples.lengths) == (3, ["a", "b", "c"], [3, 1, 5])
    for i, (_, ids, mask) in enumerate(ROWS):
        found_ids, found_mask = examples.row(i)
        assert found_ids.tolist() == ids
        assert found_mask.tolist() == [bool(m) for m in mask]


@pytest.mark.parametrize("per_shard", [1, 2, 3, 10])
def test_documents_join_tokens_with_their_own_states_whatever_the_shards(tmp_path, per_shard):
    write(tmp_path, per_shard)
    documents = Documents(tmp_path, tmp_path, "train")
    assert documents.lengths == [3, 1, 5]
    for row in (2, 0, 1):
        aux, last, _ = states_of(row)
        found = documents[row]
        assert found.input_ids_T.tolist() == ROWS[row][1]
        assert torch.equal(found.aux_hidden_TF, aux)
        assert torch.equal(found.last_hidden_TD, last)
    assert [len(whole.input_ids_T) for whole in documents[1:]] == [1, 5]
    with pytest.raises(IndexError):
        documents[3]


def test_a_killed_writer_continues_behind_its_last_whole_shard(tmp_path):
    write_examples(tmp_path / "train.safetensors", ROWS)
    killed = StatesWriter(tmp_path, "train", documents_per_shard=1)
    killed.add(*states_of(0))
    (tmp_path / "train-00000001.partial").write_bytes(b"half")
    writer = StatesWriter(tmp_path, "train", documents_per_shard=2)
    assert writer.next_document == 1
    for row in (1, 2):
        writer.add(*states_of(row))
    assert [float(whole.aux_hidden_TF.sum()) for whole in Documents(tmp_path, tmp_path, "train")] == [
        float(states_of(row)[0].sum()) for row in range(3)
    ]


def test_states_of_fewer_documents_are_refused(tmp_path):
    write(tmp_path, per_shard=1)
    (tmp_path / "train-00000002.safetensors").unlink()
    with pytest.raises(ValueError, match="states of 2 train documents, examples has 3"):
        Documents(tmp_path, tmp_path, "train")


def test_states_of_other_tokens_are_refused(tmp_path):
    write(tmp_path, per_shard=3)
    path = tmp_path / "train-00000000.safetensors"
    tensors = load_file(path)
    tensors["token_ids"][0] += 1
    save_file(tensors, path)
    documents = Documents(tmp_path, tmp_path, "train")
    assert documents[2].input_ids_T.tolist() == ROWS[2][1]
    with pytest.raises(ValueError, match="document 0: stored states are of other tokens"):
        documents[0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("which", "name"), [(0, "aux_hidden_TF"), (1, "last_hidden_TD")])
def test_states_that_are_not_finite_are_refused_with_their_place(tmp_path, which, name, value):
    write_examples(tmp_path / "train.safetensors", ROWS)
    writer = StatesWriter(tmp_path, "train", 2)
    for row in range(3):
        states = states_of(row)
        if row == 2:
            states[which][1, 0] = value
        writer.add(*states)
    writer.flush()
    documents = Documents(tmp_path, tmp_path, "train")
    assert documents[0].input_ids_T.tolist() == [5, 6, 7]
    with pytest.raises(
        ValueError, match=rf"document 2: {name} is not finite at 1 of 4 tokens, first {value} at token 1"
    ):
        documents[2]
