"""What a recipe's fields do to fingerprints: decisions count, machines and places never do.

The fingerprints of all shipped recipes are pinned, so that a change that makes stored artifacts stale is a decision.
After one that is meant: `python -m tests.tasks.test_recipe_identity` rewrites tests/tasks/pinned_fingerprints.json.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.fingerprint import canonical_json
from tasks.pipeline import load_stages, resolve
from tasks.recipe import Recipe, Section, ServingSection
from tasks.recipe_file import DEFAULT_RECIPE, list_recipes, load_recipe, parse_recipe
from tasks.verifier_sources import wheel_file

PINNED = Path(__file__).with_name("pinned_fingerprints.json")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB = {"name": "t", "verifier": {"source": "hub", "repo_id": "org/model", "revision": COMMIT}}


def hub_recipe(**sections):
    return parse_recipe(HUB | sections)


def fingerprints(recipe: Recipe) -> dict[str, str]:
    return {name: step.fingerprint for name, step in resolve(recipe, load_stages()).items()}


def changed_stages(one: Recipe, other: Recipe) -> set[str]:
    before, after = fingerprints(one), fingerprints(other)
    return {name for name in before if before[name] != after[name]}


SERVING = {
    "python": "/somewhere/else/bin/python",
    "max_model_len": 4096,
    "max_num_seqs": 7,
    "concurrency": 3,
    "kv_cache_gib": 11.0,
    "extra_args": ["--tensor-parallel-size", "4"],
    "start_timeout_seconds": 5.0,
    "train_timeout_seconds": 6.0,
    "urls": ["http://somewhere:8000"],
    "request_timeout_seconds": 9.0,
    "spool_gib": 0.0,
}


def with_field(recipe: Recipe, section: str, field: str, value) -> Recipe:
    raw = recipe.model_dump(mode="json")
    raw[section][field] = value
    return parse_recipe(raw)


def test_no_serving_field_changes_a_fingerprint():
    before = hub_recipe()
    for field in ServingSection.model_fields.keys() - {"served_model"}:
        after = with_field(before, "serving", field, SERVING[field])  # a new field needs a value here
        assert after != before
        assert changed_stages(before, after) == set(), field
    elsewhere = hub_recipe(serving={"urls": ["http://somewhere:8000"], "served_model": "m"})
    assert changed_stages(before, elsewhere) == set()


def decisions(recipe: Recipe):
    """(section, field, another value) of every field that describes results."""
    special = {
        ("prompts", "sources"): ["self"],
        ("prompts", "languages"): ["en"],
        ("responses", "modes"): [{"name": "a"}],
        ("responses", "tool_call_parser"): "hermes",
        ("responses", "reasoning_parser"): "qwen3",
        ("examples", "truncated_answers"): "drop",
        ("vocab", "draft_vocab_size"): "full",
        ("drafter", "aux_hidden_state_layer_ids"): [1, 2],
        ("drafter", "attention"): "sliding",
        ("drafter", "intermediate_size"): 64,
        ("drafter", "mask_token_id"): 9,
        ("training", "optimizer"): "adamw",
        ("training", "schedule"): "linear",
        ("training", "dtype"): "float32",
        ("training", "loss"): {"kl": 1.0},
        ("training", "slot_weighting"): "dpace",
        ("evaluation", "num_speculative_tokens"): 2,
        ("release", "title"): "Another",
    }
    # Decide whether and when work is kept, not what it is; top_p and top_k come with a temperature (below).
    exempt = {
        ("training", "checkpoint_every_seconds"), ("responses", "max_failed_share"), ("prompts", "min_prompts"),
        ("prompts", "max_unusable_share"), ("responses", "top_p"), ("responses", "top_k"),
    }  # fmt: skip
    for section, fields in recipe:
        if not isinstance(fields, Section) or section in {"serving", "verifier"}:
            continue
        for field, value in fields:
            if (section, field) in special:
                yield section, field, special[section, field]
            elif isinstance(value, bool):
                yield section, field, not value
            elif isinstance(value, (int, float)) and (section, field) not in exempt:
                yield section, field, value + 1 if isinstance(value, int) else value * 0.5 + 0.01
            elif isinstance(value, str):
                yield section, field, value + "x"
            else:
                assert (section, field) in exempt, f"give another value for {section}.{field}"


OWNER = {
    "prompts": "prompts", "responses": "responses", "examples": "examples", "vocab": "vocab",
    "training": "drafter", "release": "release",
}  # fmt: skip


def test_every_decision_changes_the_stage_it_is_about():
    before = hub_recipe()
    for section, field, value in decisions(before):
        changed = changed_stages(before, with_field(before, section, field, value))
        assert changed, f"{section}.{field} describes results, and no artifact depends on it"
        assert "release" in changed
        if section in OWNER:
            assert OWNER[section] in changed, (section, field)
    assert changed_stages(before, parse_recipe(HUB | {"description": "other"})) == {"release"}


@pytest.mark.parametrize(
    ("override", "stages"),
    [
        ("training.learning_rate=1e-4", {"drafter", "evaluation", "release"}),
        ("training.checkpoint_every_seconds=5", set()),
        ("responses.max_failed_share=0.5", set()),
        ("evaluation.concurrency=3", {"evaluation", "release"}),
        ("prompts.min_prompts=3", set()),
        ("prompts.max_unusable_share=0.5", set()),
        ("evaluation.max_new_tokens=17", {"references", "coverage", "evaluation", "release"}),
        ("vocab.draft_vocab_size=64", {"vocab", "coverage", "drafter", "evaluation", "release"}),
        ("release.title=Other", {"release"}),
        (
            "drafter.aux_hidden_state_layer_ids=[1, 2]",
            {"references", "coverage", "hidden_states", "drafter", "evaluation", "release"},
        ),
    ],
)
def test_only_the_stages_that_a_field_is_about_change(tmp_path, override, stages):
    file = str(tmp_path / "r.yaml")
    Path(file).write_text(json.dumps(HUB))
    assert changed_stages(load_recipe(file), load_recipe(file, [override])) == stages


def test_how_sampling_is_cut_off_counts():
    recipes = [
        hub_recipe(responses={"temperature": 0.7} | cut) for cut in ({}, {"top_p": 0.9}, {"top_k": 5}, {"top_p": 0.8})
    ]
    assert len({fingerprints(recipe)["responses"] for recipe in recipes}) == 4


def test_identities_hold_no_place():
    recipe = hub_recipe(serving=SERVING)
    for name, step in resolve(recipe, load_stages()).items():
        text = canonical_json(step.identity)
        assert "/somewhere" not in text, name
        assert str(Path.home()) not in text, name
        assert str(Path(__file__).parents[2]) not in text, name


def shipped_fingerprints() -> dict[str, dict[str, str]]:
    return {name: fingerprints(load_recipe(name)) for name in list_recipes()}


def test_fingerprints_of_shipped_recipes_are_pinned():
    # Differs: this change makes every artifact of those stages stale. Meant? Then see the top of this file.
    assert shipped_fingerprints() == json.loads(PINNED.read_text())


def test_the_embedded_verifier_is_the_same_file_everywhere():
    found = wheel_file(load_recipe(DEFAULT_RECIPE).verifier)
    assert (found.version, found.sha256) == (
        "0.1.2",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )


if __name__ == "__main__":
    PINNED.write_text(json.dumps(shipped_fingerprints(), indent=2) + "\n")
    print(f"wrote {PINNED}")
