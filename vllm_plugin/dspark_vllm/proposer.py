"""DSpark drafting on vLLM's first-generation runner: a parallel block, then left-to-right Markov sampling."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.spec_decode.dflash import DFlashProposer


class DSparkProposer(DFlashProposer):
    """Proposes one block per request with vLLM's own DSpark model.

    DFlash's proposer already writes the verifier's fused states into the drafter's cache and runs the block
    of queries in one pass. What DSpark adds is where the block starts (`sample_from_anchor`: the anchor's
    own slot proposes the first token) and that each token's logits get a bias from the token before it.
    """

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        speculative = vllm_config.speculative_config
        # The base class asserts its own name. Pydantic guards the field, hence the low-level writes.
        object.__setattr__(speculative, "method", "dflash")
        try:
            super().__init__(vllm_config, device, runner)
        finally:
            object.__setattr__(speculative, "method", "dspark")
        # As in vLLM's own runner: its reader of the speculators format always sets the attribute (missing means false),
        # DeepSpec's configs lack it and mean true.
        self.sample_from_anchor = bool(getattr(self.draft_model_config.hf_config, "sample_from_anchor", True))
        runner.use_aux_hidden_state_outputs = True

    def set_inputs_first_pass(self, *args: Any, **kwargs: Any) -> tuple[int, torch.Tensor, Any]:
        """Lay out the queries of each request: the anchor, then masks.

        Returns:
            Number of query tokens, indices [requests * proposals] of those whose state proposes a token,
            metadata.
        """
        if self.sample_from_anchor:
            # n queries propose n tokens; DFlash would add one for the anchor.
            self.num_speculative_tokens -= 1
            try:
                num_queries, _, metadata = super().set_inputs_first_pass(*args, **kwargs)
            finally:
                self.num_speculative_tokens += 1
            indices = self.arange[:num_queries]
        else:
            num_queries, indices, metadata = super().set_inputs_first_pass(*args, **kwargs)
        self._anchor_slots_B = metadata.query_start_loc[:-1].long()
        return num_queries, indices, metadata

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample each block left to right.

        Args:
            hidden_states: drafter's final states [requests * proposals, hidden].
            sampling_metadata: the requests' sampling settings.

        Returns:
            Verifier token ids [requests * proposals] and, when sampling, the probabilities they were drawn
            from [requests * proposals, verifier vocabulary].
        """
        model, num_requests = self.model, self._anchor_slots_B.shape[0]
        base_BKV = model.compute_draft_logits(hidden_states).view(num_requests, self.num_speculative_tokens, -1)
        previous_B = self.input_ids[self._anchor_slots_B].long()
        tokens, probabilities = [], []
        for k in range(self.num_speculative_tokens):
            logits_BV = base_BKV[:, k] + model.markov_bias(model.markov_embed(previous_B))
            drafted_B, probability_BV = self._sample_from_logits(logits_BV, sampling_metadata)
            previous_B = model.map_draft_to_target(drafted_B)
            tokens.append(previous_B)
            if probability_BV is not None:
                probabilities.append(self._spread_over_verifier_vocabulary(probability_BV))
        tokens_BK = torch.stack(tokens, dim=1).flatten()
        if not probabilities:
            return tokens_BK, None
        return tokens_BK, torch.stack(probabilities, dim=1).flatten(0, 1)

    def _spread_over_verifier_vocabulary(self, probability_BV: torch.Tensor) -> torch.Tensor:
        """Place draft-vocabulary probabilities at their verifier ids; the rest gets zero."""
        offsets = self.model.draft_id_to_target_id
        if offsets is None:
            return probability_BV
        draft_ids = torch.arange(probability_BV.shape[-1], device=probability_BV.device)
        full = probability_BV.new_zeros(probability_BV.shape[0], self.model.target_vocab_size)
        return full.index_copy_(1, draft_ids + offsets, probability_BV)
