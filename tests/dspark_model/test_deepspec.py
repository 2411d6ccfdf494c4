"""DeepSpec's checkpoints, against its forward written a second time from transformers' own Qwen3 parts.

The states come from a real tiny Qwen3, indexed as DeepSpec indexes them, so a shifted layer id or slot shows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from dspark_model.batch import Document, PackedRow, pack
from dspark_model.checkpoint import load_checkpoint, save_checkpoint
from dspark_model.config import ConfigError, DrafterConfig
from dspark_model.drafter import DSparkDrafter
from dspark_model.verifier import VerifierParts, transformers_state
from tests.dspark_model.foreign_checkpoints import deepspec_config, stored_tensors, write
from tests.dspark_model.tiny import HIDDEN, MASK, VOCAB, tiny_config, tiny_drafter

DEPTH, LENGTH, ANCHORS = 6, 14, (0, 3, 7)
TARGET_LAYER_IDS = [0, 2]


class Verifier:
    """A real tiny Qwen3, what it made of a document, and its parts."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=20, num_hidden_layers=DEPTH,
            num_attention_heads=4, num_key_value_heads=2, head_dim=6, tie_word_embeddings=False,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config).eval()
        for weight in model.parameters():
            weight.data = (weight.data + 0.3 * torch.randn_like(weight)).bfloat16().float()
        self.parts = VerifierParts(
            model.model.embed_tokens.weight.detach(),
            model.lm_head.weight.detach(),
            model.model.norm.weight.detach(),
            1e-6,
        )
        self.input_ids = torch.randint(0, MASK, (LENGTH,))
        prenorm: list[Tensor] = []
        model.model.norm.register_forward_hook(lambda module, inputs, output: prenorm.append(inputs[0][0]))
        with torch.no_grad():
            self.hidden_states = model(self.input_ids[None], output_hidden_states=True).hidden_states
        self.prenorm = prenorm[0]

    def row(self, config: DrafterConfig) -> PackedRow:
        """As our data path builds it: states by our layer ids."""
        states = tuple(state[0] for state in self.hidden_states)
        taps = [transformers_state(states, i, self.prenorm) for i in config.aux_hidden_state_layer_ids]
        document = Document(self.input_ids, torch.ones(LENGTH, dtype=torch.bool), torch.cat(taps, -1), self.prenorm)
        return pack([document])


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return Verifier()


def trained(verifier: Verifier, **choices: Any) -> DSparkDrafter:
    """A source of weights that bfloat16 holds exactly, with the verifier's frozen ones."""
    config = tiny_config(aux_hidden_state_layer_ids=(1, 3), sliding_window=64, **choices)
    weights = tiny_drafter(config).trainable_state()
    drafter = DSparkDrafter(config)
    drafter.load_verifier(verifier.parts)
    with torch.no_grad():
        for name, value in drafter.trainable_state().items():
            value.copy_(weights[name].bfloat16())
    return drafter


def deepspec_logits(raw: dict[str, Any], tensors: dict[str, Tensor], verifier: Verifier, anchor: int) -> Tensor:
    """Logits [K, V] of one block, previous tokens those of the document: DeepSpec's rules, one anchor at a time."""
    w = {name: value.float() for name, value in tensors.items()}
    names = {field: raw[field] for field in Qwen3Config().to_dict() if field in raw and field != "architectures"}
    config = Qwen3Config(**names)
    features = torch.cat([verifier.hidden_states[0 if i == -1 else i + 1][0] for i in raw["target_layer_ids"]], -1)
    context = norm(features[:anchor] @ w["fc.weight"].T, w["hidden_norm.weight"])
    block = raw["block_size"]
    ids = torch.full((block,), raw["mask_token_id"])
    ids[0] = verifier.input_ids[anchor]
    x = w["embed_tokens.weight"][ids]
    positions = torch.cat([torch.arange(anchor), torch.arange(anchor, anchor + block)])[None]
    cos, sin = Qwen3RotaryEmbedding(config)(x, positions)
    for i in range(config.num_hidden_layers):
        layer = {
            name.removeprefix(f"layers.{i}."): value for name, value in w.items() if name.startswith(f"layers.{i}.")
        }
        x = x + attention(layer, norm(x, layer["input_layernorm.weight"]), context, cos, sin, config)
        y = norm(x, layer["post_attention_layernorm.weight"])
        gated = F.silu(y @ layer["mlp.gate_proj.weight"].T) * (y @ layer["mlp.up_proj.weight"].T)
        x = x + gated @ layer["mlp.down_proj.weight"].T
    hidden = norm(x, w["norm.weight"])
    logits = hidden @ w["lm_head.weight"].T
    state = torch.zeros(raw["markov_rank"])
    for k in range(block if raw["markov_rank"] else 0):
        previous = w["markov_head.markov_w1.weight"][verifier.input_ids[anchor + k]]
        if raw["markov_head_type"] == "vanilla":
            latent = previous
        elif raw["markov_head_type"] == "gated":
            z = torch.cat([hidden[k], previous])
            latent = torch.sigmoid(w["markov_head.gate_proj.weight"] @ z + w["markov_head.gate_proj.bias"]) * previous
        else:
            z = torch.cat([state, previous, hidden[k]])
            gate, candidate, output = (
                w["markov_head.joint_proj.weight"] @ z + w["markov_head.joint_proj.bias"]
            ).chunk(3)  # fmt: skip
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            latent = output.tanh()
        logits[k] += w["markov_head.markov_w2.weight"] @ latent
    return logits


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * gain


def attention(
    w: dict[str, Tensor], x: Tensor, context: Tensor, cos: Tensor, sin: Tensor, config: Qwen3Config
) -> Tensor:
    """Queries of the block over the context and the whole block, no mask: all keys given are visible."""
    keys = torch.cat([context, x])
    heads = {
        part: source @ w[f"self_attn.{part}_proj.weight"].T for part, source in (("q", x), ("k", keys), ("v", keys))
    }
    q, k, v = (value.view(len(value), -1, config.head_dim) for value in heads.values())
    q, k = norm(q, w["self_attn.q_norm.weight"]), norm(k, w["self_attn.k_norm.weight"])
    padded = torch.cat([torch.zeros(len(context), *q.shape[1:]), q])  # transformers turns q and k by the same positions
    q, k = apply_rotary_pos_emb(padded.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    q, group = q[0, :, len(context) :], config.num_attention_heads // config.num_key_value_heads
    k, v = k[0].repeat_interleave(group, 0), v.transpose(0, 1).repeat_interleave(group, 0)
    weights = (q @ k.transpose(1, 2) / config.head_dim**0.5).softmax(-1)
    return (weights @ v).transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T


def our_logits(drafter: DSparkDrafter, verifier: Verifier) -> Tensor:
    """[A, K, V] of blocks at ANCHORS."""
    row, anchors = verifier.row(drafter.config), torch.tensor(ANCHORS)
    output = drafter(row, anchors, drafter.slots(row, anchors))
    return drafter.logits(output.hidden_SD, output.markov_SR).unflatten(0, (len(ANCHORS), -1))


HEADS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "dflash_baseline": {"markov_rank": 0, "confidence_with_markov": False},
}


@torch.no_grad()
@pytest.mark.parametrize("choices", HEADS.values(), ids=HEADS)
def test_logits_are_deepspecs(tmp_path, verifier, choices):
    source = trained(verifier, **choices)
    raw, tensors = deepspec_config(source.config), stored_tensors(source, frozen=True)
    assert raw["target_layer_ids"] == TARGET_LAYER_IDS
    if not source.config.markov_rank:
        del raw["markov_head_type"]
    loaded = load_checkpoint(write(tmp_path, raw, tensors), verifier.parts)
    assert loaded.config == source.config
    raw["markov_head_type"] = source.config.markov_head_type
    expected = torch.stack([deepspec_logits(raw, tensors, verifier, anchor) for anchor in ANCHORS])
    torch.testing.assert_close(our_logits(loaded, verifier), expected, rtol=1e-4, atol=1e-4)
    for name, value in source.trainable_state().items():
        assert torch.equal(loaded.trainable_state()[name], value), name


@torch.no_grad()
def test_layer_ids_are_one_more_than_deepspecs(tmp_path, verifier):
    """Read one layer off in either direction, the logits are others."""
    source = trained(verifier)
    raw, tensors = deepspec_config(source.config), stored_tensors(source, frozen=True)
    loaded = load_checkpoint(write(tmp_path, raw, tensors), verifier.parts)
    assert loaded.config.aux_hidden_state_layer_ids == (1, 3)
    expected = deepspec_logits(raw, tensors, verifier, ANCHORS[-1])
    for shift in (-1, 1):
        shifted = deepspec_logits(
            raw | {"target_layer_ids": [i + shift for i in (0, 2)]}, tensors, verifier, ANCHORS[-1]
        )
        assert (shifted - expected).abs().max() > 0.1


@torch.no_grad()
def test_a_converted_checkpoint_drafts_alike(tmp_path, verifier):
    source = trained(verifier)
    write(tmp_path / "deepspec", deepspec_config(source.config), stored_tensors(source, frozen=True))
    loaded = load_checkpoint(tmp_path / "deepspec", verifier.parts)
    save_checkpoint(tmp_path / "ours", loaded, verifier_name_or_path="Qwen/Qwen3-4B", verifier_architectures=["X"])
    again = load_checkpoint(tmp_path / "ours", verifier.parts)
    assert again.config == loaded.config
    assert torch.equal(our_logits(again, verifier), our_logits(loaded, verifier))


@torch.no_grad()
def test_the_verifiers_rope_settings_do_not_enter(tmp_path, verifier):
    """DeepSpec copies partial_rotary_factor into the config and trains without it."""
    source = trained(verifier)
    raw = deepspec_config(source.config)
    raw["rope_parameters"] |= {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 1]}
    loaded = load_checkpoint(write(tmp_path, raw, stored_tensors(source, frozen=True)), verifier.parts)
    assert torch.equal(our_logits(loaded, verifier), our_logits(source, verifier))


@torch.no_grad()
def test_stored_weights_of_another_verifier_are_refused(tmp_path, verifier):
    source = trained(verifier)
    write(tmp_path, deepspec_config(source.config), stored_tensors(source, frozen=True))
    other = replace(verifier.parts, embed_VD=verifier.parts.embed_VD + 1)
    with pytest.raises(ValueError, match=f"embed_tokens.weight is not this verifier's .{VOCAB} of {VOCAB} rows differ"):
        load_checkpoint(tmp_path, other)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"architectures": ["Gemma4DSparkModel"]}, r"architectures=\['Gemma4DSparkModel'\] .*: a Gemma 4 stack"),
        ({"architectures": ["K3DSparkModel"]}, "latent attention"),
        ({"architectures": ["DSparkDraftModel"], "model_type": "deepseek_v4"}, "DeepSeek V4's drafter"),
        ({"architectures": ["Qwen3Eagle3Model"]}, "no DSpark drafter. Expected the speculators format"),
        ({"target_layer_ids": [-1, 2]}, "-1 is the embedding"),
        ({"target_layer_ids": [2, 0]}, "must be distinct, ascending and 0 or more"),
        ({"target_layer_ids": [0, 5]}, "contains 6: the verifier has 6 layers"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "masks no window"),
        ({"draft_vocab_size": 9}, "draft_vocab_size=9 is not supported in a DeepSpec checkpoint"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"model_type": "llama"}, "model_type='llama'"),
        ({"num_target_layers": None}, "lacks the field 'num_target_layers'"),
        ({"block_size": None}, "lacks the field 'block_size'"),
        ({"enable_confidence_head": None}, "lacks the field 'enable_confidence_head'"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(tmp_path, verifier, edits, message):
    source = trained(verifier)
    write(tmp_path, deepspec_config(source.config) | edits, stored_tensors(source, frozen=True))
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(tmp_path, verifier.parts)


def test_the_trainers_own_name_of_a_qwen3_drafter_is_read(tmp_path, verifier):
    source = trained(verifier)
    raw = deepspec_config(source.config) | {"architectures": ["DSparkDraftModel"]}
    write(tmp_path, raw, stored_tensors(source, frozen=True))
    assert load_checkpoint(tmp_path, verifier.parts).config == source.config
