"""The prompts stage on whole files: each row once, bad ones named, licences kept."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest

from tasks import prompts
from tasks.prompt_rows import PromptsError
from tasks.recipe import RecipeError
from tasks.recipe_file import parse_recipe
from tests.tiny_verifier import make_tiny_verifier

LOG = logging.getLogger("t")


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return make_tiny_verifier(tmp_path_factory.mktemp("tiny") / "verifier")


def build(verifier, folder, **section):
    recipe = parse_recipe(
        {
            "name": "t",
            "verifier": {"source": "path", "path": str(verifier)},
            "prompts": section,
            "evaluation": {"prompts_per_subset": 1},
        }
    )
    output = folder / "output"
    output.mkdir()
    context = SimpleNamespace(
        recipe=recipe, output=output, scratch=folder / "scratch", parents={"verifier": verifier}, log=LOG
    )
    counts = prompts.build(context)
    lines = (output / "train.jsonl").read_text().splitlines()
    return counts, [json.loads(line) for line in lines], json.loads((output / "report.json").read_text())


def sharegpt(number, text):
    return {"id": f"x{number}", "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "old"}]}


def openai(number, text):
    return {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]}


@pytest.mark.parametrize("layout", [sharegpt, openai])
def test_two_thousand_rows_are_each_there_once(verifier, tmp_path, layout):
    path = tmp_path / "chats.jsonl"
    texts = [f"Question {i}: how many apples are {i} and {i + 1} apples?" for i in range(2000)]
    path.write_text("".join(json.dumps(layout(i, text)) + "\n" for i, text in enumerate(texts)))
    counts, rows, report = build(verifier, tmp_path, sources=[str(path)], num_prompts="all")
    assert sorted(one["messages"][-1]["content"] for one in rows) == sorted(texts)
    assert len({one["id"] for one in rows}) == 2000 == counts["prompts"]
    assert report["sources"]["chats.jsonl"]["kept"] == 2000
    assert {(one["source"], one["license"], one["subset"]) for one in rows} == {
        ("chats.jsonl", "unknown", "chats.jsonl")
    }


def test_sources_are_mixed_and_keep_their_licences(verifier, tmp_path):
    for name in ("a", "b"):
        records = [openai(i, f"{name} asks about thing {i}?") for i in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    sources = [
        {"source": str(tmp_path / "a.jsonl"), "weight": 3, "license": "mit"},
        {"source": str(tmp_path / "b.jsonl"), "license": "cc0"},
        {"source": "builtin", "weight": 2},
    ]
    counts, rows, _ = build(verifier, tmp_path, sources=sources, num_prompts=60)
    found = [(one["source"], one["license"]) for one in rows]
    assert {name: found.count(name) for name in set(found)} == {
        ("a.jsonl", "mit"): 30, ("b.jsonl", "cc0"): 10, ("builtin", "apache-2.0"): 20,
    }  # fmt: skip
    assert counts["sources"] == "a.jsonl (30, mit); b.jsonl (10, cc0); builtin (20, apache-2.0)"


def poisoned(share):
    lines = [json.dumps(openai(i, f"Question {i}, please answer it?")) for i in range(20)]
    for number in range(round(20 * share)):
        lines[number] = '{"messages": ['
    return "\n".join(lines)


def test_a_few_bad_records_are_left_out_and_named(verifier, tmp_path, caplog):
    path = tmp_path / "d.jsonl"
    path.write_text(poisoned(0.1))
    with caplog.at_level(logging.WARNING):
        _, rows, report = build(verifier, tmp_path, sources=[str(path)], num_prompts="all")
    assert len(rows) == 18
    assert report["sources"]["d.jsonl"]["unusable"] == {"invalid_json": 2}
    assert "2 records of d.jsonl hold no usable conversation and are left out: 2 invalid_json" in caplog.text


def test_many_bad_records_fail_the_stage_with_line_and_remedy(verifier, tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text(poisoned(0.2))
    with pytest.raises(
        PromptsError, match=r"4 of 20 records of d\.jsonl .*share=0\.1.*invalid_json.*record \d.*`column`"
    ):
        build(verifier, tmp_path, sources=[str(path)], num_prompts="all")


def test_repeated_ids_are_told_and_change_nothing(verifier, tmp_path, caplog):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(sharegpt(i // 2, f"Question number {i}?")) + "\n" for i in range(10)))
    with caplog.at_level(logging.WARNING):
        _, rows, _ = build(verifier, tmp_path, sources=[str(path)], num_prompts="all")
    assert len({one["id"] for one in rows}) == 10
    assert "5 records of d.jsonl repeat the `id` of another one" in caplog.text


def test_a_verifier_without_chat_template_is_refused(tmp_path):
    verifier = make_tiny_verifier(tmp_path / "verifier")
    for file in (verifier / "chat_template.jinja", verifier / "tokenizer_config.json"):
        if file.suffix == ".jinja":
            file.unlink(missing_ok=True)
        else:
            config = json.loads(file.read_text())
            config.pop("chat_template", None)
            file.write_text(json.dumps(config))
    with pytest.raises(RecipeError, match="has no chat template: name an instruction-tuned verifier"):
        build(verifier, tmp_path, sources=["builtin"], num_prompts=10)
