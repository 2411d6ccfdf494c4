"""Drafter layers: Qwen3-style attention over verifier context and block slots, and a SwiGLU MLP.

Keys and values come from the concatenation [context ; slots] through the same projections; queries from slots only,
so context tokens never pass through draft MLPs (DSpark paper, section on the DFlash backbone, arXiv 2607.05147).
The context skips input_layernorm: it is normalised once by `hidden_norm`.

Shape letters: T row tokens, S slots (anchors x block), D hidden, N query heads, M key heads, H head dim. Parameter
names are those of the checkpoint contract.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspark_model.attention import AttentionPlan
from dspark_model.config import DrafterConfig, LayerKind


class _RMSNorm(torch.autograd.Function):
    """Keeps its input as it came, instead of two float32 copies of it: norms are most of what a layer would hold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        scale = (x32.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (x32 * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed, grad32 = x.float() * scale, grad.float()
        grad_weight = (grad32 * normed).flatten(0, -2).sum(0)
        inner = grad32 * weight
        # d/dx of x * scale: what changes the mean square is taken out.
        inner -= normed * (inner * normed).mean(-1, keepdim=True)
        return inner.mul_(scale).to(x.dtype), grad_weight.to(weight.dtype), None


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, keeping the two and not what silu made of the gate."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class RMSNorm(nn.Module):
    """Root-mean-square norm computed in float32, gain w (not 1 + w)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; the result has x's dtype."""
        return _RMSNorm.apply(x, self.weight, self.eps)


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Float32 cos and sin [positions, 1, H] of the half-split (neox) rotary embedding."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions.float()[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)[:, None]
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate [positions, heads, H] by its tables."""
    cos, sin = tables
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with per-head q and k norms; see the module docstring for what attends to what."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        D, H = config.hidden_size, config.head_dim
        self.head_dim = H
        self.q_proj = nn.Linear(D, config.num_heads * H, bias=False)
        self.k_proj = nn.Linear(D, config.num_kv_heads * H, bias=False)
        self.v_proj = nn.Linear(D, config.num_kv_heads * H, bias=False)
        self.o_proj = nn.Linear(config.num_heads * H, D, bias=False)
        self.q_norm = RMSNorm(H, config.rms_norm_eps)
        self.k_norm = RMSNorm(H, config.rms_norm_eps)

    def forward(
        self,
        x_SD: Tensor,
        context_TD: Tensor,
        plan: AttentionPlan,
        kind: LayerKind,
        slot_rope: tuple[Tensor, Tensor],
        context_rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Attention output [S, D] for slot inputs [S, D] over context [T, D]."""
        H = self.head_dim
        q_SNH = apply_rope(self.q_norm(self.q_proj(x_SD).unflatten(-1, (-1, H))), slot_rope)
        k_SMH = apply_rope(self.k_norm(self.k_proj(x_SD).unflatten(-1, (-1, H))), slot_rope)
        v_SMH = self.v_proj(x_SD).unflatten(-1, (-1, H))
        k_TMH = apply_rope(self.k_norm(self.k_proj(context_TD).unflatten(-1, (-1, H))), context_rope)
        v_TMH = self.v_proj(context_TD).unflatten(-1, (-1, H))
        return self.o_proj(plan.attend(q_SNH, k_TMH, v_TMH, k_SMH, v_SMH, kind))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_SD: Tensor) -> Tensor:
        """[S, D] to [S, D]."""
        return self.down_proj(_SwiGLU.apply(self.gate_proj(x_SD), self.up_proj(x_SD)))


class DrafterLayer(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, config: DrafterConfig, kind: LayerKind) -> None:
        super().__init__()
        self.kind = kind
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x_SD: Tensor,
        context_TD: Tensor,
        plan: AttentionPlan,
        slot_rope: tuple[Tensor, Tensor],
        context_rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Slot states [S, D] after this layer."""
        attended_SD = self.self_attn(self.input_layernorm(x_SD), context_TD, plan, self.kind, slot_rope, context_rope)
        x_SD = x_SD + attended_SD
        return x_SD + self.mlp(self.post_attention_layernorm(x_SD))
