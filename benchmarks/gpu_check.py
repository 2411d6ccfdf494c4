"""Check a CUDA machine: does a drafter compute there what it computes on CPU, and what does a training step cost?

  python benchmarks/gpu_check.py                  parity, then a Qwen3-1.7B-like drafter
  python benchmarks/gpu_check.py --parity-only    seconds; a tiny drafter
  python benchmarks/gpu_check.py --draft-vocab 32000 --tokens 16384 --json result.json

Needs only torch, transformers and safetensors (no pipeline environment, no model, no network): copy the checkout
and run. Weights and states are random; shapes, not values, decide time and memory.

Exit codes: 0 done, 1 CUDA and CPU disagree, 2 no CUDA device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also works where the project is not installed

import torch

from benchmarks.synthetic import Size, fused_step_loss, make_step

TINY = Size(
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
)
QWEN3_1_7B = Size(
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=4,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    verifier_vocab_size=151936,
    draft_vocab_size=151936,
    markov_rank=256,
    block_size=7,
    tokens=8192,
    document_tokens=1024,
    anchors=512,
)
TERMS = {"ce": 0.1, "tv": 0.9}
TOLERANCE = 1e-4
"""Largest |CUDA - CPU| of a tensor over its largest |CPU| value, in float32 without TF32."""


def check_parity(device: torch.device) -> dict[str, float]:
    """Relative differences between CPU and `device` of one float32 forward and backward, by tensor name.

    Each is max |other - cpu| / max |cpu|, of the slot states, the loss and every gradient.
    """
    found = {}
    for place in (torch.device("cpu"), device):
        step = make_step(TINY, place, torch.float32)
        loss, output = fused_step_loss(step, TERMS, torch.float32)
        loss.backward()
        tensors = {"hidden": output.hidden_SD, "loss": loss}
        tensors |= {f"grad {name}": value.grad for name, value in step.drafter.trainable_state().items()}
        found[place] = {name: value.detach().double().cpu() for name, value in tensors.items()}
    cpu, other = found[torch.device("cpu")], found[device]
    return {name: float((other[name] - cpu[name]).abs().max() / cpu[name].abs().max()) for name in cpu}


def measure_step(size: Size, device: torch.device, steps: int) -> dict[str, float]:
    """Time `steps` training steps (forward, backward, AdamW) in bfloat16 with float32 masters, after three to warm up.

    Returns:
        `seconds` per step (median), `tokens_per_second` of the packed row, `slots` and, on CUDA, `peak_gib`.
    """
    step = make_step(size, device, torch.bfloat16)
    parameters = list(step.drafter.trainable_state().values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(steps + 3):
        started = time.perf_counter()
        loss, _ = fused_step_loss(step, TERMS, torch.bfloat16)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss became {loss.item()}")
    median = statistics.median(seconds[3:])
    result = {"seconds": median, "tokens_per_second": size.tokens / median, "slots": float(step.weights_S.shape[0])}
    if on_cuda:
        result["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return result


def main(argv: list[str] | None = None) -> int:
    """Run the checks and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parity-only", action="store_true", help="leave out the large drafter")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default 10)")
    parser.add_argument("--tokens", type=int, default=QWEN3_1_7B.tokens, help="tokens per step (default 8192)")
    parser.add_argument("--anchors", type=int, default=QWEN3_1_7B.anchors, help="anchors per step (default 512)")
    parser.add_argument(
        "--draft-vocab", type=int, default=QWEN3_1_7B.draft_vocab_size, help="draft vocabulary (default: all 151936)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(
            f"error: torch {torch.__version__} sees no CUDA device; run this on a GPU machine with a CUDA build of "
            "torch (a build whose version ends in +cpu has none)",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    print(f"torch {torch.__version__}, {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    parity = check_parity(device)
    worst = max(parity, key=lambda name: parity[name])
    agree = parity[worst] <= TOLERANCE
    print(
        f"parity, float32: {len(parity)} tensors, largest difference {parity[worst]:.1e} ({worst}), "
        f"tolerance {TOLERANCE:.0e}: {'ok' if agree else 'FAILED'}"
    )
    result = {"device": properties.name, "torch": torch.__version__, "parity": parity}
    if not arguments.parity_only:
        size = dataclasses.replace(
            QWEN3_1_7B, tokens=arguments.tokens, anchors=arguments.anchors, draft_vocab_size=arguments.draft_vocab
        )
        step = measure_step(size, device, arguments.steps)
        result["step"] = step
        print(
            f"training step, bfloat16, hidden {size.hidden_size}, {size.num_layers} layers, vocabulary "
            f"{size.verifier_vocab_size} ({size.draft_vocab_size} drafted), {size.tokens} tokens, {step['slots']:.0f} "
            f"slots: {step['seconds']:.3f} s, {step['tokens_per_second']:.0f} tokens/s, peak {step['peak_gib']:.1f} GiB"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
