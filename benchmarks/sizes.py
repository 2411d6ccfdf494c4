"""Shapes that the benchmarks measure."""

from __future__ import annotations

import dataclasses

from benchmarks.synthetic import Size

SIZES = {
    # Seconds; for tests, and to see that a machine runs everything.
    "tiny": Size(
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        verifier_vocab_size=1000,
        draft_vocab_size=400,
        markov_rank=16,
        block_size=5,
        tokens=256,
        document_tokens=64,
        anchors=48,
    ),
    # A drafter for Qwen3-0.6B, as on two CPU cores.
    "qwen3-0.6b": Size(
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=3,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        verifier_vocab_size=151936,
        draft_vocab_size=32000,
        markov_rank=256,
        block_size=8,
        tokens=4096,
        document_tokens=1024,
        anchors=256,
    ),
    # A drafter for Qwen3-8B with the long rows of a real run, as on one data-centre GPU.
    "qwen3-8b": Size(
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=5,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        verifier_vocab_size=151936,
        draft_vocab_size=32000,
        markov_rank=256,
        block_size=8,
        tokens=8192,
        document_tokens=1024,
        anchors=512,
    ),
}


def at(name: str, draft_vocab_size: int, anchors: int) -> Size:
    """A named size with another draft vocabulary and number of anchors."""
    return dataclasses.replace(SIZES[name], draft_vocab_size=draft_vocab_size, anchors=anchors)
