"""A verifier, its own greedy answers with states, and the settings of a run of seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dspark_model.config import DrafterConfig
from dspark_model.dataset import StatesWriter, write_examples
from dspark_model.families import derive_config
from dspark_model.train_config import TrainConfig
from dspark_model.trainer import StepResult, Trainer
from tests.tiny_verifier import HIDDEN, NUM_LAYERS, VOCAB, make_tiny_verifier

PROMPT, ANSWER, DOCUMENTS, LAYER_IDS = 5, 20, 4, (1, 3)
MASK = VOCAB - 1


class Data:
    """Folders of a run: verifier, examples with states, vocabulary."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.verifier = make_tiny_verifier(root / "verifier", dtype="float32")
        self.vocab = root / "vocab.safetensors"
        save_file({"t2d": torch.ones(VOCAB, dtype=torch.bool)}, self.vocab)
        self.ids, self.states = _greedy_answers(self.verifier)
        self.mask = [0] * PROMPT + [1] * ANSWER
        self.examples = self.write("data", [self.mask] * DOCUMENTS)

    def write(self, name: str, train_masks: Sequence[Sequence[int]], validation: int = DOCUMENTS) -> Path:
        """Examples and states in one folder: the same answers for both splits, to be learnt by heart."""
        folder = self.root / name
        folder.mkdir()
        for split, masks in (("train", train_masks), ("validation", [self.mask] * validation)):
            rows = [(str(i), self.ids[i].tolist(), mask) for i, mask in enumerate(masks)]
            write_examples(folder / f"{split}.safetensors", rows)
            writer = StatesWriter(folder, split, documents_per_shard=2)
            for i in range(len(rows)):
                # The engine has no state of the last token it sampled.
                aux = torch.cat([self.states[layer][i, :-1] for layer in LAYER_IDS], -1)
                writer.add(aux, self.states[NUM_LAYERS][i, :-1], self.ids[i, :-1])
            writer.flush()
        return folder


@torch.no_grad()
def _greedy_answers(verifier: Path) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Token ids [documents, length] and the state after each number of layers, the last before the final norm."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32).eval()
    ids = torch.randint(10, VOCAB - 20, (DOCUMENTS, PROMPT), generator=torch.Generator().manual_seed(0))
    for _ in range(ANSWER):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    prenorm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: prenorm.append(args[0]))
    states = model(ids, output_hidden_states=True).hidden_states
    return ids, [*states[:NUM_LAYERS], prenorm[0]]


def architecture(**choices: Any) -> DrafterConfig:
    """One narrow layer, blocks of 4."""
    verifier = {
        "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB,
        "max_position_embeddings": 128,
    }  # fmt: skip
    values = {
        "layer_kinds": ("full",), "block_size": 4, "draft_vocab_size": None, "mask_token_id": MASK, "markov_rank": 8,
        "confidence_head": True, "sample_from_anchor": True, "sliding_window": 16,
        "aux_hidden_state_layer_ids": LAYER_IDS,
    }  # fmt: skip
    return derive_config(verifier, **{**values, **choices})


def run_config(data: Data, folder: Path, **choices: Any) -> TrainConfig:
    """Two documents per step; `folder` receives output and scratch."""
    for name in ("output", "scratch"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {
        "drafter": architecture(), "verifier": data.verifier, "examples": data.examples,
        "hidden_states": choices.get("examples", data.examples), "vocab": data.vocab, "output": folder / "output",
        "scratch": folder / "scratch", "steps": 12, "tokens_per_step": 2 * (PROMPT + ANSWER), "anchors_per_step": 24,
        "optimizer": "adamw", "learning_rate": 3e-3, "warmup_share": 0.1, "schedule": "cosine", "weight_decay": 0.01,
        "max_grad_norm": 1.0, "loss": {"ce": 0.1, "tv": 0.9}, "loss_decay_gamma": 4.0,
        "slot_weighting": "decay", "dpace_alpha": 0.5, "confidence_loss_weight": 1.0,
        "confidence_slots": 64, "detach_confidence": False, "validate_every": 5, "checkpoint_every_seconds": 3600.0,
        "num_speculative_tokens": 4, "dtype": "float32", "seed": 1,
    }  # fmt: skip
    return TrainConfig(**{**values, **choices})


class StoppingTrainer(Trainer):
    """Asks itself to stop after `stop_after` steps, as a signal would."""

    stop_after = -1

    def train_step(self) -> StepResult:
        result = super().train_step()
        self.stop_requested = self.step + 1 == self.stop_after
        return result


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A copy of everything trained."""
    return {name: value.detach().clone() for name, value in trainer.drafter.trainable_state().items()}


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not equal bit by bit."""
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]
