"""In which dtype matrix products run."""

from __future__ import annotations

from typing import Literal

import torch

Dtype = Literal["auto", "bfloat16", "float32"]


def compute_dtype(choice: Dtype, device: torch.device) -> torch.dtype:
    """The dtype of products; "auto" is bfloat16 where the device multiplies it natively, else float32.

    A CPU without such instructions (AVX2, AVX-512 before Cooper Lake and Zen 4) emulates them: 3 to 150 times slower
    than float32, measured with torch 2.13 on a Zen 3, by the layout of the product.
    """
    if choice == "float32":
        return torch.float32
    if choice == "bfloat16" or multiplies_bfloat16(device):
        return torch.bfloat16
    return torch.float32


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16 products."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    found = torch.cpu.get_capabilities()
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
