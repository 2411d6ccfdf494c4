"""Recipes: faults are named, overrides mean what people mean, and machines never enter a fingerprint.

The fingerprints of all shipped recipes are pinned, so that a change that makes stored artifacts stale is a decision.
After one that is meant: `python -m tests.tasks.test_recipe` rewrites tests/tasks/pinned_fingerprints.json.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tasks.fingerprint import canonical_json
from tasks.pipeline import load_stages, resolve
from tasks.recipe import (
    DEFAULT_RECIPE,
    Recipe,
    RecipeError,
    Section,
    ServingSection,
    list_recipes,
    load_recipe,
    parse_recipe,
)
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


@pytest.fixture
def write(tmp_path):
    def written(text, name="r.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return written


MINIMAL = yaml.safe_dump(HUB)


# --- what is refused


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"learning_rat": 1}}, r"^training\.learning_rat: unknown field \(value 1\); known .*learning_rate,"),
        ({"trainings": {}}, r"^trainings: unknown field .*known here: .*training, verifier, vocab"),
        ({"verifier": HUB["verifier"] | {"path": "/a"}}, r"^verifier\.path: unknown .*: dtype, repo_id, revision, source"),
        ({"verifier": {"source": "path", "path": 5}}, r"^verifier\.path: .*\(got 5\)"),
        ({"verifier": {"source": "zip"}}, r"^verifier: .*'zip'.*'wheel', 'path', 'hub'"),
        ({"verifier": HUB["verifier"] | {"revision": "main"}}, r"^verifier\.revision: .*\(got 'main'\)"),
        ({"training": {"steps": "many"}}, r"^training\.steps: .*\(got 'many'\)"),
        ({"vocab": {"draft_vocab_size": 0}}, r"^vocab\.draft_vocab_size: .*greater than or equal to 1 \(got 0\)"),
        ({"drafter": {"markov_rank": 0}}, r"^drafter\.markov_rank: "),
        ({"training": {"loss": {"ce": 0.0}}}, r"^training\.loss=\{'ce': 0\.0\} must weight at least one"),
        ({"training": {"loss": {"ce": 1.0, "tv": -0.1}}}, r"none below 0"),
        ({"training": {"loss": {"mse": 1.0}}}, r"^training\.loss\.mse"),
        ({"name": "Not A Name"}, r"^name: "),
        ({"prompts": {"source": "dataset"}}, r"prompts\.dataset=None with prompts\.source='dataset': give"),
        ({"prompts": {"dataset": "org/data"}}, r"prompts\.dataset='org/data' with prompts\.source='builtin'"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named_with_value_and_expectation(sections, message):
    with pytest.raises(RecipeError, match=message):
        hub_recipe(**sections)


def test_all_faults_are_told_at_once():
    with pytest.raises(RecipeError) as caught:
        hub_recipe(training={"steps": 0, "learning_rate": -1}, vocab={"size": 5})
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "vocab.size", "training.steps", "training.learning_rate",
    ]  # fmt: skip


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_more_tokens_than_a_block_proposes(sample_from_anchor):
    drafter = {"block_size": 6, "sample_from_anchor": sample_from_anchor}
    offered = 6 if sample_from_anchor else 5
    recipe = hub_recipe(drafter=drafter)
    assert recipe.num_speculative_tokens == recipe.proposals_per_block == offered
    assert hub_recipe(drafter=drafter, evaluation={"num_speculative_tokens": 2}).num_speculative_tokens == 2
    with pytest.raises(
        RecipeError, match=rf"num_speculative_tokens={offered + 1} is above the {offered} .*lower it or"
    ):
        hub_recipe(drafter=drafter, evaluation={"num_speculative_tokens": offered + 1})


def test_a_block_that_proposes_nothing():
    with pytest.raises(RecipeError, match=r"block_size=1 with sample_from_anchor=false proposes nothing"):
        hub_recipe(drafter={"block_size": 1, "sample_from_anchor": False})


@pytest.mark.parametrize("ids", [[3, 1], [2, 2, 5], [0, 4], []])
def test_layer_ids_that_do_not_ascend(ids):
    with pytest.raises(
        RecipeError, match=r"aux_hidden_state_layer_ids=\[.*\] must be distinct, ascending and at least 1"
    ):
        hub_recipe(drafter={"aux_hidden_state_layer_ids": ids})


@pytest.mark.parametrize("longer", ["responses", "evaluation"])
def test_lengths_beyond_max_model_len(longer):
    # 100 + 50 tokens, a block of 5 and the bonus token.
    fits = {
        "prompts": {"max_prompt_tokens": 100},
        "responses": {"max_new_tokens": 20},
        "evaluation": {"max_new_tokens": 20},
        "serving": {"max_model_len": 156},
        longer: {"max_new_tokens": 50},
    }
    hub_recipe(**fits)
    with pytest.raises(
        RecipeError, match=r"max_model_len=155 leaves 149 tokens.* need 150: raise serving.max_model_len"
    ):
        hub_recipe(**fits | {"serving": {"max_model_len": 155}})


def test_documents_longer_than_a_step():
    sections = {"prompts": {"max_prompt_tokens": 300}, "responses": {"max_new_tokens": 200}}
    hub_recipe(**sections, training={"tokens_per_step": 500})
    hub_recipe(**sections, training={"tokens_per_step": 400}, examples={"max_length": 400})
    with pytest.raises(RecipeError, match=r"tokens_per_step=499 is less than the 500 tokens .*examples\.max_length"):
        hub_recipe(**sections, training={"tokens_per_step": 499})


# --- files and overrides


@pytest.mark.parametrize(
    ("text", "message"),
    [("name: [", "is not valid YAML"), ("- a\n- b\n", "must hold a mapping of recipe sections, found list")],
)
def test_files_that_are_no_recipe(write, text, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(write(text))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(RecipeError, match=rf"recipe 'nonsense' not found.*known recipes: .*{DEFAULT_RECIPE}"):
        load_recipe("nonsense")


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("training.learning_rate=1e-3", ("training", "learning_rate"), 0.001),
        ("training.learning_rate=2.5E-4", ("training", "learning_rate"), 0.00025),
        ("training.steps=1e3", ("training", "steps"), 1000),
        ("drafter.aux_hidden_state_layer_ids=[1, 4, 9]", ("drafter", "aux_hidden_state_layer_ids"), (1, 4, 9)),
        ("training.loss={ce: 0.5, kl: 1e-1}", ("training", "loss"), {"ce": 0.5, "kl": 0.1}),
        ("training.loss.tv=0.25", ("training", "loss"), {"ce": 1.0, "tv": 0.25}),
        ("vocab.draft_vocab_size=full", ("vocab", "draft_vocab_size"), "full"),
        ("drafter.confidence_head=false", ("drafter", "confidence_head"), False),
        ("evaluation.num_speculative_tokens=null", ("evaluation", "num_speculative_tokens"), None),
        ("release.title=a = b: c", ("release", "title"), None),
        ("release.title='a = b: c'", ("release", "title"), "a = b: c"),
        ("description=", ("description",), None),
    ],
)
def test_set(write, override, path, value):
    file = write(MINIMAL + "training: {loss: {ce: 1.0}}\n")
    if value is None and "null" not in override:
        with pytest.raises(RecipeError):
            load_recipe(file, [override])
        return
    found = load_recipe(file, [override])
    for name in path:
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.steps", r"--set 'training\.steps': expected section\.field=value"),
        ("=5", "expected section.field=value"),
        ("name.x=5", "'name' is a value, not a section"),
        ("training.loss=[1,", r"--set 'training\.loss=\[1,': the value is not valid YAML"),
        ("training.learning_rat=1e-3", r"training\.learning_rat: unknown field \(value 0\.001\)"),
        ("training.steps=fast", r"training\.steps: .*\(got 'fast'\)"),
        ("nowhere.x=1", "nowhere: unknown field"),
        ("training..steps=1", "unknown field"),
    ],
)
def test_bad_overrides(write, override, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(write(MINIMAL), [override])


def test_later_overrides_win(write):
    recipe = load_recipe(write(MINIMAL), ["training.steps=5", "training.steps=6", "prompts.seed=7"])
    assert (recipe.training.steps, recipe.prompts.seed) == (6, 7)


def test_paths_are_relative_to_the_recipes_file(write, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    monkeypatch.setenv("DATA", str(tmp_path / "data"))
    text = "name: t\nverifier: {source: path, path: models/tiny}\nprompts: {source: dataset, dataset: $DATA/a.jsonl}\n"
    recipe = load_recipe(write(text))
    assert recipe.verifier.path == tmp_path / "models" / "tiny"
    assert recipe.prompts.dataset == str(tmp_path / "data" / "a.jsonl")
    assert load_recipe(write(text), ["verifier.path=/abs/model"]).verifier.path == Path("/abs/model")
    assert load_recipe(write(text), ["verifier.path=~/model"]).verifier.path == Path.home() / "model"
    for dataset in ("org/data", "s3://bucket/a.jsonl", "org/with.dots"):
        assert load_recipe(write(text), [f"prompts.dataset={dataset}"]).prompts.dataset == dataset


def test_a_recipe_is_frozen_and_reads_back():
    recipe = load_recipe(DEFAULT_RECIPE)
    assert parse_recipe(recipe.model_dump(mode="json")) == recipe
    with pytest.raises(ValueError, match="frozen"):
        recipe.training.steps = 5


@pytest.mark.parametrize("name", list_recipes())
def test_shipped_recipes_load_under_their_own_name(name):
    assert load_recipe(name).name == name


# --- identity

SERVING = {
    "python": "/somewhere/else/bin/python",
    "max_model_len": 4096,
    "max_num_seqs": 7,
    "concurrency": 3,
    "kv_cache_gib": 11.0,
    "extra_args": ["--tensor-parallel-size", "4"],
    "start_timeout_seconds": 5.0,
    "train_timeout_seconds": 6.0,
}


def with_field(recipe: Recipe, section: str, field: str, value) -> Recipe:
    raw = recipe.model_dump(mode="json")
    raw[section][field] = value
    return parse_recipe(raw)


def test_no_serving_field_changes_a_fingerprint():
    before = hub_recipe()
    for field in ServingSection.model_fields:
        after = with_field(before, "serving", field, SERVING[field])  # a new field needs a value here
        assert after != before
        assert changed_stages(before, after) == set(), field


def decisions(recipe: Recipe):
    """(section, field, another value) of every field that describes results."""
    special = {
        ("prompts", "source"): "self",
        ("vocab", "draft_vocab_size"): "full",
        ("drafter", "aux_hidden_state_layer_ids"): [1, 2],
        ("drafter", "attention"): "sliding",
        ("drafter", "intermediate_size"): 64,
        ("drafter", "mask_token_id"): 9,
        ("training", "optimizer"): "adamw",
        ("training", "schedule"): "linear",
        ("training", "dtype"): "float32",
        ("training", "loss"): {"kl": 1.0},
        ("evaluation", "num_speculative_tokens"): 2,
        ("release", "title"): "Another",
        ("prompts", "split"): "test",
    }
    # Decide whether and when work is kept, not what it is; `dataset` comes with `source`.
    exempt = {("training", "checkpoint_every_seconds"), ("responses", "max_failed_share"), ("prompts", "dataset")}
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
        ("evaluation.max_new_tokens=17", {"references", "evaluation", "release"}),
        ("vocab.draft_vocab_size=64", {"vocab", "drafter", "evaluation", "release"}),
        ("release.title=Other", {"release"}),
        (
            "drafter.aux_hidden_state_layer_ids=[1, 2]",
            {"references", "hidden_states", "drafter", "evaluation", "release"},
        ),
    ],
)
def test_only_the_stages_that_a_field_is_about_change(write, override, stages):
    file = write(MINIMAL)
    assert changed_stages(load_recipe(file), load_recipe(file, [override])) == stages


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
