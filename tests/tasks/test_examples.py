"""Training rows: loss on the verifier's own tokens, whole conversations held out, always the same ones."""

from __future__ import annotations

import json

import pytest

from dspark_model.dataset import Examples
from tasks import examples
from tasks.answers import ANSWERS, write_jsonl
from tasks.examples import TooFewExamplesError, held_out_ids
from tests.stage_room import stage_context, toy_recipe


def answers(count, prompt=3, answer=6):
    return [
        {
            "id": f"c{i}",
            "subset": f"s{i % 2}",
            "prompt_token_ids": list(range(100 * i, 100 * i + prompt)),
            "token_ids": list(range(100 * i + 50, 100 * i + 50 + answer)),
            "finish_reason": "stop",
        }
        for i in range(count)
    ]


def build(room, rows, **settings):
    responses = room / "responses"
    responses.mkdir(parents=True, exist_ok=True)
    write_jsonl(responses / ANSWERS, rows)
    context = stage_context(room, toy_recipe(room, examples=settings), {"responses": responses})
    counts = examples.build(context)
    return counts, {name: Examples(context.output / f"{name}.safetensors") for name in ("train", "validation")}, context


def test_the_mask_is_on_the_verifiers_own_tokens(tmp_path):
    rows = answers(10)
    counts, splits, context = build(tmp_path, rows, validation_share=0.2)
    assert (len(splits["train"]), len(splits["validation"])) == (8, 2)
    by_id = {row["id"]: row for row in rows}
    seen = []
    for split in splits.values():
        for index, name in enumerate(split.ids):
            ids, mask = split.row(index)
            assert ids.tolist() == by_id[name]["prompt_token_ids"] + by_id[name]["token_ids"]
            assert ids[mask].tolist() == by_id[name]["token_ids"]
            seen.append(name)
    assert sorted(seen) == sorted(by_id), "each conversation is in one split, once"
    assert counts == {
        "train_documents": 8,
        "validation_documents": 2,
        "train_supervised_tokens": 8 * 6,
        "validation_supervised_tokens": 2 * 6,
        "dropped": 0,
        "clipped": 0,
    }
    assert json.loads((context.output / "subsets.json").read_text()) == {r["id"]: r["subset"] for r in rows}


def test_long_rows_are_clipped_on_the_right_and_short_ones_dropped(tmp_path):
    rows = [*answers(6), *answers(9, answer=30)[6:], *answers(12, prompt=40)[9:], *answers(15, answer=1)[12:]]
    counts, splits, _ = build(tmp_path, rows, max_length=16, min_supervised_tokens=2, validation_share=0.2)
    kept = {name: split.row(i) for split in splits.values() for i, name in enumerate(split.ids)}
    assert sorted(kept, key=lambda name: int(name[1:])) == [f"c{i}" for i in range(9)]
    assert (counts["clipped"], counts["dropped"]) == (6, 6)
    for i in (6, 7, 8):
        ids, mask = kept[f"c{i}"]
        whole = rows[i]["prompt_token_ids"] + rows[i]["token_ids"]
        assert ids.tolist() == whole[:16]
        assert mask.tolist() == [False] * 3 + [True] * 13


def test_the_split_is_the_same_in_any_order_and_changes_with_the_seed(tmp_path):
    rows = answers(40)
    first = build(tmp_path / "a", rows)[1]["validation"].ids
    assert set(build(tmp_path / "b", rows[::-1])[1]["validation"].ids) == set(first)
    assert set(build(tmp_path / "c", rows, seed=1)[1]["validation"].ids) != set(first)


def test_added_data_moves_few_conversations():
    ids = [f"c{i}" for i in range(1000)]
    before = held_out_ids(ids, 0.1, 0)
    after = held_out_ids([*ids, *(f"new{i}" for i in range(50))], 0.1, 0)
    assert (len(before), len(after)) == (100, 105)
    assert len(before - after) <= 10, "held out before, trained on now"


@pytest.mark.parametrize(("count", "share", "held_out"), [(2, 0.001, 1), (2, 0.49, 1), (3, 0.49, 1), (1000, 0.25, 250)])
def test_at_least_one_and_never_all(count, share, held_out):
    ids = [f"c{i}" for i in range(count)]
    assert len(held_out_ids(ids, share, 0)) == held_out
    assert held_out_ids(ids, share, 0) < set(ids)


def test_a_conversation_is_never_in_both_splits():
    assert len(held_out_ids(["a", "a", "b", "b"], 0.4, 0)) == 1, "rows of one conversation count once"


@pytest.mark.parametrize("rows", [[], answers(1), [*answers(1), *answers(9, answer=1)[1:]]])
def test_too_few_conversations_say_what_to_raise(tmp_path, rows):
    usable = min(len(rows), 1)
    with pytest.raises(TooFewExamplesError, match=rf"{usable} of {len(rows)} .*=4 .*raise prompts\.num_prompts"):
        build(tmp_path, rows)
