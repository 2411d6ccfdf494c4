"""One side of `train_step.py`: a training step of ours or of speculators, timed in a process of its own.

Not meant to be called by hand. Prints one line of JSON: `seconds` of each timed step, `peak_bytes` of the process over
all steps (weights, gradients and optimiser state included), the `loss` of the first step; or `out_of_memory`.
Shape letters: T row tokens, A anchors.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the peer's interpreter has only its own packages

import torch
from torch import Tensor

from benchmarks.peak_memory import peak_bytes, reset_peak
from benchmarks.sizes import SIZES, at
from benchmarks.synthetic import GAMMA, Step, make_step
from dspark_model.host_memory import return_freed_tensors
from dspark_model.precision import Dtype, compute_dtype
from dspark_model.verifier_targets import log_normalisers

TERMS = {"ce": 0.1, "tv": 0.9}
"""The paper's losses; the confidence head is trained beside them with weight 1."""
MAX_GRAD_NORM = 1.0
CPU = torch.device("cpu")

Losses = Callable[[], Tensor]


def ours(step: Step) -> tuple[torch.nn.Module, Losses]:
    """What `python -m dspark_model.train` runs."""
    return_freed_tensors()
    if step.drafter.config.reduced_vocab:
        step = step.with_normalisers()
    criterion = step.criterion()

    def loss() -> Tensor:
        found = criterion(step.row, step.anchors_A)
        return found.loss + found.confidence

    return step.drafter, loss


def speculators(step: Step) -> tuple[torch.nn.Module, Losses]:
    """Its training forward in the best setting for a CPU: sdpa attention, eager losses, bfloat16 autocast if native.

    Its fused losses need Triton, its flex attention has no backward on CPU. Anchors are given, not drawn.
    """
    import speculators.models.dflash.core as backbone
    from speculators.models.dspark import DSparkDraftModel

    from benchmarks.speculators_peer import peer_of

    peer = peer_of(step.drafter, step.verifier.norm_D)
    anchors_A, row, dtype = step.anchors_A, step.row, step.dtype
    valid_A = torch.ones_like(anchors_A, dtype=torch.bool)
    backbone.select_anchors = lambda *_: (anchors_A, valid_A)
    kwargs, _ = DSparkDraftModel.get_trainer_kwargs(
        loss_fn=json.dumps(TERMS),
        loss_implementation="eager",
        max_anchors=anchors_A.shape[0],
        dflash_decay_gamma=GAMMA,
        confidence_head_alpha=1.0,
    )

    def loss() -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            _, total, _ = peer(
                hidden_states=row.aux_hidden_TF[None].to(dtype),
                input_ids=row.input_ids_T[None],
                loss_mask=row.loss_mask_T.long()[None],
                verifier_last_hidden_states=row.last_hidden_TD[None].to(dtype),
                document_ids=row.document_ids_T[None],
                position_ids=row.position_ids_T[None],
                **kwargs,
            )
        return total

    return peer, loss


SIDES = {"ours": ours, "speculators": speculators}


def measure(side: str, step: Step, min_seconds: float, min_steps: int) -> dict[str, Any]:
    """Forward, backward, clipping and AdamW: one step to warm up, then as many as asked for."""
    model, losses = SIDES[side](step)
    del step
    parameters = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    reset_peak()
    seconds: list[float] = []
    found = []
    while len(seconds) < min_steps + 1 or sum(seconds[1:]) < min_seconds:
        started = time.perf_counter()
        loss = losses()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - started)
        found.append(loss.item())
    return {"seconds": seconds[1:], "peak_bytes": peak_bytes(), "loss": found[0]}


def normalisers(step: Step) -> dict[str, Any]:
    """The verifier's full-vocabulary log-normaliser of every token of the row, which the first epoch pays once."""
    started = time.perf_counter()
    log_normalisers(step.verifier, step.row.last_hidden_TD, step.dtype)
    return {"seconds": [time.perf_counter() - started]}


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=[*SIDES, "normalisers"])
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--vocab", type=int, required=True, help="draft vocabulary")
    parser.add_argument("--anchors", type=int, required=True)
    parser.add_argument("--dtype", choices=get_args(Dtype), default="auto")
    parser.add_argument("--min-seconds", type=float, default=0.0)
    parser.add_argument("--min-steps", type=int, default=1)
    arguments = parser.parse_args(argv)
    try:
        size, dtype = at(arguments.size, arguments.vocab, arguments.anchors), compute_dtype(arguments.dtype, CPU)
        step = make_step(size, CPU, dtype, TERMS)
        if arguments.side == "normalisers":
            result = normalisers(step)
        else:
            result = measure(arguments.side, step, arguments.min_seconds, arguments.min_steps)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        result = {"out_of_memory": True}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
