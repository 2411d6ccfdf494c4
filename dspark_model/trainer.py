"""The training loop: fp32 masters, low-precision compute, resumable to the bit on CPU, best by walked acceptance."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dspark_model.anchors import anchor_candidates, draw_anchors
from dspark_model.batch import Document, pack
from dspark_model.dataset import Documents
from dspark_model.drafter import DSparkDrafter
from dspark_model.metrics import Acceptance, total, walk_documents
from dspark_model.muon import FullPrecisionMuon
from dspark_model.precision import compute_dtype
from dspark_model.schedule import RowSampler, generator_for, learning_rate_factor
from dspark_model.step_loss import ConfidenceObjective, Criterion
from dspark_model.step_metrics import StepMetrics
from dspark_model.strip_loss import Objective
from dspark_model.train_config import TrainConfig, changed_settings
from dspark_model.training_data import check_data
from dspark_model.verifier import load_verifier_parts
from dspark_model.verifier_targets import Normalisers

log = logging.getLogger("dspark.train")
CHECKPOINT = "checkpoint.pt"
BEST = "best.pt"
HISTORY = "history.jsonl"
LOG_LINES = 40
"""Lines about steps in the log of a run; each carries the figures of all steps since the last."""


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
        self.dtype = compute_dtype(config.dtype, self.device)
        log.info("training on %s in %s", self.device, str(self.dtype).removeprefix("torch."))
        self.train_documents = Documents(config.examples, config.hidden_states, "train")
        self.validation_documents = Documents(config.examples, config.hidden_states, "validation")
        check_data(self.train_documents, self.validation_documents, config.drafter)
        t2d = load_file(config.vocab)["t2d"].bool()
        torch.manual_seed(config.seed)
        self.drafter = DSparkDrafter(config.drafter, t2d).to(self.device)
        verifier = self.drafter.load_verifier(load_verifier_parts(config.verifier).to(self.device), self.dtype)
        self.criterion = Criterion(
            self.drafter,
            verifier,
            Objective(
                terms=config.loss,
                gamma=config.loss_decay_gamma,
                weighting=config.slot_weighting,
                dpace_alpha=config.dpace_alpha,
                sample_from_anchor=config.drafter.sample_from_anchor,
            ),
            ConfidenceObjective(
                weight=config.confidence_loss_weight, slots=config.confidence_slots, detach=config.detach_confidence
            ),
            self.dtype,
        )
        self.normalisers = Normalisers(verifier, self.train_documents.lengths, self.dtype)
        self.optimizers = self._make_optimizers()
        self.sampler = RowSampler(self.train_documents.lengths, config.tokens_per_step, config.seed)
        self.step, self.best, self.best_step, self.seconds = 0, float("-inf"), -1, 0.0
        self.history: list[dict[str, Any]] = []
        self.recent = StepMetrics()
        """Since the last line of the log."""
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
                (torch.optim.Muon if self.dtype == torch.bfloat16 else FullPrecisionMuon)(
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
        row = pack([self._document(index) for index in self.sampler.row(self.step)])
        anchors = draw_anchors(row, config.anchors_per_step, generator_for(config.seed, self.step, stream=2))
        candidates = int(anchor_candidates(row).sum())
        if anchors.numel() == 0:
            return StepResult(0.0, 0.0, 0.0, 0, 0, candidates)
        row, anchors = row.to(self.device), anchors.to(self.device)
        found = self.criterion(row, anchors, self.step)
        (found.loss + config.confidence_loss_weight * found.confidence).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.trainable_state().values(), config.max_grad_norm)
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"step {self.step}: gradient norm is {norm.item()}; lower training.learning_rate or check the states"
            )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.recent += found.metrics
        return StepResult(
            found.loss.item(),
            found.confidence.item(),
            norm.item(),
            int(found.supervised_slots),
            anchors.shape[0],
            candidates,
        )

    def _document(self, index: int) -> Document:
        """A training document, with its normalisers where the step's losses need them."""
        document: Document = self.train_documents[index]
        if not self.criterion.needs_normalisers:
            return document
        log_norm_T = self.normalisers.of(index, document.last_hidden_TD, document.loss_mask_T)
        return dataclasses.replace(document, log_norm_T=log_norm_T)

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
        entry = {
            "step": self.step,
            "seconds": round(self.seconds, 2),
            "learning_rate": self.optimizers[0].param_groups[0]["lr"],
            **vars(result),
        }
        self.history.append(entry)
        if self.step % max(1, self.config.steps // LOG_LINES) and self.step != 1:
            return
        means, self.recent = self.recent.means(), StepMetrics()
        entry["metrics"] = {name: _none_for_nan(mean) for name, mean in means.items()}
        rate = self.step / max(self.seconds, 1e-9)
        log.info(
            "step %d/%d loss %.3f accuracy %.1f%%%s grad norm %.2f anchor coverage %.0f%% %.2f steps/s, %.0f s left",
            self.step, self.config.steps, result.loss, 100 * means.get("accuracy", float("nan")),
            f" acceptance rate {means['acceptance_rate']:.3f}" if "acceptance_rate" in means else "",
            result.grad_norm, 100 * result.anchors / max(1, result.anchor_candidates), rate,
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
            "recent": dict(self.recent.pairs),
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
        self.best, self.best_step, self.recent = state["best"], state["best_step"], StepMetrics(state["recent"])
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


def _none_for_nan(mean: float | list[float]) -> Any:
    """JSON has no nan."""
    if isinstance(mean, list):
        return [_none_for_nan(value) for value in mean]
    return None if math.isnan(mean) else mean


def _save_atomically(state: Any, path: Path) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)
