"""Muon whose products run in the dtype of its gradients: torch's own casts them to bfloat16.

On a CPU without bfloat16 instructions that made a step of the embedded recipe 45 s long. Formulas as in torch's: K.
Jordan, https://kellerjordan.github.io/posts/muon/, scaled as in "Muon is scalable for LLM training" (arXiv 2502.16982).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class FullPrecisionMuon(torch.optim.Muon):
    """`torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` without the cast; same options, same state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; `closure` is not supported.

        Raises:
            ValueError: a closure was given.
        """
        if closure is not None:
            raise ValueError("FullPrecisionMuon.step takes no closure: compute the loss before")
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                gradient, state = parameter.grad, self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                momentum: Tensor = state["momentum_buffer"]
                momentum.lerp_(gradient, 1 - group["momentum"])
                update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                update = orthogonalise(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)


def orthogonalise(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz: singular vectors kept, each singular value sent through a s + b s^3 + c s^5, `steps` times."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
