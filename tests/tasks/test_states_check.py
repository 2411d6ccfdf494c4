"""States of the wrong layer, or of the wrong side of the norm, are refused by name; an engine's rounding is not."""

from __future__ import annotations

import functools
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dspark_model.batch import Document
from dspark_model.dataset import write_examples
from tasks import hidden_states
from tasks.states_check import TOLERANCE, StatesMismatchError, check_states
from tasks.states_spool import StatesSpool
from tests.stage_room import FakeEngine, stage_context, toy_recipe
from tests.tiny_verifier import NUM_LAYERS, VOCAB

AUX = (1, 3)
SINK = 5
LENGTHS = (40, 25, 33, 20)


def token_ids(length, seed=0):
    ids = torch.randint(10, VOCAB - 10, (length,), generator=torch.Generator().manual_seed(seed))
    ids[0] = SINK
    return ids


@functools.lru_cache(maxsize=4)
def model_of(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().model


def states_of(folder, ids, dtype=torch.float32):
    """State after each layer, [layers + 1, T, D], and after the final norm; from the modules themselves."""
    model = model_of(folder, dtype)
    after = [model.embed_tokens(ids)]
    hooks = [layer.register_forward_hook(lambda _, __, output: after.append(output[0])) for layer in model.layers]
    with torch.no_grad():
        normed = model(ids[None]).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return torch.stack(after).detach(), normed


def document(ids, aux, last):
    mask = torch.ones_like(ids, dtype=torch.bool)
    return Document(ids, mask, torch.cat([state[:-1] for state in aux], dim=1), last[:-1])


def documents_of(folder, pick, dtype=torch.float32, lengths=LENGTHS):
    """Documents whose stored states `pick` chooses from (states by layer, normed): ([aux...], last)."""
    made = []
    for seed, length in enumerate(lengths):
        ids = token_ids(length, seed)
        made.append(document(ids, *pick(*states_of(folder, ids, dtype))))
    return made


def right(states, _):
    return [states[i] for i in AUX], states[-1]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """On a busy machine, threads of so small a model spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def sink_verifier(tiny_verifier, tmp_path_factory):
    """As large models are: one token's state is far longer than all others' and hardly changes between layers."""
    folder = shutil.copytree(tiny_verifier, tmp_path_factory.mktemp("sink") / "verifier")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][SINK] *= 2000
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_right_states_pass_in_the_engines_dtype(tiny_verifier, dtype):
    errors = check_states(tiny_verifier, documents_of(tiny_verifier, right, getattr(torch, dtype)), AUX, dtype)
    assert tuple(errors) == (*AUX, NUM_LAYERS)
    assert max(errors.values()) < TOLERANCE[dtype] / 2, "rounding stays well inside"
    if dtype == "float32":
        assert max(errors.values()) < 1e-5


@pytest.mark.parametrize(
    ("pick", "layer", "best"),
    [
        (lambda states, _: ([states[0], states[2]], states[-1]), 1, "0"),
        (lambda states, _: ([states[2], states[4]], states[-1]), 1, "2"),
        (lambda states, _: ([states[1], states[2]], states[-1]), 3, "2"),
        (lambda states, _: ([states[3], states[1]], states[-1]), 1, "3"),
        (lambda states, _: ([states[1], states[3]], states[-2]), NUM_LAYERS, "3"),
        (lambda states, normed: ([states[1], states[3]], normed), NUM_LAYERS, "after the norm"),
    ],
    ids=["one early", "one late", "second off", "swapped", "last off", "after the norm"],
)
def test_states_of_another_layer_are_refused_by_name(sink_verifier, pick, layer, best):
    documents = documents_of(sink_verifier, pick, torch.bfloat16, LENGTHS[:1])
    with pytest.raises(StatesMismatchError, match=rf"layer {layer} \(of {NUM_LAYERS}\).*closest .* layer {best} \("):
        check_states(sink_verifier, documents, AUX, "bfloat16")


def test_so_are_those_of_an_ordinary_verifier(tiny_verifier):
    documents = documents_of(tiny_verifier, lambda states, _: ([states[1], states[2]], states[-1]), torch.bfloat16)
    with pytest.raises(StatesMismatchError, match=r"layer 3 .*closest are those of layer 2"):
        check_states(tiny_verifier, documents, AUX, "bfloat16")


def test_the_sink_verifier_is_a_hard_case(sink_verifier):
    # Over all tokens at once, neighbouring layers are closer than the tolerance.
    states, _ = states_of(sink_verifier, token_ids(40))
    assert (states[2] - states[1]).norm() / states[1].norm() < TOLERANCE["bfloat16"]


def test_a_fault_in_a_later_document_is_found(tiny_verifier):
    documents = documents_of(tiny_verifier, right)
    shifted = documents_of(tiny_verifier, lambda states, _: ([states[2], states[4]], states[-1]))
    with pytest.raises(StatesMismatchError):
        check_states(tiny_verifier, [documents[1], shifted[3]], AUX, "float32")


def test_values_that_are_no_numbers_are_refused(tiny_verifier):
    (broken,) = documents_of(tiny_verifier, right, lengths=LENGTHS[:1])
    broken.last_hidden_TD[3, 5] = float("nan")
    with pytest.raises(StatesMismatchError, match=rf"layer {NUM_LAYERS} "):
        check_states(tiny_verifier, [broken], AUX, "float32")


def test_the_stage_takes_both_splits_from_one_spool(tiny_verifier, tmp_path, monkeypatch):
    engine = FakeEngine().install(monkeypatch)
    layers = (*AUX, NUM_LAYERS)
    engine.states = lambda ids: (
        states_of(tiny_verifier, torch.tensor(ids))[0][list(layers)].transpose(0, 1).contiguous()
    )
    examples = tmp_path / "examples"
    examples.mkdir()
    recipe = toy_recipe(tiny_verifier)
    recipe = recipe.model_copy(update={"verifier": recipe.verifier.model_copy(update={"dtype": "float32"})})
    context = stage_context(tmp_path, recipe, {"verifier": tiny_verifier, "examples": examples})
    spool = StatesSpool.of(context, "responses")
    for split, names in {"train": ["a", "bb"], "validation": ["ccc"]}.items():
        rows = []
        for name in names:
            ids = token_ids(20 + len(name), len(name)).tolist()
            spool.adopt(name, engine.write_states(tmp_path / "work" / "request", ids[:-1]), ids[:-1])
            rows.append((name, ids, [0] * 5 + [1] * (len(ids) - 5)))
        write_examples(examples / f"{split}.safetensors", rows)
    counts = hidden_states.build(context)
    assert counts["extracted_again"] == 0
    assert engine.asked == []
    assert counts["tokens"] == 20 + 21 + 22
    assert counts["largest_relative_error"] < TOLERANCE["float32"]
    assert not spool.folder.exists(), "the disk is free again"
    assert counts["bytes"] == sum(path.stat().st_size for path in context.output.iterdir())
    assert json.dumps(counts), "plain values, for the manifest"
