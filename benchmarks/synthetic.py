"""Drafters, verifiers and rows of a given size, made from a seed: what a benchmark needs instead of a trained model.

Time and memory of a step depend on shapes, not on what the numbers mean. Values are still chosen so that a loss can be
compared with another trainer's: the data are greedy answers (each supervised token is the verifier's most likely one
after the state before it), and the verifier gives next to nothing to tokens outside the draft vocabulary, which other
trainers leave out of the verifier's distribution.

Needs torch only. Shape letters: T row tokens, F fused aux width, D hidden, V verifier vocabulary, W draft vocabulary,
A anchors, K block slots, S = A K.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark_model.batch import Document, PackedRow, pack
from dspark_model.config import DrafterConfig, LayerKind
from dspark_model.drafter import DSparkDrafter
from dspark_model.losses import reference_loss
from dspark_model.reference_forward import dense_forward
from dspark_model.step_loss import ConfidenceObjective, Criterion
from dspark_model.strip_loss import Objective
from dspark_model.verifier import VerifierParts
from dspark_model.verifier_targets import log_normalisers
from dspark_model.vocab import verifier_to_draft_ids

GAMMA = 4.0
PROMPT_SHARE = 4
"""One in so many tokens of a document is prompt: read, not predicted."""
OUTSIDE_LOGIT = -60.0
"""About where the verifier's logits of tokens outside the draft vocabulary lie."""
ANSWER_LOGIT = 10.0
"""About what the verifier's logit of the token that follows is, where other tokens' are around 0."""
STORED = torch.bfloat16
"""Dtype of verifiers and of the states that vLLM hands out."""


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
    layer_kind: LayerKind = "sliding"

    def drafter_config(self) -> DrafterConfig:
        """The architecture: three auxiliary layers, all heads, a window longer than any document."""
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
            confidence_head=True,
            confidence_with_markov=True,
            sample_from_anchor=True,
            layer_kinds=(self.layer_kind,) * self.num_layers,
            sliding_window=4096,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            max_position_embeddings=8192,
        )


@dataclass(frozen=True)
class Step:
    """Everything one training step reads, on one device."""

    drafter: DSparkDrafter
    verifier: VerifierParts
    row: PackedRow
    """Without normalisers: see `with_normalisers`."""
    anchors_A: Tensor
    objective: Objective
    dtype: torch.dtype

    def criterion(self) -> Criterion:
        """The trainer's losses."""
        confidence = ConfidenceObjective(weight=1.0, slots=1, detach=False)
        return Criterion(self.drafter, self.verifier, self.objective, confidence, self.dtype)

    def with_normalisers(self) -> Step:
        """The same step after the first epoch: the row knows the verifier's log-normalisers."""
        log_norm_T = log_normalisers(self.verifier, self.row.last_hidden_TD, self.dtype)
        return dataclasses.replace(self, row=dataclasses.replace(self.row, log_norm_T=log_norm_T))


def make_step(
    size: Size,
    device: torch.device,
    dtype: torch.dtype,
    terms: dict[str, float],
    seed: int = 0,
) -> Step:
    """A drafter with random weights and a row of greedy answers; the same values on every device.

    Args:
        size: the shapes.
        device: where the step will run.
        dtype: of the products. Trainable weights are float32, verifier parts and states are stored in bfloat16.
        terms: weights of the losses.
        seed: of everything random.
    """
    config = size.drafter_config()
    torch.manual_seed(seed)
    t2d = torch.zeros(size.verifier_vocab_size, dtype=torch.bool)
    t2d[torch.randperm(size.verifier_vocab_size)[: size.draft_vocab_size]] = True
    verifier = _verifier_parts(size, config, t2d)
    row = pack(_documents(size, config, verifier, t2d))
    drafter = DSparkDrafter(config, t2d).to(device)
    verifier = drafter.load_verifier(verifier.to(device), dtype)
    objective = Objective(terms=terms, gamma=GAMMA, sample_from_anchor=True)
    return Step(drafter, verifier, row.to(device), _anchors(size, seed).to(device), objective, dtype)


def _anchors(size: Size, seed: int) -> Tensor:
    """Ascending anchors [A], as many per document, whose blocks lie whole inside its answer.

    There the rules of all trainers agree about which slots are supervised.
    """
    generator = torch.Generator().manual_seed(seed)
    documents, length = size.tokens // size.document_tokens, size.document_tokens
    first, last = length // PROMPT_SHARE, length - size.block_size - 1
    picks = [
        first + torch.randperm(last - first, generator=generator)[: size.anchors // documents] + length * document
        for document in range(documents)
    ]
    return torch.cat(picks).sort().values


def _verifier_parts(size: Size, config: DrafterConfig, t2d: Tensor) -> VerifierParts:
    """One matrix for embedding and head, as small verifiers have.

    Normalised states have about 1 as their first entry, which the head multiplies by `OUTSIDE_LOGIT` for tokens outside
    the draft vocabulary.
    """
    embed_VD = torch.randn(size.verifier_vocab_size, size.hidden_size) * 0.02
    embed_VD[:, 0] = torch.where(t2d, 0.0, OUTSIDE_LOGIT)
    embed_VD = embed_VD.to(STORED)
    return VerifierParts(embed_VD, embed_VD, torch.ones(size.hidden_size), config.rms_norm_eps)


def _documents(size: Size, config: DrafterConfig, verifier: VerifierParts, t2d: Tensor) -> list[Document]:
    """Random draft tokens, and states that hold the head's row of the token that follows, under noise."""
    ids_W = t2d.nonzero()[:, 0]
    tokens_T = ids_W[torch.randint(ids_W.shape[0], (size.tokens,))]
    head_TD = verifier.lm_head_VD[tokens_T.roll(-1)].float()
    last_TD = torch.randn(size.tokens, size.hidden_size)
    last_TD += head_TD * ANSWER_LOGIT / head_TD.square().sum(-1, keepdim=True)
    last_TD[:, 0] = last_TD.square().mean(-1).sqrt()
    length, mask_T = size.document_tokens, torch.ones(size.document_tokens, dtype=torch.bool)
    mask_T[: length // PROMPT_SHARE] = False
    return [
        Document(
            tokens_T[start : start + length],
            mask_T,
            torch.randn(length, config.aux_width).to(STORED),
            last_TD[start : start + length].to(STORED),
        )
        for start in range(0, size.tokens, length)
    ]


def reference_loss_of(step: Step) -> Tensor:
    """The step's loss without the confidence head's, readable and in float32: dense masks, all logits, autograd."""
    drafter, config, row = step.drafter, step.drafter.config, step.row
    weights = {**drafter.trainable_state(), "embed_tokens": drafter.embed_tokens.float()}
    states = dataclasses.replace(row, aux_hidden_TF=row.aux_hidden_TF.float())
    hidden_SD = dense_forward(weights, config, states, step.anchors_A)
    markov_SR = None
    if drafter.markov_head is not None:
        embedding_AKR = drafter.markov_head.embed(drafter.slots(row, step.anchors_A).prev_token_ids_AK)
        hidden_AKD = hidden_SD.unflatten(0, (-1, config.block_size))
        markov_SR = drafter.markov_head.factors(embedding_AKR, hidden_AKD).flatten(0, 1)
    return _readable_loss(step, drafter.lm_head.float(), hidden_SD, markov_SR)


def unfused_loss_of(step: Step) -> Tensor:
    """The same in the step's dtype with the trainer's own forward: what fusing the losses saves, and nothing else."""
    drafter, slots = step.drafter, step.drafter.slots(step.row, step.anchors_A)
    with torch.autocast(step.anchors_A.device.type, dtype=step.dtype, enabled=step.dtype != torch.float32):
        output = drafter(step.row, step.anchors_A, slots)
        return _readable_loss(step, drafter.lm_head, output.hidden_SD, output.markov_SR)


def _readable_loss(step: Step, lm_head_WD: Tensor, hidden_SD: Tensor, markov_SR: Tensor | None) -> Tensor:
    drafter, row, slots = step.drafter, step.row, step.drafter.slots(step.row, step.anchors_A)
    logits_SW = nn.functional.linear(hidden_SD.to(lm_head_WD.dtype), lm_head_WD)
    if drafter.markov_head is not None and markov_SR is not None:
        logits_SW = logits_SW + drafter.markov_head.bias(markov_SR)
    with torch.no_grad():
        normed_SD = step.verifier.normed(row.last_hidden_TD[slots.state_index_AK.flatten()], lm_head_WD.dtype)
        verifier_logits_SV = step.verifier.capped(normed_SD @ step.verifier.lm_head_VD.to(lm_head_WD.dtype).T)
        p_SW = verifier_logits_SV.softmax(-1)[:, drafter.verifier_ids_W]
    return reference_loss(
        logits_SW,
        verifier_to_draft_ids(drafter.t2d)[slots.target_ids_AK.flatten()],
        slots.supervision_mask_AK,
        step.objective.terms,
        sample_from_anchor=step.objective.sample_from_anchor,
        p_SW=p_SW,
        gamma=step.objective.gamma,
        weighting=step.objective.weighting,
        dpace_alpha=step.objective.dpace_alpha,
    )
