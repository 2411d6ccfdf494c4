"""Random drafters, verifier parts and packed rows of a given size: what a benchmark needs instead of a trained model.

Time and memory of a step depend on shapes, not on what the numbers mean. Needs torch only.
Shape letters: T row tokens, F fused aux width, D hidden, V verifier vocabulary, A anchors, K block slots, S = A K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark_model.anchors import draw_anchors
from dspark_model.batch import Document, PackedRow, Slots, make_slots, pack
from dspark_model.config import DrafterConfig
from dspark_model.drafter import DrafterOutput, DSparkDrafter
from dspark_model.fused_loss import FusedTargets, fused_loss
from dspark_model.losses import slot_weights
from dspark_model.verifier import VerifierParts
from dspark_model.vocab import verifier_to_draft_ids

PROMPT_SHARE = 4
"""One in so many tokens of a document is prompt: read, not predicted."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Shapes of a drafter, its verifier and one step."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    verifier_vocab_size: int
    draft_vocab_size: int
    markov_rank: int
    block_size: int
    tokens: int
    document_tokens: int
    anchors: int

    def drafter_config(self) -> DrafterConfig:
        """The architecture: three auxiliary layers, full attention, no confidence head."""
        return DrafterConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            verifier_vocab_size=self.verifier_vocab_size,
            draft_vocab_size=self.draft_vocab_size,
            verifier_num_layers=28,
            block_size=self.block_size,
            aux_hidden_state_layer_ids=(2, 14, 25),
            mask_token_id=self.verifier_vocab_size - 1,
            markov_rank=self.markov_rank,
            confidence_head=False,
            confidence_with_markov=False,
            sample_from_anchor=True,
            layer_kinds=("full",) * self.num_layers,
            sliding_window=2048,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            max_position_embeddings=2048,
        )


@dataclass(frozen=True)
class Step:
    """Everything one training step reads, on one device."""

    drafter: DSparkDrafter
    verifier: VerifierParts
    row: PackedRow
    anchor_pos_A: Tensor
    slots: Slots
    draft_targets_S: Tensor
    """Draft ids, -1 where the draft vocabulary lacks the token."""
    weights_S: Tensor
    """Slot weights divided by the number of supervised slots."""

    @property
    def last_hidden_SD(self) -> Tensor:  # noqa: N802 - shape suffix
        """Verifier states that the targets were drawn from [S, D]."""
        return self.row.last_hidden_TD[self.slots.state_index_AK.flatten()]

    @property
    def markov_w2_WR(self) -> Tensor | None:  # noqa: N802 - shape suffix
        """Output matrix of the Markov head [W, R]."""
        head = self.drafter.markov_head
        return head.markov_w2.weight if head else None


def make_step(size: Size, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Step:
    """A drafter with random weights and a row of random documents; the same values on every device.

    Args:
        size: the shapes.
        device: where the step will run.
        dtype: of the frozen verifier parts and the stored states; trainable weights are float32.
        seed: of everything random.
    """
    config = size.drafter_config()
    torch.manual_seed(seed)
    verifier = _verifier_parts(size, config).to(device, dtype)
    t2d = torch.zeros(size.verifier_vocab_size, dtype=torch.bool)
    t2d[torch.randperm(size.verifier_vocab_size)[: size.draft_vocab_size]] = True
    drafter = DSparkDrafter(config, t2d).to(device)
    drafter.load_verifier(verifier)
    documents = [_document(size, config, dtype) for _ in range(size.tokens // size.document_tokens)]
    row = pack(documents)
    anchors = draw_anchors(row, size.anchors, torch.Generator().manual_seed(seed))
    row, anchors = row.to(device), anchors.to(device)
    slots = make_slots(
        row, anchors, block_size=size.block_size, mask_token_id=config.mask_token_id, sample_from_anchor=True
    )
    mask_S = slots.supervision_mask_AK.flatten()
    weights_K = slot_weights(size.block_size, gamma=4.0, sample_from_anchor=True).to(device)
    return Step(
        drafter=drafter,
        verifier=verifier,
        row=row,
        anchor_pos_A=anchors,
        slots=slots,
        draft_targets_S=verifier_to_draft_ids(t2d).to(device)[slots.target_ids_AK.flatten()],
        weights_S=mask_S * weights_K.repeat(anchors.shape[0]) / mask_S.sum().clamp(min=1),
    )


def fused_step_loss(step: Step, terms: dict[str, float], dtype: torch.dtype) -> tuple[Tensor, DrafterOutput]:
    """The trainer's loss: attention in chunks of anchors, heads and losses fused in chunks of slots."""
    with torch.autocast(step.row.aux_hidden_TF.device.type, dtype=dtype, enabled=dtype != torch.float32):
        output = step.drafter(step.row, step.anchor_pos_A, step.slots)
    loss, _ = fused_loss(
        output.hidden_SD,
        output.markov_SR,
        step.drafter.lm_head,
        step.markov_w2_WR,
        FusedTargets(step.draft_targets_S, step.weights_S, step.last_hidden_SD),
        terms,
        step.verifier,
        step.drafter.verifier_ids_W,
    )
    return loss, output


def _verifier_parts(size: Size, config: DrafterConfig) -> VerifierParts:
    shape = (size.verifier_vocab_size, size.hidden_size)
    embed_VD, head_VD = torch.randn(shape) * 0.02, torch.randn(shape) * 0.02
    return VerifierParts(embed_VD, head_VD, torch.ones(size.hidden_size), config.rms_norm_eps)


def _document(size: Size, config: DrafterConfig, dtype: torch.dtype) -> Document:
    length = size.document_tokens
    mask_T = torch.ones(length, dtype=torch.bool)
    mask_T[: length // PROMPT_SHARE] = False
    return Document(
        torch.randint(size.verifier_vocab_size - 1, (length,)),
        mask_T,
        torch.randn(length, config.aux_width).to(dtype),
        torch.randn(length, size.hidden_size).to(dtype),
    )
