"""States reach the artifact from the spool or from a server, whole, in order and of the right tokens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_model.dataset import Documents, Examples, write_examples
from tasks import extraction
from tasks.extraction import ExtractionError, remove_leftovers, store_states
from tasks.states_file import StatesError
from tasks.states_spool import StatesSpool
from tests.stage_room import (
    HIDDEN,
    LAYER_IDS,
    FakeEngine,
    bare_verifier,
    made_up_states,
    stage_context,
    toy_recipe,
)

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [(f"d{i}", [10 * i + j + 1 for j in range(4 + i % 3)], [0, 0] + [1] * (2 + i % 3)) for i in range(11)]


def context_in(room):
    verifier = bare_verifier(room / "verifier")
    return stage_context(room, toy_recipe(verifier), {"verifier": verifier})


def examples_of(context, rows=DOCUMENTS):
    path = context.output / "train.safetensors"
    write_examples(path, rows)
    return Examples(path)


def fill_spool(context, rows=DOCUMENTS):
    spool, engine = StatesSpool.of(context, "responses"), FakeEngine()
    for name, ids, _ in rows:
        spool.adopt(name, engine.write_states(context.work / "request", ids[:-1]), ids[:-1])
    return spool


def check_documents(context, rows=DOCUMENTS):
    """The artifact reads back as the true states: aux layers ascending side by side, the last one apart."""
    documents = Documents(context.output, context.output, "train")
    assert len(documents) == len(rows)
    for document, (_, ids, mask) in zip(documents, rows, strict=True):
        truth = made_up_states(ids[:-1])
        assert document.input_ids_T.tolist() == ids
        assert document.loss_mask_T.tolist() == [bool(m) for m in mask]
        assert document.aux_hidden_TF.shape == (len(ids) - 1, 2 * HIDDEN)
        assert torch.equal(document.aux_hidden_TF[:, :HIDDEN], truth[:, LAYER_IDS.index(1)])
        assert torch.equal(document.aux_hidden_TF[:, HIDDEN:], truth[:, LAYER_IDS.index(3)])
        assert torch.equal(document.last_hidden_TD, truth[:, LAYER_IDS.index(4)])


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(extraction, "BATCH", 4)
    return FakeEngine().install(monkeypatch)


def test_states_come_from_the_spool_without_a_server(engine, tmp_path):
    context = context_in(tmp_path)
    fill_spool(context)
    assert store_states(context, examples_of(context), "train", owner="responses") == 0
    check_documents(context)
    assert context.servers.acquired == []
    assert engine.asked == []


def test_what_the_spool_lacks_is_extracted(engine, tmp_path):
    context = context_in(tmp_path)
    spool = fill_spool(context)
    spool._path("d1").unlink()
    spool._path("d5").write_bytes(spool._path("d5").read_bytes()[:-7])
    os.replace(spool._path("d7"), spool._path("d6"))
    assert store_states(context, examples_of(context), "train", owner="responses") == 4
    asked = sorted(request.prompt_token_ids for request in engine.asked)
    assert asked == sorted(ids[:-1] for name, ids, _ in DOCUMENTS if name in {"d1", "d5", "d6", "d7"})
    assert {(r.max_tokens, r.with_states) for r in engine.asked} == {(1, True)}
    check_documents(context)
    assert list((context.work / "states").iterdir()) == []


def test_spools_of_other_answers_or_layers_are_not_read(engine, tmp_path):
    context = context_in(tmp_path)
    spool = fill_spool(context)
    assert StatesSpool.of(context, "references").folder != spool.folder
    other = toy_recipe(tmp_path / "verifier", drafter={"aux_hidden_state_layer_ids": (1, 2)})
    assert StatesSpool.of(stage_context(tmp_path, other, dict(context.parents)), "responses").folder != spool.folder


def test_a_clipped_document_takes_the_first_states_of_its_row(engine, tmp_path):
    context = context_in(tmp_path)
    fill_spool(context)
    clipped = [(name, ids[:3], mask[:3]) for name, ids, mask in DOCUMENTS]
    assert store_states(context, examples_of(context, clipped), "train", owner="responses") == 0
    check_documents(context, clipped)


KILLED = """
import sys
from pathlib import Path
from tasks import extraction
from tests.stage_room import FakeEngine
from tests.tasks.test_extraction import context_in, examples_of
extraction.BATCH = 4
engine = FakeEngine()
def generate(server, requests, **options):
    engine.kill_after = 2 if len(engine.asked) == 4 else None  # in the middle of the second batch
    engine.generate(server, requests, **options)
extraction.generate = generate
context = context_in(Path(sys.argv[1]))
extraction.store_states(context, examples_of(context), "train", owner="responses")
"""


def test_killed_run_continues_at_the_next_shard(engine, tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=REPOSITORY, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    context = context_in(tmp_path)
    assert [path.name for path in context.output.glob("train-*")] == ["train-00000000.safetensors"]
    assert store_states(context, examples_of(context), "train", owner="responses") == len(DOCUMENTS) - 4
    assert sorted(map(int, engine.ids)) == list(range(4, len(DOCUMENTS)))
    check_documents(context)
    assert store_states(context, examples_of(context), "train", owner="responses") == 0, "all there already"


def test_stored_tokens_that_differ_are_refused(engine, tmp_path):
    context = context_in(tmp_path)
    store_states(context, examples_of(context), "train", owner="responses")
    shard = context.output / "train-00000004.safetensors"
    tensors = load_file(shard)
    tensors["token_ids"][1] += 1
    save_file(tensors, shard)
    documents = Documents(context.output, context.output, "train")
    assert documents[3].input_ids_T.tolist() == DOCUMENTS[3][1]
    with pytest.raises(ValueError, match="document 4: stored states are of other tokens"):
        documents[4]
    shard.unlink()
    with pytest.raises(ValueError, match="holds states of 7 train documents, examples has 11"):
        Documents(context.output, context.output, "train")


def test_a_server_that_echoes_other_tokens_is_not_believed(engine, tmp_path, monkeypatch):
    honest = engine.write_states
    monkeypatch.setattr(engine, "write_states", lambda stem, ids: honest(stem, [*ids[:-1], 999]))
    context = context_in(tmp_path)
    with pytest.raises(StatesError, match="is of other tokens"):
        store_states(context, examples_of(context), "train", owner="responses")
    assert not list(context.output.glob("train-*"))


def test_a_refused_document_ends_the_stage(engine, tmp_path):
    engine.failing = {"6": RuntimeError("400 too long")}
    context = context_in(tmp_path)
    with pytest.raises(ExtractionError, match="document 6 failed: 400 too long"):
        store_states(context, examples_of(context), "train", owner="responses")
    engine.failing = {}
    store_states(context, examples_of(context), "train", owner="responses")
    check_documents(context)


def test_leftovers_go_and_fresh_files_of_other_runs_stay(tmp_path):
    old, fresh = tmp_path / "old.safetensors", tmp_path / "fresh.safetensors"
    for path in (old, fresh):
        path.touch()
    long_ago = time.time() - 2 * extraction.LEFTOVER_SECONDS
    os.utime(old, (long_ago, long_ago))
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [fresh]
