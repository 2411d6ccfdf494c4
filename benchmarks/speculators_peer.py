"""The model of speculators with the weights of one of our drafters: the other side of every comparison with it.

Source: speculators 0.9.0, `speculators.models.dspark` (https://github.com/vllm-project/speculators).
"""

from __future__ import annotations

from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import Qwen3Config

from dspark_model.config import DrafterConfig
from dspark_model.drafter import DSparkDrafter


def peer_config(config: DrafterConfig, verifier: VerifierConfig | None = None) -> DSparkSpeculatorConfig:
    """The same drafter in the terms of speculators; attention by sdpa, its best on CPU."""
    layers = Qwen3Config(
        vocab_size=config.verifier_vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        layer_types=[f"{kind}_attention" for kind in config.layer_kinds],
        sliding_window=config.sliding_window,
        use_sliding_window="sliding" in config.layer_kinds,
        max_position_embeddings=config.max_position_embeddings,
    )
    layers._attn_implementation = "sdpa"
    return DSparkSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=config.draft_vocab_size,
        block_size=config.block_size,
        aux_hidden_state_layer_ids=list(config.aux_hidden_state_layer_ids),
        mask_token_id=config.mask_token_id,
        sample_from_anchor=config.sample_from_anchor,
        markov_rank=config.markov_rank,
        markov_head_type=config.markov_head_type,
        enable_confidence_head=config.confidence_head,
        confidence_head_with_markov=config.confidence_with_markov,
        speculators_config=SpeculatorsConfig(
            algorithm="dspark",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=config.proposals_per_block)],
            default_proposal_method="greedy",
            verifier=verifier or VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        ),
    )


def peer_of(drafter: DSparkDrafter, norm_D: Tensor, verifier: VerifierConfig | None = None) -> DSparkDraftModel:
    """The model of speculators with our drafter's weights, by checkpoint name: each must exist, none may be left over.

    Args:
        drafter: its frozen parts loaded.
        norm_D: gains of the verifier's final norm (`VerifierParts.norm_D`).
        verifier: what the peer's config says of it; a nameless Qwen3 by default.
    """
    peer = DSparkDraftModel(peer_config(drafter.config, verifier))
    if drafter.config.reduced_vocab:
        peer.load_vocab_mappings(drafter.t2d, drafter.d2t)
    frozen = {
        "embed_tokens.weight": drafter.embed_tokens,
        "lm_head.weight": drafter.lm_head,
        "verifier_lm_head.weight": drafter.lm_head,
        "verifier_norm.weight": norm_D,
    }
    assert {name for name, value in peer.named_parameters() if not value.requires_grad} == set(frozen)
    values = {**frozen, **drafter.trainable_state(), **dict(peer.named_buffers())}
    peer.load_state_dict({name: value for name, value in values.items() if name in peer.state_dict()}, strict=True)
    assert {name for name, value in peer.named_parameters() if value.requires_grad} == set(drafter.trainable_state())
    return peer
