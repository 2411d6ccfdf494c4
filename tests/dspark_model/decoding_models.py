"""Verifiers and rigged drafters for decoding, of a few dozen numbers."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from dspark_model.config import DrafterConfig
from dspark_model.drafter import DSparkDrafter
from dspark_model.verifier import VerifierParts
from tests.dspark_model.tiny import HIDDEN, VOCAB, tiny_config

LAYERS = 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def hybrid_verifier(seed: int = 0) -> PreTrainedModel:
    """Recurrent layers with full attention in between: nothing that a cache could take back."""
    config = Qwen3_5TextConfig(
        **SIZES,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
    )
    return randomised(Qwen3_5ForCausalLM(config), seed)


def llama_verifier(seed: int = 0) -> PreTrainedModel:
    return randomised(LlamaForCausalLM(LlamaConfig(**SIZES)), seed)


def qwen3_verifier(seed: int = 0) -> PreTrainedModel:
    return randomised(Qwen3ForCausalLM(Qwen3Config(**SIZES)), seed)


def windowed_verifier(seed: int = 0) -> PreTrainedModel:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=4, layer_types=kinds)
    return randomised(Qwen3ForCausalLM(config), seed)


VERIFIERS = {
    "llama": llama_verifier,
    "qwen3": qwen3_verifier,
    "windowed": windowed_verifier,
    "hybrid": hybrid_verifier,
}


def randomised(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Weights so large that the next token hangs on the whole context, not on the last token alone."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in sorted(model.named_parameters()):
            if "norm" not in name:
                value.copy_(torch.randn(value.shape, generator=g) * (0.6 if "layers" in name else 1.0))
    return model.eval()


def chain_verifier(logits_VV: Tensor) -> PreTrainedModel:
    """A Llama of two layers whose next-token logits are row v of the table after token v, whatever came before."""
    V = logits_VV.shape[0]
    sizes = {**SIZES, "vocab_size": V, "hidden_size": V, "num_hidden_layers": 2, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, rms_norm_eps=1e-12)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(V))
        model.lm_head.weight.copy_(logits_VV.T / V**0.5)  # the norm turns e_v into sqrt(V) e_v
    return model


def chain_drafter(
    logits_VV: Tensor, *, sway: float = 0.0, doubts: Collection[int] = (), **choices: Any
) -> DSparkDrafter:
    """A drafter whose logits are row v of the table after token v, by its Markov head.

    Args:
        logits_VV: the table.
        sway: how much the slot's state, and with it the verifier's states, adds to that.
        doubts: its confidence is sigmoid(-3) after these tokens and sigmoid(3) after all others.
        choices: for `tiny_config`.
    """
    V = logits_VV.shape[0]
    sizes: dict[str, Any] = {"verifier_vocab_size": V, "draft_vocab_size": V, "markov_rank": V, "mask_token_id": 0}
    layers: dict[str, Any] = {"verifier_num_layers": 2, "aux_hidden_state_layer_ids": (1,)}
    drafter = noisy_drafter(tiny_config(**{**sizes, **layers, "hidden_size": V, **choices}))
    assert drafter.markov_head is not None
    assert drafter.confidence_head is not None
    sureness_V = torch.tensor([-3.0 if v in doubts else 3.0 for v in range(V)])
    with torch.no_grad():
        drafter.norm.weight.mul_(sway)
        drafter.markov_head.markov_w1.weight.copy_(torch.eye(V))
        drafter.markov_head.markov_w2.weight.copy_(logits_VV.T)
        drafter.confidence_head.proj.weight.copy_(
            torch.cat([torch.zeros(drafter.config.hidden_size), sureness_V])[None]
        )
        drafter.confidence_head.proj.bias.zero_()
    return drafter


def half_right_drafter(text: Sequence[int], **choices: Any) -> DSparkDrafter:
    """A drafter for a verifier that writes this text: right after some tokens, wrong after others.

    After two of three distinct tokens it guesses what followed them last in the text, so it is right at least there;
    after every third it guesses what never follows. It doubts itself after a fifth of the tokens.
    """
    following: dict[int, list[int]] = {}
    for token, after in itertools.pairwise(text):
        following.setdefault(token, []).append(after)
    guess_V = torch.zeros(VOCAB, dtype=torch.long)
    for i, (token, after) in enumerate(following.items()):
        guess_V[token] = min(set(range(VOCAB)) - set(after)) if i % 3 == 2 else after[-1]
    table_VV = 8.0 * nn.functional.one_hot(guess_V, VOCAB).float()
    sizes = {"hidden_size": HIDDEN, "verifier_num_layers": LAYERS, "aux_hidden_state_layer_ids": (1, 3)}
    return chain_drafter(table_VV, doubts=list(following)[3::5], **{**sizes, **choices})


def noisy_drafter(config: DrafterConfig, t2d: Tensor | None = None, seed: int = 0) -> DSparkDrafter:
    """`tiny_drafter` for any vocabulary and hidden size."""
    g = torch.Generator().manual_seed(seed)
    V, D = config.verifier_vocab_size, config.hidden_size
    drafter = DSparkDrafter(config, t2d)
    parts = torch.randn(V, D, generator=g), torch.randn(V, D, generator=g), torch.ones(D)
    drafter.load_verifier(VerifierParts(*parts, norm_eps=1e-6))
    with torch.no_grad():
        for name, value in sorted(drafter.trainable_state().items()):
            noise = torch.randn(value.shape, generator=g)
            value.copy_(1 + 0.3 * noise if "norm" in name else 0.5 * noise)
    return drafter


class TableVerifier(nn.Module):
    """Next-token logits and states that depend on the last two tokens through tables; quick to call many times."""

    _is_stateful = True

    def __init__(self, vocab: int, hidden: int, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.logits_VVV = 1.5 * torch.randn(vocab, vocab, vocab, generator=g)
        self.states_VVD = torch.randn(vocab, vocab, hidden, generator=g)
        sizes = {**SIZES, "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": 2}
        self.config, self.device, self.dtype = LlamaConfig(**sizes), torch.device("cpu"), torch.float32
        self.eval()

    def forward(self, input_ids: Tensor, use_cache: bool, output_hidden_states: bool) -> SimpleNamespace:
        before = nn.functional.pad(input_ids, (1, 0))[:, :-1]
        states = self.states_VVD[before, input_ids]
        return SimpleNamespace(
            logits=self.logits_VVV[before, input_ids], hidden_states=(states * 0, states, states * 2)
        )
