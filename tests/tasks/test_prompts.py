"""The built-in prompts, the filters and the prompts artifact."""

from __future__ import annotations

import json
import logging
from collections import Counter
from types import SimpleNamespace

import pytest

from tasks import prompts
from tasks.builtin_prompts import (
    DATA_DIR,
    SUBSETS,
    BuiltinPrompt,
    check_disjoint,
    evaluation_prompts,
    training_prompts,
)
from tasks.prompt_rows import PromptRow, PromptsError, row_text
from tasks.recipe import RecipeError
from tasks.recipe_file import parse_recipe
from tests.tiny_verifier import make_tiny_verifier


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return make_tiny_verifier(tmp_path_factory.mktemp("tiny") / "verifier")


def row(text, **fields):
    return PromptRow.create("s", [{"role": "user", "content": text}], "test", "none", **fields)


def recipe(verifier, evaluation=None, **section):
    return parse_recipe(
        {
            "name": "t",
            "verifier": {"source": "path", "path": str(verifier)},
            "prompts": section,
            "evaluation": evaluation or {"prompts_per_subset": 2},
        }
    )


def build(the_recipe, verifier, output):
    output.mkdir(parents=True)
    context = SimpleNamespace(
        recipe=the_recipe,
        output=output,
        scratch=output.parent / f"{output.name}-scratch",
        parents={"verifier": verifier},
        log=logging.getLogger("t"),
    )
    return prompts.build(context)


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- the built-in set


def test_the_builtin_set_is_large_distinct_and_covers_the_nine_subsets():
    rows = [prompt.row for prompt in training_prompts(0)]
    by_subset = Counter(r.subset for r in rows)
    assert set(by_subset) == set(SUBSETS)
    assert len(SUBSETS) == 9
    assert min(by_subset.values()) >= 350
    assert len(rows) >= 3500
    assert len({r.id for r in rows}) == len({row_text(r) for r in rows}) == len(rows)
    # A field that no template filled in would show as a brace outside code and JSON.
    assert not [r for r in rows if r.subset not in {"HumanEval", "tool_call"} and "{" in row_text(r)]


def test_training_order_is_seeded_and_every_prefix_is_balanced():
    first, again, other = training_prompts(1), training_prompts(1), training_prompts(2)
    assert [p.row.id for p in first] == [p.row.id for p in again] != [p.row.id for p in other]
    assert {p.row.id for p in first} == {p.row.id for p in other}
    counts = Counter(p.row.subset for p in first[:100])
    assert max(counts.values()) - min(counts.values()) <= 1


def test_fewer_evaluation_prompts_are_a_prefix_and_topics_take_turns():
    held_out = evaluation_prompts(0)
    assert set(held_out) == set(SUBSETS)
    for found in held_out.values():
        assert len({p.row.id for p in found}) == len(found) >= 12
        topics = [p.topic for p in found]
        distinct = len(set(topics))
        assert len(set(topics[:distinct])) == distinct


def test_builtin_training_and_evaluation_prompts_share_no_content():
    training = [p.row for p in training_prompts(0)]
    held_out = [p for found in evaluation_prompts(0).values() for p in found]
    counts = check_disjoint(training, held_out)
    assert counts["disjoint_training_rows"] == len(training)
    # An independent look at the same promise, on the raw texts.
    everything = "\n".join(row_text(r) for r in training).casefold()
    for topic in {p.topic for p in held_out}:
        assert f" {topic.casefold()} " not in everything


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("What is the capital of Peru?", "1 identical"),
        ("Tell me about the food in PERU, please.", "1 name a held-out topic"),
        ("So, a b c d e f g h, and more.", "1 share 8 words"),
    ],
)
def test_an_overlap_with_evaluation_is_refused(text, reason):
    held_out = [BuiltinPrompt(row("What is the capital of Peru?"), "Peru", ("Peru", "z a b c d e f g h y"))]
    with pytest.raises(PromptsError, match=reason):
        check_disjoint([row("Hello there."), row(text)], held_out)
    assert check_disjoint([row("What is Peruvian food?")], held_out)["disjoint_topics"] == 1


# --- the artifact


def test_the_artifact_holds_both_splits_in_the_agreed_format(verifier, tmp_path):
    the_recipe = recipe(verifier, {"prompts_per_subset": 3}, num_prompts=90)
    counts = build(the_recipe, verifier, tmp_path / "a")
    train, evaluation = read(tmp_path / "a" / "train.jsonl"), read(tmp_path / "a" / "evaluation.jsonl")
    assert set(train[0]) == {"id", "subset", "messages", "source", "license", "tools"}
    assert Counter(r["subset"] for r in train) == dict.fromkeys(SUBSETS, 10)
    assert Counter(r["subset"] for r in evaluation) == dict.fromkeys(SUBSETS, 3)
    assert not {r["id"] for r in train} & {r["id"] for r in evaluation}
    assert (counts["prompts"], counts["evaluation_prompts"]) == (90, 27)
    report = json.loads((tmp_path / "a" / "report.json").read_text())
    assert report["counts"] == counts

    build(the_recipe, verifier, tmp_path / "b")
    for name in ("train.jsonl", "evaluation.jsonl", "report.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_more_evaluation_prompts_leave_the_training_prompts_alone(verifier, tmp_path):
    for number in (2, 12):
        build(recipe(verifier, {"prompts_per_subset": number}, num_prompts=50), verifier, tmp_path / str(number))
    assert (tmp_path / "2/train.jsonl").read_bytes() == (tmp_path / "12/train.jsonl").read_bytes()


def test_too_few_prompts_fail_with_counts_and_a_remedy(verifier, tmp_path):
    with pytest.raises(PromptsError, match=r"num_prompts=99999.*only \d{4} prompts.*fewer than 49999.*candidates"):
        build(recipe(verifier, num_prompts=99999), verifier, tmp_path / "a")
    with pytest.raises(PromptsError, match=r"prompts_per_subset=500.*subset HumanEval has only"):
        build(recipe(verifier, {"prompts_per_subset": 500}), verifier, tmp_path / "b")


def test_the_preflight_knows_what_is_available(verifier, tmp_path):
    prompts.check_prompts(recipe(verifier, {"prompts_per_subset": 12}, num_prompts=3000))
    with pytest.raises(RecipeError, match=r"num_prompts=99999: the built-in set has \d{4};"):
        prompts.check_prompts(recipe(verifier, num_prompts=99999))
    with pytest.raises(RecipeError, match="prompts_per_subset=500: there are"):
        prompts.check_prompts(recipe(verifier, {"prompts_per_subset": 500}))
    for missing in (tmp_path / "no.jsonl", tmp_path / "no*.parquet"):
        with pytest.raises(RecipeError, match=r"no such file .*correct the path"):
            prompts.check_prompts(recipe(verifier, sources=[str(missing)]))
    with pytest.raises(RecipeError, match=r"num_prompts='all' with the source 'self'"):
        prompts.check_prompts(recipe(verifier, sources=["builtin", "self"], num_prompts="all"))
    with pytest.raises(RecipeError, match=r"languages=\['en', 'xx'\]: xx unknown; known: .*de"):
        prompts.check_prompts(recipe(verifier, languages=["en", "xx"]))


def test_evaluation_prompts_in_a_dataset_are_kept_out_of_training(verifier, tmp_path):
    held_out = evaluation_prompts(0)
    leaked = [row_text(held_out["rag"][-1].row), "Please read this. " + held_out["summarization"][0].topic]
    records = [{"prompt": text} for text in [*leaked, "What is a good name for a cat?", "Count to ten."]]
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in records))
    the_recipe = recipe(verifier, sources=[str(path)], num_prompts="all")
    counts = build(the_recipe, verifier, tmp_path / "a")
    texts = {r["messages"][0]["content"] for r in read(tmp_path / "a" / "train.jsonl")}
    assert texts == {"What is a good name for a cat?", "Count to ten."}
    assert counts["dropped_evaluation_overlap"] == 2
    overlaps = json.loads((tmp_path / "a" / "report.json").read_text())["sources"]["d.jsonl"]
    assert overlaps["evaluation_overlap_by_subset"] == {"rag": 1, "summarization": 1}
    with pytest.raises(PromptsError, match=r"only 2 prompts.*2 evaluation_overlap"):
        build(recipe(verifier, sources=[str(path)], num_prompts=3, min_prompts=3), verifier, tmp_path / "b")


# --- identity


def test_identity_follows_content_and_not_place(verifier, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for path in paths:
        path.write_text('{"prompt": "Hello there"}\n')
    one, two = (prompts.identity(recipe(verifier, sources=[str(p)])) for p in paths)
    assert one == two
    paths[1].write_text('{"prompt": "Something else"}\n')
    assert prompts.identity(recipe(verifier, sources=[str(paths[1])])) != one
    base = prompts.identity(recipe(verifier))
    assert json.loads(json.dumps(base)) == base
    assert prompts.identity(recipe(verifier, {"prompts_per_subset": 3})) != base


def test_editing_a_template_changes_the_identity(verifier, tmp_path, monkeypatch):
    before = prompts.identity(recipe(verifier))
    for path in DATA_DIR.glob("prompts_*.yaml"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr("tasks.builtin_prompts.DATA_DIR", tmp_path)
    assert prompts.identity(recipe(verifier)) == before
    with (tmp_path / "prompts_qa.yaml").open("a") as stream:
        stream.write("# edited\n")
    assert prompts.identity(recipe(verifier)) != before
