"""The DSpark drafter: one parallel pass over a block per anchor, then a Markov bias left to right.

Context = RMSNorm(fc(concatenated verifier states)); slots = [anchor embedding, mask embeddings...]; each layer lets
slots attend to the context strictly before the anchor and to their own block. Logits = lm_head(norm(x)) + Markov bias.
(DSpark paper, arXiv 2607.05147; checkpoint contract of vllm-project/speculators.)

Shape letters: T row tokens, F fused aux width, A anchors, K block slots, S = A K slots, D hidden, R Markov rank,
V verifier vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark_model.attention import plan_attention
from dspark_model.batch import PackedRow, Slots, make_slots
from dspark_model.config import DrafterConfig
from dspark_model.heads import ConfidenceHead, MarkovHead
from dspark_model.layers import DrafterLayer, RMSNorm, rope_tables
from dspark_model.verifier import VerifierParts
from dspark_model.vocab import draft_to_verifier_ids


@dataclass(frozen=True)
class DrafterOutput:
    """What the heads read: nothing here has the size of a vocabulary."""

    hidden_SD: Tensor
    """Slot states after the final norm."""
    prev_embedding_SR: Tensor | None
    """Markov embedding of each slot's previous token, which the confidence head reads; None without a Markov head."""
    markov_SR: Tensor | None
    """Factor of each slot's Markov bias (the embedding itself in a vanilla head), None without a Markov head."""


class DSparkDrafter(nn.Module):
    """Trainable drafter plus the frozen verifier parts it shares.

    Frozen `embed_tokens` and `lm_head` are NaN until `load_verifier` fills them, so a missed load cannot pass.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterConfig, t2d: Tensor | None = None) -> None:
        """Fresh drafter.

        Args:
            config: shapes and masks.
            t2d: bool [V], the draft vocabulary; None for the whole vocabulary.

        Raises:
            ValueError: `t2d` does not have V entries or W set.
        """
        super().__init__()
        self.config = config
        D, V, W = config.hidden_size, config.verifier_vocab_size, config.draft_vocab_size
        t2d = torch.ones(V, dtype=torch.bool) if t2d is None else t2d
        if t2d.shape != (V,) or int(t2d.sum()) != W:
            raise ValueError(
                f"t2d has shape {tuple(t2d.shape)} with {int(t2d.sum())} ids set; the config says "
                f"verifier_vocab_size={V}, draft_vocab_size={W}"
            )
        self.fc = nn.Linear(config.aux_width, D, bias=False)
        self.hidden_norm = RMSNorm(D, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config, kind) for kind in config.layer_kinds)
        self.norm = RMSNorm(D, config.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None
        self.register_buffer("t2d", t2d, persistent=False)
        self.register_buffer("d2t", draft_to_verifier_ids(t2d) - torch.arange(W), persistent=False)
        self.embed_tokens = nn.Parameter(torch.full((V, D), torch.nan), requires_grad=False)
        self.lm_head = nn.Parameter(torch.full((W, D), torch.nan), requires_grad=False)

    @property
    def verifier_ids_W(self) -> Tensor:  # noqa: N802 - shape suffix
        """Verifier id of each draft id [W]."""
        return torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t

    @property
    def markov_w2_WR(self) -> Tensor | None:  # noqa: N802 - shape suffix
        """Output matrix of the Markov head [W, R]; None without one."""
        return self.markov_head.markov_w2.weight if self.markov_head else None

    def load_verifier(self, parts: VerifierParts, dtype: torch.dtype | None = None) -> VerifierParts:
        """Take over the frozen embedding, as stored, and the draft rows of the head, in `dtype` (default: as stored).

        The drafter's own final norm starts from the verifier's: the frozen head expects inputs of that scale.

        Returns:
            The parts, sharing every tensor with the drafter that they can: nothing need be held twice.

        Raises:
            ValueError: the verifier's shapes are not those of the config.
        """
        expected = (self.config.verifier_vocab_size, self.config.hidden_size)
        for name, shape in (("embedding", parts.embed_VD.shape), ("head", parts.lm_head_VD.shape)):
            if tuple(shape) != expected:
                raise ValueError(
                    f"verifier {name} has shape {tuple(shape)}, the drafter expects {expected} (its "
                    "verifier_vocab_size and hidden_size): load the verifier that the drafter was made for, or derive "
                    "a new DrafterConfig from this one (dspark_model.families.derive_config)"
                )
        device = self.fc.weight.device
        head_VD = parts.lm_head_VD
        if self.config.reduced_vocab:
            head_VD = head_VD[self.t2d.to(head_VD.device)]
        self.lm_head.data = head_VD.to(device=device, dtype=dtype)
        tied = parts.lm_head_VD is parts.embed_VD and not self.config.reduced_vocab
        self.embed_tokens.data = self.lm_head.data if tied else parts.embed_VD.to(device=device)
        with torch.no_grad():
            self.norm.weight.copy_(parts.norm_D)
        head_VD = parts.lm_head_VD if self.config.reduced_vocab else self.lm_head.data
        return dataclasses.replace(parts, embed_VD=self.embed_tokens.data, lm_head_VD=head_VD)

    def trainable_state(self) -> dict[str, Tensor]:
        """Parameters that training changes, by checkpoint name."""
        return {name: value for name, value in self.named_parameters() if value.requires_grad}

    def slots(self, row: PackedRow, anchor_pos_A: Tensor) -> Slots:
        """`make_slots` in this drafter's layout."""
        config = self.config
        return make_slots(
            row,
            anchor_pos_A,
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            sample_from_anchor=config.sample_from_anchor,
        )

    def forward(self, row: PackedRow, anchor_pos_A: Tensor, slots: Slots) -> DrafterOutput:
        """Slot states for blocks at ascending anchors of a packed row.

        Args:
            row: packed documents with their verifier states.
            anchor_pos_A: ascending row positions.
            slots: `make_slots` of the same row and anchors.

        Returns:
            Slot states and Markov factors, flattened anchor-major ([A, K] -> S).
        """
        config = self.config
        # First, so that its gradient, as large as the verifier's vocabulary, is made when the layers' states are gone.
        embedding_AKR = None if self.markov_head is None else self.markov_head.embed(slots.prev_token_ids_AK)
        device = row.aux_hidden_TF.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.fc.weight.dtype
        context_TD = self.hidden_norm(self.fc(row.aux_hidden_TF.to(dtype)))
        x_SD = nn.functional.embedding(slots.input_ids_AK.flatten(), self.embed_tokens).to(context_TD.dtype)
        plan = plan_attention(row, anchor_pos_A, config)
        slot_rope = rope_tables(slots.position_ids_AK.flatten(), config.head_dim, config.rope_theta)
        context_rope = rope_tables(row.position_ids_T, config.head_dim, config.rope_theta)
        for layer in self.layers:
            x_SD = layer(x_SD, context_TD, plan, slot_rope, context_rope)
        hidden_SD = self.norm(x_SD)
        prev_SR, markov_SR = None, None
        if self.markov_head is not None and embedding_AKR is not None:
            prev_SR = embedding_AKR.flatten(0, 1)
            hidden_AKD = hidden_SD.unflatten(0, (-1, config.block_size))
            markov_SR = self.markov_head.factors(embedding_AKR, hidden_AKD).flatten(0, 1)
        return DrafterOutput(hidden_SD=hidden_SD, prev_embedding_SR=prev_SR, markov_SR=markov_SR)

    def logits(self, hidden_SD: Tensor, markov_SR: Tensor | None) -> Tensor:
        """Float32 logits [S, W] over draft ids from slot states and Markov factors; callers chunk S."""
        logits_SW = nn.functional.linear(hidden_SD.to(self.lm_head.dtype), self.lm_head).float()
        if self.markov_head is not None and markov_SR is not None:
            logits_SW = logits_SW + self.markov_head.bias(markov_SR).float()
        return logits_SW
