"""Floating-point operations of a training step, counted from its shapes: 2 per multiply-add of a matrix product.

Element-wise work, norms, softmax and the optimiser are left out, as usual for model FLOPs utilisation (MFU; Chowdhery
et al., PaLM, arXiv 2204.02311, appendix B). What a slot attends to is counted as visible, not as computed.
"""

from __future__ import annotations

import torch

from benchmarks.synthetic import PROMPT_SHARE, Size

PEAK_TFLOPS = {"H200": 989, "H100 NVL": 835, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362, "L4": 121}
"""Dense bfloat16 tensor-core peak by the vendor's data sheet, by a part of the device's name, the longest match."""


def step_flops(size: Size, states: int) -> float:
    """Forward and backward of one step.

    Args:
        size: the shapes.
        states: distinct verifier states that the slots are judged by (each gives one row of verifier logits).
    """
    D, H, N, M = size.hidden_size, size.head_dim, size.num_heads, size.num_kv_heads
    T, S, W, R = size.tokens, size.anchors * size.block_size, size.draft_vocab_size, size.markov_rank
    documents = size.document_tokens
    mean_context = (documents // PROMPT_SHARE + documents) / 2 + size.block_size
    fuse = 2 * T * 3 * D * D
    slot_products = 2 * S * D * (2 * N * H + 2 * M * H + 3 * size.intermediate_size)
    context_products = 2 * T * D * 2 * M * H
    attention = 2 * 2 * S * mean_context * N * H
    backbone = fuse * 2 + size.num_layers * 3 * (slot_products + context_products + attention)
    # Draft logits and the gradients through them; the head is frozen, w2 is not. Verifier logits have no backward.
    losses = 2 * 2 * S * W * (D + R) + 2 * S * W * R + 2 * states * W * D
    return float(backbone + losses)


def peak_tflops(device_name: str) -> float | None:
    """The data sheet's peak for a GPU, None for one that is not listed."""
    known = [name for name in PEAK_TFLOPS if name in device_name]
    return PEAK_TFLOPS[max(known, key=len)] if known else None


def product_tflops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """What this device reaches in one square product, measured: the best of five."""
    from benchmarks.timing import seconds_of

    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / min(seconds_of(lambda: a @ b, device, times=5)) / 1e12
