"""Drafters as they are saved, and what they compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from dspark_model.batch import make_slots, pack
from dspark_model.checkpoint import save_checkpoint
from dspark_model.drafter import DSparkDrafter
from tests.dspark_model.tiny import HIDDEN, MASK, VOCAB, answer, some_t2d, tiny_config, tiny_drafter

SIZE, F, RANK = 9, 2 * HIDDEN, 5


def make(reduced: bool = False, **choices: Any) -> DSparkDrafter:
    size = SIZE if reduced else VOCAB
    return tiny_drafter(tiny_config(draft_vocab_size=size, **choices), some_t2d(SIZE) if reduced else None)


def save(folder: Path, drafter: DSparkDrafter) -> dict[str, Any]:
    save_checkpoint(folder, drafter, verifier_name_or_path="/models/v", verifier_architectures=["Qwen3ForCausalLM"])
    return json.loads((folder / "config.json").read_text())


def outputs(drafter: DSparkDrafter) -> torch.Tensor:
    row, anchors = pack([answer(3, 9)]), torch.tensor([2, 5, 8])
    slots = make_slots(row, anchors, block_size=4, mask_token_id=MASK, sample_from_anchor=True)
    output = drafter(row, anchors, slots)
    confidence = drafter.confidence_head(output.hidden_SD, output.prev_embedding_SR)
    return torch.cat([drafter.logits(output.hidden_SD, output.markov_SR), confidence[:, None]], 1)


def rounded(drafter: DSparkDrafter) -> DSparkDrafter:
    """The same with weights that bfloat16, in which checkpoints are stored, holds exactly."""
    with torch.no_grad():
        for value in (*drafter.trainable_state().values(), drafter.lm_head):
            value.copy_(value.bfloat16())
    return drafter
