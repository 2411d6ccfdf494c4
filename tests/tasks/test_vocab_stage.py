"""The draft vocabulary holds what the verifier says most, and its coverage is what a plain count gives."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

from dspark_model.dataset import write_examples
from tasks import vocab
from tasks.recipe import RecipeError
from tests.stage_room import stage_context, toy_recipe

SIZE = 60
EOS = 59


def documents(seed, count):
    """Prompts speak in ids 40..58; answers in ids 0..39, small ones more often."""
    draw = random.Random(seed)
    rows = []
    for i in range(count):
        prompt = [draw.randrange(40, 59) for _ in range(20)]
        answer = [int(40 * draw.random() ** 2) for _ in range(12)]
        rows.append((f"{seed}-{i}", prompt + answer, [0] * 20 + [1] * 12))
    return rows


TRAIN, VALIDATION = documents(1, 30), documents(2, 8)
SUBSETS = {row[0]: f"s{index % 3}" for index, row in enumerate(TRAIN + VALIDATION)}


def counted(rows):
    return Counter(token for _, ids, mask in rows for token, m in zip(ids, mask, strict=True) if m)


def share(counts, kept):
    return sum(n for token, n in counts.items() if token in kept) / counts.total()


def context_in(room, size, generation=None, **config):
    verifier, examples = room / "verifier", room / "examples"
    for folder in (verifier, examples):
        folder.mkdir()
    (verifier / "config.json").write_text(json.dumps({"vocab_size": SIZE, "eos_token_id": EOS, **config}))
    if generation is not None:
        (verifier / "generation_config.json").write_text(json.dumps(generation))
    write_examples(examples / "train.safetensors", TRAIN)
    write_examples(examples / "validation.safetensors", VALIDATION)
    (examples / "subsets.json").write_text(json.dumps(SUBSETS))
    recipe = toy_recipe(verifier, vocab={"draft_vocab_size": size})
    return stage_context(room, recipe, {"verifier": verifier, "examples": examples})


def kept_ids(context):
    tensors = load_file(context.output / "vocab.safetensors")
    kept = tensors["t2d"].nonzero().flatten()
    assert tensors["t2d"].dtype == torch.bool
    assert torch.equal(torch.arange(len(kept)) + tensors["d2t"], kept), "d2t is an offset to the verifier's id"
    return set(kept.tolist())


def test_the_most_frequent_answer_tokens_and_the_end_are_kept(tmp_path):
    context = context_in(tmp_path, 16)
    counts = vocab.build(context)
    kept = kept_ids(context)
    train, validation = counted(TRAIN), counted(VALIDATION)
    ranked = sorted(train, key=lambda token: (-train[token], token))
    assert kept == {EOS, *ranked[:15]}, "ids of prompts, however frequent, do not count"
    assert counts["train_coverage"] == pytest.approx(share(train, kept))
    assert counts["validation_coverage"] == pytest.approx(share(validation, kept))
    assert (counts["draft_vocab_size"], counts["verifier_vocab_size"]) == (16, SIZE)
    assert counts["distinct_train_tokens"] == len(train)
    report = json.loads((context.output / "coverage.json").read_text())
    for subset, value in report["validation_coverage_by_subset"].items():
        rows = [row for row in VALIDATION if SUBSETS[row[0]] == subset]
        assert value == pytest.approx(share(counted(rows), kept))
    assert set(report["validation_coverage_by_subset"]) == {"s0", "s1", "s2"}


@pytest.mark.parametrize("size", ["full", SIZE])
def test_full(tmp_path, size):
    context = context_in(tmp_path, size)
    counts = vocab.build(context)
    assert kept_ids(context) == set(range(SIZE))
    assert counts["train_coverage"] == counts["validation_coverage"] == 1.0


def test_too_large_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"vocab\.draft_vocab_size=61 is above the verifier's 60: lower it, or say"):
        vocab.build(context_in(tmp_path, SIZE + 1))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, {}, (EOS,)),
        ({"eos_token_id": [58, 57]}, {}, (58, 57)),
        ({"eos_token_id": 0}, {}, (0,)),
        ({"eos_token_id": None}, {}, (EOS,)),
        ({}, {"eos_token_id": None}, ()),
    ],
)
def test_end_tokens(tmp_path, generation, config, expected):
    context = context_in(tmp_path, 16, generation, **config)
    assert vocab.end_tokens(context.parents["verifier"]) == expected
    vocab.build(context)
    assert set(expected) <= kept_ids(context)
