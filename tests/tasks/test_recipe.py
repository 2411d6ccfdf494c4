"""Recipes: faults are named, and files and overrides mean what people mean."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import yaml

from dspark_model.losses import LOSS_TERMS
from tasks.recipe import LossTerm, RecipeError
from tasks.recipe_file import DEFAULT_RECIPE, list_recipes, load_recipe, parse_recipe

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB = {"name": "t", "verifier": {"source": "hub", "repo_id": "org/model", "revision": COMMIT}}


def hub_recipe(**sections):
    return parse_recipe(HUB | sections)


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
        ({"training": {"learning_rat": 1}}, r"^training\.learning_rat: unknown field \(value 1\); .*learning_rate,"),
        ({"trainings": {}}, r"^trainings: unknown field .*known here: .*training, verifier, vocab"),
        ({"verifier": HUB["verifier"] | {"path": "/a"}}, r"^verifier\.path: unknown .*repo_id, revision, source"),
        ({"verifier": {"source": "path", "path": 5}}, r"^verifier\.path: .*\(got 5\)"),
        ({"verifier": {"source": "zip"}}, r"^verifier: .*'zip'.*'wheel', 'path', 'hub'"),
        ({"verifier": HUB["verifier"] | {"revision": "main"}}, r"^verifier\.revision: .*\(got 'main'\)"),
        ({"training": {"steps": "many"}}, r"^training\.steps: .*\(got 'many'\)"),
        ({"vocab": {"draft_vocab_size": 0}}, r"^vocab\.draft_vocab_size: .*greater than or equal to 1 \(got 0\)"),
        ({"drafter": {"markov_rank": 0}}, r"^drafter\.markov_rank: "),
        ({"drafter": {"attention": "chunked"}}, r"^drafter\.attention: .*'full' or 'sliding' \(got 'chunked'\)"),
        ({"drafter": {"attention": ["full"]}}, r"drafter\.attention=\['full'\] names 1 layers, .*num_layers=2: name"),
        ({"training": {"loss": {"ce": 0.0}}}, r"^training\.loss=\{'ce': 0\.0\} must weight at least one"),
        ({"training": {"loss": {"ce": 1.0, "tv": -0.1}}}, r"none below 0"),
        ({"training": {"loss": {"mse": 1.0}}}, r"^training\.loss\.mse"),
        ({"name": "Not A Name"}, r"^name: "),
        ({"prompts": {"sources": []}}, r"^prompts\.sources: .*at least 1 item"),
        ({"prompts": {"sources": [{"sourc": "builtin"}]}}, r"\.0\.source: .*\n.*\.sourc: unknown field"),
        ({"prompts": {"sources": [{"source": "self", "split": "x"}]}}, r"'self' is no data set of the hub.*'split'"),
        ({"prompts": {"sources": [{"source": "a.jsonl", "revision": "x"}]}}, r"no data set of the hub.*'revision'"),
        ({"prompts": {"sources": [{"source": "builtin", "column": "x"}]}}, r"'builtin' has a column .* of its own"),
        ({"prompts": {"sources": ["s3://bucket/chats"]}}, r"name files, which end in .*'s3://bucket/chats/\*\.jsonl'"),
        ({"prompts": {"sources": ["/data/chats.csv"]}}, r"'/data/chats\.csv' is neither a file ending in .*owner/name"),
        ({"prompts": {"sources": ["a/b", {"source": "a/b"}]}}, r"prompts\.sources names 'a/b' twice"),
        ({"prompts": {"min_prompts": 50, "num_prompts": 20}}, r"min_prompts=50 is above prompts\.num_prompts=20"),
        ({"prompts": {"min_prompt_tokens": 90, "max_prompt_tokens": 80}}, r"min_prompt_tokens=90 must be below"),
        ({"responses": {"temperature": "warm"}}, r"^responses\.temperature: .*\(got 'warm'\)"),
        ({"responses": {"top_p": 0.9}}, r"responses\.top_p=0\.9 .* no effect with responses\.temperature=0"),
        ({"responses": {"modes": [{"name": "a"}, {"name": "a"}]}}, r"responses\.modes: the names .* must differ"),
        ({"serving": {"urls": ["gpu1:8000"]}}, r"serving\.urls: 'gpu1:8000' must begin with http"),
        ({"serving": {"served_model": "m"}}, r"serving\.served_model='m' has no effect without serving\.urls"),
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


@pytest.mark.parametrize(
    ("attention", "kinds"),
    [
        ("full", ("full",) * 3),
        ("sliding", ("sliding",) * 3),
        (["sliding", "sliding", "full"], ("sliding", "sliding", "full")),
    ],
)
def test_one_kind_of_attention_or_one_for_each_layer(attention, kinds):
    assert hub_recipe(drafter={"attention": attention, "num_layers": 3}).drafter.layer_kinds == kinds


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
    hub_recipe(training={"tokens_per_step": 400}, examples={"max_length": 400})
    with pytest.raises(RecipeError, match=r"tokens_per_step=399 is less than the 400 tokens .*examples\.max_length"):
        hub_recipe(training={"tokens_per_step": 399}, examples={"max_length": 400})


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ("builtin", ["builtin"]),
        (["self", "org/data"], ["self", "hub"]),
        ({"source": "s3://b/*.parquet"}, ["file"]),
        (["open-perfectblend", "/data/a.jsonl.gz", {"source": "x.json", "weight": 3}], ["hub", "file", "file"]),
    ],
)
def test_sources_by_name_or_in_full(given, kinds):
    sources = hub_recipe(prompts={"sources": given}).prompts.sources
    assert [source.kind for source in sources] == kinds
    assert all(source.weight == (3 if source.source == "x.json" else 1) for source in sources)


@pytest.mark.parametrize(
    ("fields", "fewest"),
    [({"num_prompts": 100}, 50), ({"num_prompts": "all"}, 2), ({"num_prompts": 3}, 2), ({"min_prompts": 7}, 7)],
)
def test_fewest_prompts_that_a_run_goes_on_with(fields, fewest):
    assert hub_recipe(prompts=fields).prompts.fewest == fewest


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
    text = (
        "name: t\nverifier: {source: path, path: models/tiny}\nprompts: {sources: [$DATA/a.jsonl, {source: b.json}]}\n"
    )
    recipe = load_recipe(write(text))
    assert recipe.verifier.path == tmp_path / "models" / "tiny"
    assert [s.source for s in recipe.prompts.sources] == [str(tmp_path / "data" / "a.jsonl"), str(tmp_path / "b.json")]
    assert load_recipe(write(text), ["verifier.path=/abs/model"]).verifier.path == Path("/abs/model")
    assert load_recipe(write(text), ["verifier.path=~/model"]).verifier.path == Path.home() / "model"
    for dataset in ("org/data", "s3://bucket/a.jsonl", "org/with.dots"):
        assert load_recipe(write(text), [f"prompts.sources={dataset}"]).prompts.sources[0].source == dataset


def test_paths_of_the_command_line_are_relative_to_where_it_is_typed(write, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    recipe = load_recipe(write(MINIMAL), ["prompts.sources=[chats.jsonl]"])
    assert recipe.prompts.sources[0].source == str(tmp_path / "here" / "chats.jsonl")


def test_a_recipe_is_frozen_and_reads_back():
    recipe = load_recipe(DEFAULT_RECIPE)
    assert parse_recipe(recipe.model_dump(mode="json")) == recipe
    with pytest.raises(ValueError, match="frozen"):
        recipe.training.steps = 5


@pytest.mark.parametrize("name", list_recipes())
def test_shipped_recipes_load_under_their_own_name(name):
    assert load_recipe(name).name == name


def test_the_loss_terms_are_those_that_the_package_has():
    # `tasks.recipe` repeats them: reading a recipe must not import torch.
    assert get_args(LossTerm) == LOSS_TERMS
