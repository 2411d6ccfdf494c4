"""Training rows: loss on the verifier's own tokens, whole conversations held out, always the same ones."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_model.dataset import Examples
from tasks import examples
from tasks.answer_rows import AnswerRow, AnswerWriter
from tasks.example_rows import example_row
from tasks.examples import ExamplesError, TooFewExamplesError, held_out_ids, read_rows
from tests.stage_room import bare_verifier, stage_context, toy_recipe

SPLITS = ("train", "validation")


def answer(conversation, turn=0, prompt=(1, 2, 3), tokens=(4, 5, 6, 7, 8, 9), reason="stop", subset="s", source="x"):
    name = f"{conversation}/{turn}"
    return AnswerRow(name, str(conversation), turn, subset, source, "", list(prompt), list(tokens), reason, "{}")


def answers(count, prompt=3, tokens=6):
    """Rows whose tokens tell which row they are of."""
    return [
        answer(
            f"c{i}",
            prompt=range(9 * i, 9 * i + prompt),
            tokens=range(9 * i + 3, 9 * i + 3 + tokens),
            subset=f"s{i % 2}",
        )
        for i in range(count)
    ]


def build(room, rows, rows_per_shard=4, **fields):
    room.mkdir(parents=True, exist_ok=True)
    responses, verifier = room / "responses", bare_verifier(room / "verifier")
    responses.mkdir(exist_ok=True)
    writer = AnswerWriter(responses, rows_per_shard)
    for row in rows:
        writer.add(row)
    writer.close()
    context = stage_context(room, toy_recipe(room, examples=fields), {"verifier": verifier, "responses": responses})
    counts = examples.build(context)
    return counts, {name: Examples(context.output / f"{name}.safetensors") for name in SPLITS}, context


def contents(splits):
    """id -> (input_ids, tokens with loss), over both splits."""
    found = {}
    for split in splits.values():
        for index, name in enumerate(split.ids):
            ids, mask = split.row(index)
            assert name not in found, "once"
            found[name] = (ids.tolist(), [int(token) for token, on in zip(ids, mask, strict=True) if on])
    return found


def test_the_mask_is_on_the_verifiers_own_tokens(tmp_path):
    rows = answers(10)
    counts, splits, context = build(tmp_path, rows, validation_share=0.2)
    assert contents(splits) == {row.id: (row.prompt_token_ids + row.token_ids, row.token_ids) for row in rows}
    assert counts == {
        "train_documents": 8, "train_conversations": 8, "train_supervised_tokens": 8 * 6,
        "validation_documents": 2, "validation_conversations": 2, "validation_supervised_tokens": 2 * 6,
        "dropped": 0, "dropped_short": 0, "dropped_truncated": 0, "clipped": 0, "clipped_supervised_tokens": 0,
    }  # fmt: skip
    table = read_rows(context.output).to_pylist()
    assert [row["id"] for row in table] == [*splits["train"].ids, *splits["validation"].ids]
    for row in table:
        assert row["split"] == ("train" if row["id"] in splits["train"].ids else "validation")
        assert (row["prompt_tokens"], row["supervised_tokens"], row["tokens"]) == (3, 6, 9)
        assert row["subset"] == f"s{int(row['conversation'][1:]) % 2}"
    report = json.loads((context.output / "report.json").read_text())
    assert report["split"]["train"]["supervised_tokens"] == 48
    assert report["subset"]["s0"]["rows"] == 5
    assert report["histogram"] == {
        "prompt_tokens": {"<=4": 10},
        "supervised_tokens": {"<=8": 10},
        "tokens": {"<=16": 10},
    }
    assert (context.output / "lengths.png").read_bytes().startswith(b"\x89PNG")
    assert "| split train | 8 | 8 | 48 | 3 | 6 | 9 |" in (context.output / "examples.md").read_text()


lengths = st.tuples(st.integers(0, 3), st.integers(1, 12), st.integers(0, 12), st.sampled_from(["stop", "length"]))


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(lengths, min_size=4, max_size=24),
    max_length=st.integers(16, 20),
    shortest=st.integers(1, 4),
    truncated=st.sampled_from(["keep", "drop"]),
    rows_per_shard=st.integers(1, 9),
)
def test_rows_and_masks_are_those_of_a_plain_loop(shapes, max_length, shortest, truncated, rows_per_shard):
    rows, turns = [], {}
    for conversation, prompt, tokens, reason in shapes:
        turn = turns[conversation] = turns.get(conversation, -1) + 1
        start = 30 * len(rows)
        rows.append(
            answer(conversation, turn, range(start, start + prompt), range(start + 12, start + 12 + tokens), reason)
        )
    expected, clipped, lost = {}, 0, 0
    for row in rows:
        ids, mask = [], []
        for token in row.prompt_token_ids:
            ids.append(token)
            mask.append(0)
        for token in row.token_ids:
            ids.append(token)
            mask.append(1)
        kept = [token for token, on in zip(ids[:max_length], mask[:max_length], strict=True) if on]
        if truncated == "drop" and row.finish_reason == "length":
            continue
        if len(kept) >= shortest:
            expected[row.id] = (ids[:max_length], kept)
            clipped += len(ids) > max_length
            lost += len(row.token_ids) - len(kept) if len(ids) > max_length else 0
    fields = {"max_length": max_length, "min_supervised_tokens": shortest, "truncated_answers": truncated}
    with tempfile.TemporaryDirectory() as folder:
        if len({name.split("/")[0] for name in expected}) < 2:
            with pytest.raises(TooFewExamplesError):
                build(Path(folder), rows, rows_per_shard, **fields)
            return
        counts, splits, _ = build(Path(folder), rows, rows_per_shard, **fields)
        assert contents(splits) == expected
        assert (counts["clipped"], counts["clipped_supervised_tokens"]) == (clipped, lost)
        assert counts["dropped"] == len(rows) - len(expected)
        sides = [{name.split("/")[0] for name in splits[split].ids} for split in SPLITS]
        assert all(sides), "neither split is empty"
        assert not sides[0] & sides[1], "a conversation is on one side"


def test_a_row_is_prompt_and_answer_with_the_loss_on_every_token_of_the_answer():
    row = answer("c", prompt=[9, 8], tokens=[7, 6, 2])
    assert example_row(row) == ("c/0", [9, 8, 7, 6, 2], [0, 0, 1, 1, 1])


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


def test_rows_of_one_conversation_count_once_in_the_split():
    assert len(held_out_ids(["a", "a", "b", "b"], 0.4, 0)) == 1


@pytest.mark.parametrize(
    ("rows", "usable"),
    [([], 0), (answers(1), 1), ([*answers(1), *answers(9, tokens=1)[1:]], 1), ([answer("a"), answer("a", 1)], 2)],
)
def test_too_few_conversations_say_why_and_what_to_do(tmp_path, rows, usable):
    with pytest.raises(TooFewExamplesError, match=rf"^{usable} of {len(rows)} .*tokens=4 .*raise prompts\.num_prompts"):
        build(tmp_path, rows)


def test_all_answers_cut_off_and_dropped_say_so(tmp_path):
    rows = [answer(f"c{i}", reason="length") for i in range(5)]
    with pytest.raises(TooFewExamplesError, match=r"0 of 5 .* 5 cut off at responses\.max_new_tokens=128"):
        build(tmp_path, rows, truncated_answers="drop")


@pytest.mark.parametrize("place", ["prompt", "tokens"])
@pytest.mark.parametrize("token", [1000, -1])
def test_a_token_that_the_verifier_does_not_have_names_its_row(tmp_path, place, token):
    rows = [*answers(5), answer("odd", **{place: [1, 2, token, 3, 4]}), answer("after")]
    with pytest.raises(ExamplesError, match=rf"answer 'odd/0' holds token {token}, the verifier has 1000.*tokenizer"):
        build(tmp_path, rows)


@pytest.mark.parametrize("rows_per_shard", [2, 100])
def test_an_answer_that_occurs_twice_is_named(tmp_path, rows_per_shard):
    with pytest.raises(ExamplesError, match="answer 'c1/0' occurs twice"):
        build(tmp_path, [*answers(5), answers(2)[1]], rows_per_shard)
