"""The training loop: fp32 masters, low-precision compute, resumable to the bit on CPU, best by walked acceptance.

Shape letters: A anchors, K block slots, S = A K slots, D hidden.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark_model.anchors import anchor_candidates, draw_anchors
from dspark_model.batch import PackedRow, pack
from dspark_model.dataset import Documents
from dspark_model.drafter import DSparkDrafter
from dspark_model.fused_loss import FusedTargets, chunked_acceptance_rate, fused_loss
from dspark_model.losses import confidence_loss, slot_weights
from dspark_model.metrics import Acceptance, total, walk_documents
from dspark_model.schedule import RowSampler, generator_for, learning_rate_factor
from dspark_model.train_config import TrainConfig, changed_settings
from dspark_model.training_data import check_data
from dspark_model.verifier import load_verifier_parts
from dspark_model.vocab import verifier_to_draft_ids

log = logging.getLogger("dspark.train")
CHECKPOINT = "checkpoint.pt"
BEST = "best.pt"
HISTORY = "history.jsonl"


class ResumeError(RuntimeError):
    """A checkpoint that belongs to another run."""


@dataclass(frozen=True)
class StepResult:
    """Figures of one step; sums and counts, divided only for display."""

    loss: float
    confidence_loss: float
    grad_norm: float
    supervised_slots: int
    anchors: int
    anchor_candidates: int


class Trainer:
    """Owns the drafter, its optimiser and the files of one run."""

    def __init__(self, config: TrainConfig) -> None:
        """Load data and verifier parts, build or resume the drafter.

        Raises:
            ResumeError: `scratch` holds a checkpoint of a run with other settings.
            ValueError: data, vocabulary and verifier do not belong together.
        """
        self.config = config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self.train_documents = Documents(config.examples, config.hidden_states, "train")
        self.validation_documents = Documents(config.examples, config.hidden_states, "validation")
        check_data(self.train_documents, self.validation_documents, config.drafter)
        t2d = load_file(config.vocab)["t2d"].bool()
        self.verifier = load_verifier_parts(config.verifier).to(self.device, self.dtype)
        torch.manual_seed(config.seed)
        self.drafter = DSparkDrafter(config.drafter, t2d).to(self.device)
        self.drafter.load_verifier(self.verifier)
        self.draft_ids_V = verifier_to_draft_ids(t2d).to(self.device)
        self.optimizers = self._make_optimizers()
        self.sampler = RowSampler(self.train_documents.lengths, config.tokens_per_step, config.seed)
        self.step, self.best, self.best_step, self.seconds = 0, float("-inf"), -1, 0.0
        self.history: list[dict[str, Any]] = []
        self.stop_requested = False
        self._resume()

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for the matrices of layers and `fc` by choice; AdamW for everything else.

        Markov tables stay with AdamW: most of their rows get no gradient in a step, and orthogonalising would
        move those too (https://github.com/vllm-project/speculators/pull/971).
        """
        config, named = self.config, self.drafter.trainable_state()
        matrices = [p for name, p in named.items() if p.dim() == 2 and name.startswith(("layers.", "fc."))]
        muon = matrices if config.optimizer == "muon" else []
        taken = {id(p) for p in muon}
        rest = [p for p in named.values() if id(p) not in taken]
        groups = [
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
        ]
        if muon:
            optimizers.append(
                torch.optim.Muon(
                    muon,
                    lr=config.learning_rate,
                    weight_decay=config.weight_decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        return optimizers

    def run(self) -> bool:
        """Train to the end or to `stop_requested`; True when finished."""
        started = last_checkpoint = time.monotonic()
        before = self.seconds
        while self.step < self.config.steps and not self.stop_requested:
            result = self.train_step()
            self.step += 1
            self.seconds = before + time.monotonic() - started
            self._record(result)
            if self.step % self.config.validate_every == 0 or self.step == self.config.steps:
                self.validate()
            if time.monotonic() - last_checkpoint >= self.config.checkpoint_every_seconds:
                self.save()
                last_checkpoint = time.monotonic()
        self.save()
        return self.step >= self.config.steps

    def train_step(self) -> StepResult:
        """One packed row forward, backward and update; a row with no supervised slot changes nothing."""
        config = self.config
        factor = learning_rate_factor(self.step, config.steps, config.warmup_share, config.schedule)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = config.learning_rate * factor
        row = pack([self.train_documents[i] for i in self.sampler.row(self.step)])
        anchors = draw_anchors(row, config.anchors_per_step, generator_for(config.seed, self.step, stream=2))
        candidates = int(anchor_candidates(row).sum())
        if anchors.numel() == 0:
            return StepResult(0.0, 0.0, 0.0, 0, 0, candidates)
        row, anchors = row.to(self.device), anchors.to(self.device)
        loss, confidence, supervised = self._loss(row, anchors)
        (loss + config.confidence_loss_weight * confidence).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.trainable_state().values(), config.max_grad_norm)
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"step {self.step}: gradient norm is {norm.item()}; lower training.learning_rate or check the states"
            )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return StepResult(loss.item(), confidence.item(), norm.item(), supervised, anchors.shape[0], candidates)

    def _loss(self, row: PackedRow, anchors_A: Tensor) -> tuple[Tensor, Tensor, int]:
        config, architecture, drafter = self.config, self.config.drafter, self.drafter
        slots = drafter.slots(row, anchors_A)
        mask_S = slots.supervision_mask_AK.flatten()
        count = mask_S.sum().clamp(min=1)
        weights_K = slot_weights(
            architecture.block_size,
            config.loss_decay_gamma,
            sample_from_anchor=architecture.sample_from_anchor,
        ).to(self.device)
        weights_S = mask_S * weights_K.repeat(anchors_A.shape[0])
        w2 = drafter.markov_head.markov_w2.weight if drafter.markov_head else None
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            output = drafter(row, anchors_A, slots)
        state_index_S = slots.state_index_AK.flatten()
        last_SD = row.last_hidden_TD[state_index_S]
        draft_targets_S = self.draft_ids_V[slots.target_ids_AK.flatten()]
        targets = FusedTargets(draft_targets_S, weights_S / count, last_SD)
        loss, acceptance_S = fused_loss(
            output.hidden_SD, output.markov_SR, drafter.lm_head, w2, targets, config.loss,
            self.verifier, drafter.verifier_ids_W,
        )  # fmt: skip
        confidence = torch.zeros((), device=self.device)
        if drafter.confidence_head is not None and config.confidence_loss_weight:
            # Without p at hand, a sample of whole blocks is enough to train one linear layer.
            rows_S = torch.arange(mask_S.shape[0], device=self.device)
            if acceptance_S is None:
                stride = mask_S.shape[0] // max(1, config.confidence_slots)
                stride = min(max(1, stride), anchors_A.shape[0])  # at least one block
                rows_S = rows_S[(rows_S // architecture.block_size) % stride == self.step % stride]
                acceptance_S = chunked_acceptance_rate(
                    output.hidden_SD[rows_S], None if output.markov_SR is None else output.markov_SR[rows_S],
                    drafter.lm_head, w2, last_SD[rows_S], self.verifier, drafter.verifier_ids_W,
                )  # fmt: skip
            hidden, markov = output.hidden_SD[rows_S], output.prev_embedding_SR
            markov = None if markov is None else markov[rows_S]
            if config.detach_confidence:
                hidden, markov = hidden.detach(), None if markov is None else markov.detach()
            logits = drafter.confidence_head(hidden, markov)
            confidence = confidence_loss(logits, acceptance_S, weights_S[rows_S], mask_S[rows_S].sum().clamp(min=1))
        return loss, confidence, int(mask_S.sum())

    def validate(self) -> Acceptance:
        """Walk the held-out documents; keep the weights if the acceptance length is the best so far."""
        self.drafter.eval()
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
            walked = walk_documents(self.drafter, self.validation_documents, self.config.num_speculative_tokens)
        self.drafter.train()
        acceptance = total(walked, self.config.num_speculative_tokens)
        self.history.append(
            {
                "step": self.step,
                "seconds": round(self.seconds, 2),
                "walked_acceptance_length": acceptance.acceptance_length,
                "survival": acceptance.survival,
                "drafts": acceptance.drafts,
            }
        )
        log.info(
            "step %d/%d: walked acceptance length %.3f on held-out answers (survival %s)",
            self.step, self.config.steps, acceptance.acceptance_length,
            " ".join(f"{rate:.3f}" for rate in acceptance.survival),
        )  # fmt: skip
        if acceptance.acceptance_length > self.best:
            self.best, self.best_step = acceptance.acceptance_length, self.step
            _save_atomically(self.drafter.trainable_state(), self.config.scratch / BEST)
        return acceptance

    def _record(self, result: StepResult) -> None:
        rate = self.step / max(self.seconds, 1e-9)
        self.history.append(
            {
                "step": self.step,
                "seconds": round(self.seconds, 2),
                "learning_rate": self.optimizers[0].param_groups[0]["lr"],
                **vars(result),
            }
        )
        if self.step % max(1, self.config.steps // 40) == 0 or self.step == 1:
            log.info(
                "step %d/%d loss %.3f grad norm %.2f anchor coverage %.0f%% %.2f steps/s, %.0f s left",
                self.step, self.config.steps, result.loss, result.grad_norm,
                100 * result.anchors / max(1, result.anchor_candidates), rate,
                (self.config.steps - self.step) / rate,
            )  # fmt: skip

    def save(self) -> None:
        """Write the resumable checkpoint and the history, atomically."""
        state = {
            "identity": self.config.identity(),
            "step": self.step,
            "seconds": self.seconds,
            "best": self.best,
            "best_step": self.best_step,
            "drafter": self.drafter.trainable_state(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "history": self.history,
        }
        _save_atomically(state, self.config.scratch / CHECKPOINT)
        lines = "".join(json.dumps(entry) + "\n" for entry in self.history)
        (self.config.output / HISTORY).write_text(lines)

    def _resume(self) -> None:
        path = self.config.scratch / CHECKPOINT
        if not path.is_file():
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        changed = changed_settings(state["identity"], self.config.identity())
        if changed:
            raise ResumeError(
                f"{path} belongs to a run with other settings ({'; '.join(changed)}): "
                "set them back to continue it, or delete it to start anew"
            )
        self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]
        self.best, self.best_step = state["best"], state["best_step"]
        with torch.no_grad():
            for name, parameter in self.drafter.trainable_state().items():
                parameter.copy_(state["drafter"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        log.info("resumed at step %d of %d", self.step, self.config.steps)

    def load_best(self) -> DSparkDrafter:
        """The drafter with the weights of the best validation."""
        best = torch.load(self.config.scratch / BEST, map_location=self.device, weights_only=True)
        with torch.no_grad():
            for name, parameter in self.drafter.trainable_state().items():
                parameter.copy_(best[name])
        return self.drafter


def _save_atomically(state: Any, path: Path) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)
