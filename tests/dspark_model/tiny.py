"""Drafters, documents and verifier parts of a few dozen numbers, the same for the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspark_model.batch import Document, PackedRow, pack
from dspark_model.config import DrafterConfig
from dspark_model.drafter import DSparkDrafter
from dspark_model.verifier import VerifierParts

HIDDEN, VOCAB, MASK = 12, 23, 22


def tiny_config(**choices: Any) -> DrafterConfig:
    """Two layers, grouped queries (4 heads on 2), head_dim * heads unequal to hidden, full vocabulary."""
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 20,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "verifier_vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "verifier_num_layers": 6,
        "block_size": 4,
        "aux_hidden_state_layer_ids": (1, 3),
        "mask_token_id": MASK,
        "markov_rank": 5,
        "confidence_head": True,
        "confidence_with_markov": True,
        "sample_from_anchor": True,
        "layer_kinds": ("full", "full"),
        "sliding_window": 5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 100.0,
        "max_position_embeddings": 64,
    }
    return DrafterConfig(**{**values, **choices})


def tiny_parts(seed: int = 0) -> VerifierParts:
    """Random embedding, head and final norm."""
    g = torch.Generator().manual_seed(seed)
    return VerifierParts(
        embed_VD=torch.randn(VOCAB, HIDDEN, generator=g),
        lm_head_VD=torch.randn(VOCAB, HIDDEN, generator=g),
        norm_D=1 + 0.3 * torch.randn(HIDDEN, generator=g),
        norm_eps=1e-6,
    )


def tiny_drafter(config: DrafterConfig, t2d: Tensor | None = None, seed: int = 0) -> DSparkDrafter:
    """Every weight drawn large enough that each part shows in the output (norm gains differ from 1)."""
    drafter = DSparkDrafter(config, t2d)
    drafter.load_verifier(tiny_parts(seed))
    g = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, value in sorted(drafter.trainable_state().items()):
            noise = torch.randn(value.shape, generator=g)
            value.copy_(1 + 0.3 * noise if "norm" in name else 0.5 * noise)
    return drafter


def some_t2d(size: int, seed: int = 0) -> Tensor:
    """A draft vocabulary of `size` ids out of VOCAB."""
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:size]] = True
    return t2d


def document(mask: Sequence[int], seed: int = 0, aux: int = 2 * HIDDEN, states_missing: int = 1) -> Document:
    """Random tokens (never the mask token) and states; `mask` says what is supervised."""
    g = torch.Generator().manual_seed(seed)
    states = len(mask) - states_missing
    return Document(
        input_ids_T=torch.randint(0, MASK, (len(mask),), generator=g),
        loss_mask_T=torch.tensor(mask, dtype=torch.bool),
        aux_hidden_TF=torch.randn(states, aux, generator=g),
        last_hidden_TD=torch.randn(states, HIDDEN, generator=g),
    )


def answer(prompt: int, length: int, seed: int = 0) -> Document:
    """A prompt, then a supervised tail."""
    return document([0] * prompt + [1] * length, seed)


def three_documents() -> list[Document]:
    """A conversation of two supervised runs, an answer right from the start, and a short one."""
    return [document([0, 0, 1, 1, 1, 0, 0, 1, 1, 1], 1), document([1] * 9, 2, states_missing=0), answer(3, 2, 3)]


def three_document_row() -> PackedRow:
    return pack(three_documents())
