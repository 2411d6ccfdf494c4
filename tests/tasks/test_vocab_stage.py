"""The draft vocabulary holds what the verifier says most, and its coverage is what a plain count gives."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dspark_model.dataset import write_examples
from dspark_model.metrics import perfect_acceptance, total, walk
from dspark_model.vocab import choose_draft_vocab, draft_to_verifier_ids, verifier_to_draft_ids
from tasks import coverage, vocab
from tasks.answer_rows import AnswerRow, AnswerWriter
from tasks.recipe import RecipeError
from tests.stage_room import stage_context, toy_recipe
from tests.tiny_verifier import VOCAB, make_tiny_verifier

ANSWERS = 900  # answers use ids below


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return make_tiny_verifier(tmp_path_factory.mktemp("vocab") / "verifier")


def documents(seed, count):
    """Prompts speak in ids above ANSWERS; answers in those below, small ones more often."""
    draw = random.Random(seed)
    rows = []
    for i in range(count):
        prompt = [draw.randrange(ANSWERS, VOCAB) for _ in range(20)]
        answer = [int(ANSWERS * draw.random() ** 3) for _ in range(40)]
        rows.append((f"{seed}-{i}/0", prompt + answer, [0] * 20 + [1] * 40))
    return rows


TRAIN, VALIDATION, EVALUATION = documents(1, 60), documents(2, 12), documents(3, 4)


def counted(rows):
    return Counter(token for _, ids, mask in rows for token, m in zip(ids, mask, strict=True) if m)


def share(counts, kept):
    return sum(n for token, n in counts.items() if token in kept) / counts.total()


def vocab_context(room, verifier, size, bound=0.005):
    folder = room / "examples"
    folder.mkdir()
    write_examples(folder / "train.safetensors", TRAIN)
    write_examples(folder / "validation.safetensors", VALIDATION)
    recipe = toy_recipe(verifier, vocab={"draft_vocab_size": size, "max_coverage_loss": bound})
    return stage_context(room, recipe, {"verifier": verifier, "examples": folder})


def kept_ids(folder):
    tensors = load_file(folder / "vocab.safetensors")
    kept = tensors["t2d"].nonzero().flatten()
    assert tensors["t2d"].dtype == torch.bool
    assert torch.equal(torch.arange(len(kept)) + tensors["d2t"], kept), "d2t is an offset to the verifier's id"
    return set(kept.tolist())


def special_ids(verifier):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(verifier)
    return {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}


def ranking(counts, special):
    """All ids but the special ones: most frequent first, equals (and unseen ones) by smallest id."""
    return sorted(set(range(VOCAB)) - special, key=lambda token: (-counts[token], token))


def test_the_most_frequent_answer_tokens_and_all_special_ones_are_kept(tmp_path, verifier):
    context = vocab_context(tmp_path, verifier, 200)
    counts = vocab.build(context)
    kept, special = kept_ids(context.output), special_ids(verifier)
    train, validation = counted(TRAIN), counted(VALIDATION)
    ranked = ranking(train, special)
    assert special
    assert kept == special | set(ranked[: 200 - len(special)]), "ids of prompts, however frequent, do not count"
    assert counts["train_coverage"] == pytest.approx(share(train, kept))
    assert counts["validation_coverage"] == pytest.approx(share(validation, kept))
    assert (counts["draft_vocab_size"], counts["verifier_vocab_size"]) == (200, VOCAB)
    assert counts["distinct_train_tokens"] == len(train)


@pytest.mark.parametrize("size", ["full", VOCAB])
def test_full(tmp_path, verifier, size):
    context = vocab_context(tmp_path, verifier, size)
    counts = vocab.build(context)
    assert kept_ids(context.output) == set(range(VOCAB))
    assert counts["train_coverage"] == counts["validation_coverage"] == 1.0


@pytest.mark.parametrize("size", [VOCAB + 1, 1])
def test_a_size_that_cannot_be_is_refused_with_the_numbers(tmp_path, verifier, size):
    fewest = len(special_ids(verifier))
    with pytest.raises(RecipeError, match=rf"draft_vocab_size={size} must lie between {fewest}, .* and {VOCAB}"):
        vocab.build(vocab_context(tmp_path, verifier, size))


@pytest.mark.parametrize("bound", [0.9, 0.3, 0.1, 0.03, 0.005, 0.0])
def test_auto_is_the_smallest_size_whose_loss_on_held_out_answers_is_allowed(tmp_path, verifier, monkeypatch, bound):
    steps = (50, 100, 200, 400, 800)
    monkeypatch.setattr(vocab, "LADDER", steps)
    context = vocab_context(tmp_path, verifier, "auto", bound)
    counts = vocab.build(context)
    train, validation, special = counted(TRAIN), counted(VALIDATION), special_ids(verifier)
    ranked = ranking(train, special)
    wanted = VOCAB
    for size in reversed(steps):
        if 1 - share(validation, special | set(ranked[: size - len(special)])) <= bound:
            wanted = size
    assert counts["draft_vocab_size"] == wanted == len(kept_ids(context.output))
    assert f"{wanted:,}" in counts["reason"]
    assert f"max_coverage_loss={bound:g}" in counts["reason"]
    assert ("whole" in counts["reason"]) == (wanted == VOCAB)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {"eos_token_id": 59}, (59,)),
        ({"eos_token_id": [58, 57]}, {"eos_token_id": 59}, (58, 57)),
        ({"eos_token_id": 0}, {"eos_token_id": 59}, (0,)),
        ({"eos_token_id": None}, {"eos_token_id": 59}, (59,)),
        ({}, {"eos_token_id": None}, ()),
        (None, {"text_config": {"eos_token_id": 7}}, (7,)),
    ],
)
def test_end_tokens(tmp_path, generation, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert vocab.end_tokens(tmp_path) == expected


# --- maps and ceilings


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=3, max_size=40), st.data())
def test_the_maps_lead_there_and_back_and_keep_the_order(counts, data):
    always = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=3))
    size = data.draw(st.integers(max(1, len(always)), len(counts)))
    t2d = choose_draft_vocab(torch.tensor(counts), size, tuple(always))
    order = sorted(
        range(len(counts)), key=lambda token: (token not in always, -counts[token] if token not in always else 0, token)
    )
    assert set(t2d.nonzero().flatten().tolist()) == set(order[:size])
    verifier_ids, draft_ids = draft_to_verifier_ids(t2d).tolist(), verifier_to_draft_ids(t2d).tolist()
    assert verifier_ids == sorted(verifier_ids)
    for token in range(len(counts)):
        if t2d[token]:
            assert verifier_ids[draft_ids[token]] == token
        else:
            assert draft_ids[token] == -1


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=14), max_size=6),
    st.sets(st.integers(0, 5)),
    st.integers(1, 5),
)
def test_the_ceiling_is_the_walk_of_a_drafter_that_is_always_right(answers, inside, proposals):
    def right(answer):
        """At each token what follows; a token outside the vocabulary is proposed wrong."""
        return [[token if token in inside else -1 for token in answer[place + 1 :]] for place in range(len(answer) - 1)]

    expected = total((walk(answer, right(answer), proposals) for answer in answers), proposals)
    offsets = [0]
    for answer in answers:
        offsets.append(offsets[-1] + len(answer))
    t2d = torch.tensor([token in inside for token in range(6)])
    joined = torch.tensor([token for answer in answers for token in answer], dtype=torch.int64)
    assert perfect_acceptance(joined, offsets, t2d, proposals) == expected


# --- the coverage stage


def test_coverage_by_source_subset_and_evaluation_subset_is_a_plain_count(tmp_path, verifier, monkeypatch):
    import pyarrow as pa
    from pyarrow import parquet

    monkeypatch.setattr(vocab, "LADDER", (100, 400))
    first = vocab_context(tmp_path, verifier, 200)
    vocab.build(first)
    room = tmp_path / "coverage"
    room.mkdir()
    rows = [
        {"id": row[0], "split": split, "source": f"src{i % 2}", "subset": f"sub{i % 3}"}
        for split, part in (("train", TRAIN), ("validation", VALIDATION))
        for i, row in enumerate(part)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), first.parents["examples"] / "rows.parquet")
    references = tmp_path / "references"
    references.mkdir()
    writer = AnswerWriter(references)
    for i, (name, ids, _) in enumerate(EVALUATION):
        writer.add(AnswerRow(name, name, 0, f"e{i % 2}", "b", "", ids[:20], ids[20:], "stop", "{}"))
    writer.close()
    context = stage_context(room, first.recipe, {**first.parents, "vocab": first.output, "references": references})
    counts = coverage.build(context)
    report = json.loads((context.output / "coverage.json").read_text())
    assert [row["draft_vocab_size"] for row in report["sizes"]] == [100, 200, 400, VOCAB]
    groups = {
        "train": TRAIN, "validation": VALIDATION,
        "source src0": VALIDATION[0::2], "source src1": VALIDATION[1::2],
        "subset sub0": VALIDATION[0::3], "subset sub1": VALIDATION[1::3], "subset sub2": VALIDATION[2::3],
        "evaluation": EVALUATION, "evaluation e0": EVALUATION[0::2], "evaluation e1": EVALUATION[1::2],
    }  # fmt: skip
    train, special = counted(TRAIN), special_ids(verifier)
    ranked = ranking(train, special)
    for row in report["sizes"]:
        size = row["draft_vocab_size"]
        kept = set(range(VOCAB)) if size == VOCAB else special | set(ranked[: size - len(special)])
        assert row["coverage"] == {
            name: pytest.approx(share(counted(part), kept), abs=1e-6) for name, part in groups.items()
        }
        assert row["lm_head_mib"] == pytest.approx(size * 128 * 2 / 2**20, abs=0.01)
        assert row["chosen"] == (size == 200)
    whole = report["sizes"][-1]["acceptance_length_ceiling"]
    # 40 tokens, the first from the prefill: 6 steps of 5 accepted and one more, and a last one of 3 accepted.
    assert whole["validation"] == pytest.approx(1 + 33 / 7, abs=1e-3)
    assert set(report["tokens"].values()) == {sum(map(sum, (mask for _, _, mask in part))) for part in groups.values()}
    assert counts["validation_coverage"] == report["sizes"][1]["coverage"]["validation"]
    assert (context.output / "coverage.png").read_bytes().startswith(b"\x89PNG")
    text = (context.output / "coverage.md").read_text()
    assert "| **200** |" in text
    assert "| evaluation e1 | 80 |" in text
