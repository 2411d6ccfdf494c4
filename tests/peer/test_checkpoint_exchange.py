"""Checkpoints travel both ways between speculators 0.9.0 and us, and give the same logits.

All weights are numbers that bfloat16, in which checkpoints are written, holds exactly.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from speculators import SpeculatorModel
from speculators.config import VerifierConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.speculators_peer import peer_of
from dspark_model.checkpoint import load_checkpoint, save_checkpoint
from dspark_model.drafter import DSparkDrafter
from dspark_model.verifier import load_verifier_parts
from tests.dspark_model.tiny import HIDDEN, VOCAB, some_t2d, tiny_config, tiny_drafter
from tests.peer.ours import our_step
from tests.peer.pair import FEW_ANCHORS, assert_same, peer_step, two_document_row

DRAFT_VOCAB = 15
VOCABULARIES = pytest.mark.parametrize("draft_vocab", [VOCAB, DRAFT_VOCAB], ids=["full_vocab", "reduced_vocab"])
LAYOUTS = pytest.mark.parametrize("sample_from_anchor", [True, False])


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> Path:
    """A tiny Qwen3 whose final norm has gains of its own."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=20,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.normal_(1, 0.3)
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            weight.normal_()
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    folder = tmp_path_factory.mktemp("verifier")
    model.save_pretrained(folder)
    return folder


def make_drafter(verifier: Path, draft_vocab: int, **choices) -> DSparkDrafter:
    config = tiny_config(draft_vocab_size=draft_vocab, layer_kinds=("sliding", "full"), sliding_window=48, **choices)
    drafter = DSparkDrafter(config, some_t2d(draft_vocab))
    drafter.load_verifier(load_verifier_parts(verifier))
    weights = tiny_drafter(config, some_t2d(draft_vocab)).trainable_state()
    with torch.no_grad():
        for name, value in drafter.trainable_state().items():
            value.copy_(weights[name].bfloat16())
    return drafter


def assert_same_logits(drafter: DSparkDrafter, peer: DSparkDraftModel, verifier: Path) -> None:
    row = two_document_row()
    theirs = peer_step(peer, row, FEW_ANCHORS)
    ours = our_step(drafter, load_verifier_parts(verifier), row, FEW_ANCHORS)
    assert_same(ours.logits_SW, theirs.logits_SW, "logits")
    assert_same(ours.verifier_draft_logits_SW[ours.mask_S], theirs.targets_SW[ours.mask_S], "verifier logits")
    if drafter.confidence_head is not None:
        assert_same(ours.confidence_S, theirs.confidence_S, "confidence logits")


@VOCABULARIES
@LAYOUTS
@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("confidence", ["with_markov", "without_markov", "none"])
def test_what_speculators_writes_we_read(tmp_path, verifier, draft_vocab, sample_from_anchor, confidence, markov):
    source = make_drafter(
        verifier,
        draft_vocab,
        markov_head_type=markov,
        sample_from_anchor=sample_from_anchor,
        confidence_head=confidence != "none",
        confidence_with_markov=confidence == "with_markov",
    )
    peer = peer_of(source, load_verifier_parts(verifier).norm_D, VerifierConfig.from_pretrained(str(verifier)))
    peer.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path, load_verifier_parts(verifier))
    for name, value in source.trainable_state().items():
        assert torch.equal(loaded.trainable_state()[name], value), name
    assert torch.equal(loaded.t2d, source.t2d)
    assert loaded.config.sample_from_anchor == sample_from_anchor
    assert loaded.config.layer_kinds == source.config.layer_kinds
    assert_same_logits(loaded, peer, verifier)


@VOCABULARIES
@LAYOUTS
@pytest.mark.parametrize("confidence", ["with_markov", "without_markov", "none"])
def test_what_we_write_speculators_reads(tmp_path, verifier, draft_vocab, sample_from_anchor, confidence):
    source = make_drafter(
        verifier,
        draft_vocab,
        sample_from_anchor=sample_from_anchor,
        confidence_head=confidence != "none",
        confidence_with_markov=confidence == "with_markov",
    )
    save_checkpoint(tmp_path, source, verifier_name_or_path=str(verifier), verifier_architectures=["Qwen3ForCausalLM"])
    config = DSparkSpeculatorConfig.from_pretrained(tmp_path)
    config.transformer_layer_config._attn_implementation = "sdpa"
    peer = SpeculatorModel.from_pretrained(tmp_path, config=config, dtype=torch.float32)
    assert isinstance(peer, DSparkDraftModel)
    assert not any(value.isnan().any() for value in peer.state_dict().values())
    assert peer.config.sample_from_anchor == sample_from_anchor
    assert_same_logits(source, peer, verifier)


@VOCABULARIES
@LAYOUTS
def test_both_write_the_same_tensors_and_settings(tmp_path, verifier, draft_vocab, sample_from_anchor):
    source = make_drafter(verifier, draft_vocab, sample_from_anchor=sample_from_anchor)
    peer = peer_of(source, load_verifier_parts(verifier).norm_D, VerifierConfig.from_pretrained(str(verifier)))
    peer.bfloat16().save_pretrained(tmp_path / "theirs")
    save_checkpoint(
        tmp_path / "ours", source, verifier_name_or_path=str(verifier), verifier_architectures=["Qwen3ForCausalLM"]
    )
    theirs, ours = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "ours"))
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert torch.equal(ours[name], value), name
    read = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("theirs", "ours")]
    assert_includes(*read)


def assert_includes(theirs: dict, ours: dict, where: str = "") -> None:
    """Every setting that both write has the same value."""
    informative = {"transformers_version", "speculators_version"}
    for key in (set(theirs) & set(ours)) - informative:
        if isinstance(theirs[key], dict):
            assert_includes(theirs[key], ours[key], f"{where}{key}.")
        else:
            assert ours[key] == theirs[key], f"{where}{key}"
