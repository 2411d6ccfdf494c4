"""Check a GPU machine: does a training step compute there what the readable losses do, and what does it cost?

  python benchmarks/gpu_check.py                          all checks, then steps of a drafter for Qwen3-8B
  python benchmarks/gpu_check.py --size qwen3-0.6b        a smaller drafter
  python benchmarks/gpu_check.py --device cpu --small     the same code on any machine, in half a minute
  python benchmarks/gpu_check.py --json result.json

Needs only torch, transformers and safetensors (no pipeline environment, no model, no network): copy the checkout and
run. Weights and states are random; shapes, not values, decide time and memory. MFU is against the data sheet's dense
bfloat16 peak where the GPU is listed; "of a product" is against one large matrix product measured on this machine.

Exit codes: 0 done, 1 a check failed, 2 the device is not there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also works where the project is not installed

import torch
from torch import Tensor

from benchmarks.flops import peak_tflops, product_tflops, step_flops
from benchmarks.peak_memory import peak_bytes, reset_peak
from benchmarks.sizes import SIZES, at
from benchmarks.synthetic import Step, make_step, reference_loss_of, unfused_loss_of
from benchmarks.timing import seconds_of
from dspark_model.losses import LOSS_TERMS
from dspark_model.precision import compute_dtype
from dspark_model.strip_loss import strip_loss
from dspark_model.verifier_targets import log_normalisers

CPU = torch.device("cpu")
PAPER_TERMS = {"ce": 0.1, "tv": 0.9}
ALL_TERMS = {name: 0.2 + 0.1 * i for i, name in enumerate(LOSS_TERMS)}
FLOAT32_LIMIT, BFLOAT16_LIMIT = 1e-3, 5e-2
"""Largest norm of a difference over the norm of what it differs from, of the loss and of every gradient.

Rounding is 1e-6 in float32. But the gradient of tv jumps where p = q, so that an entry where they are equal but for
rounding falls either way: with a vocabulary of 1000 one such entry shows as 4e-4.
"""


@dataclass(frozen=True)
class Check:
    """Two computations of the same tensors."""

    name: str
    difference: float
    """Largest |a - b| / |b| (norms) over the loss and all gradients."""
    worst: str
    limit: float

    @property
    def passed(self) -> bool:
        """Within the limit."""
        return self.difference <= self.limit


Tensors = dict[str, Tensor]


def loss_and_gradients(step: Step, loss_of: Callable[[Step], Tensor]) -> Tensors:
    """On CPU in float64, by parameter name; what the loss does not reach is left out."""
    step.drafter.zero_grad(set_to_none=True)
    loss = loss_of(step)
    loss.backward()
    found = {name: value.grad for name, value in step.drafter.trainable_state().items() if value.grad is not None}
    return {name: value.detach().double().cpu() for name, value in {"loss": loss, **found}.items()}


def compare(name: str, limit: float, found: Tensors, expected: Tensors) -> Check:
    """Whether both have the same tensors up to the limit."""
    if found.keys() != expected.keys():
        return Check(name, float("inf"), f"only in one: {sorted(found.keys() ^ expected.keys())}", limit)
    differences = {key: float((found[key] - expected[key]).norm() / expected[key].norm()) for key in found}
    worst = max(differences, key=lambda key: differences[key])
    return Check(name, differences[worst], worst, limit)


def fused_loss_of(step: Step) -> Tensor:
    """The trainer's loss without the confidence head's."""
    return step.criterion()(step.row, step.anchors_A).loss


def checks(device: torch.device) -> Iterator[Check]:
    """Fused against readable, device against CPU, bfloat16 against float32, compiled against eager; a tiny drafter."""
    tiny = SIZES["tiny"]
    for kind, vocab in product(("full", "sliding"), (tiny.verifier_vocab_size, tiny.draft_vocab_size)):
        size = dataclasses.replace(tiny, layer_kind=kind, draft_vocab_size=vocab)
        name = f"{kind} layers, {'whole' if vocab == tiny.verifier_vocab_size else 'reduced'} vocabulary"
        step = make_step(size, device, torch.float32, ALL_TERMS).with_normalisers()
        fused, reference = loss_and_gradients(step, fused_loss_of), loss_and_gradients(step, reference_loss_of)
        yield compare(f"fused = readable, float32, {name}", FLOAT32_LIMIT, fused, reference)
        if device != CPU:
            elsewhere = loss_and_gradients(
                make_step(size, CPU, torch.float32, ALL_TERMS).with_normalisers(), fused_loss_of
            )
            yield compare(f"{device.type} = cpu, float32, {name}", FLOAT32_LIMIT, fused, elsewhere)
        low = make_step(size, device, torch.bfloat16, PAPER_TERMS).with_normalisers()
        yield compare(
            f"bfloat16 = float32, {name}",
            BFLOAT16_LIMIT,
            loss_and_gradients(low, fused_loss_of),
            loss_and_gradients(low, reference_loss_of),
        )
        yield _compiled_check(name, step)


def _compiled_check(name: str, step: Step) -> Check:
    """The inside of the fused loss, compiled by inductor, as CUDA always runs it."""
    import dspark_model.fused_loss as fused

    expected = loss_and_gradients(step, reference_loss_of)
    original, compiled = fused._strip_function, torch.compile(strip_loss)
    fused._strip_function = lambda _: compiled  # type: ignore[assignment]
    try:
        return compare(f"compiled = readable, {name}", FLOAT32_LIMIT, loss_and_gradients(step, fused_loss_of), expected)
    finally:
        fused._strip_function = original


def measure(step: Step, loss_of: Callable[[Step], Tensor], device: torch.device, times: int) -> dict[str, Any]:
    """Median seconds and peak bytes of whole steps with AdamW; `out_of_memory` where it does not fit."""
    parameters = list(step.drafter.trainable_state().values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def train() -> None:
        loss = loss_of(step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss became {loss.item()}")

    _forget_peak(device)
    try:
        seconds = sorted(seconds_of(train, device, times=times, warm_up=2))[times // 2]
    except torch.OutOfMemoryError:
        return {"out_of_memory": True}
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_bytes()
    return {"seconds": seconds, "tokens_per_s": step.row.input_ids_T.shape[0] / seconds, "peak_bytes": peak}


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    else:
        reset_peak()


def step_rows(name: str, device: torch.device, small: bool, times: int) -> Iterator[dict[str, Any]]:
    """Steps by vocabulary and anchors: fused, then with the readable losses on the same forward."""
    size, dtype = SIZES[name], compute_dtype("auto", device)
    side = 512 if small else 8192 if device.type == "cuda" else 2048
    achieved = product_tflops(device, dtype, side)
    sheet = peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    for vocab, anchors in product((size.draft_vocab_size, size.verifier_vocab_size), (size.anchors // 2, size.anchors)):
        step = make_step(at(name, vocab, anchors), device, dtype, PAPER_TERMS)
        normalise = partial(log_normalisers, step.verifier, step.row.last_hidden_TD, dtype)
        normalising = seconds_of(normalise, device, times=1)
        step = step.with_normalisers()
        states = step.drafter.slots(step.row, step.anchors_A).state_index_AK.unique().numel()
        fused = measure(step, _with_confidence, device, times)
        unfused = measure(step, unfused_loss_of, device, max(1, times // 4))
        row = {"vocab": vocab, "anchors": anchors, "normaliser_tokens_per_s": size.tokens / normalising[0], **fused}
        row["unfused_seconds"], row["unfused_peak_bytes"] = unfused.get("seconds"), unfused.get("peak_bytes")
        if "seconds" in fused:
            row["tflops"] = step_flops(at(name, vocab, anchors), states) / fused["seconds"] / 1e12
            row["share_of_product"] = row["tflops"] / achieved
            row["mfu"] = row["tflops"] / sheet if sheet else None
        yield row


def _with_confidence(step: Step) -> Tensor:
    found = step.criterion()(step.row, step.anchors_A)
    return found.loss + found.confidence


def show_steps(rows: list[dict[str, Any]]) -> str:
    """A Markdown table."""
    lines = [
        "| draft vocabulary | anchors | s/step | tokens/s | peak GB | TFLOP/s | MFU | of a product | "
        "unfused s | unfused GB | normalisers tokens/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        start = f"| {row['vocab']:,} | {row['anchors']} |"
        if "seconds" not in row:
            lines.append(f"{start} out of memory | | | | | | | | |")
            continue
        mfu = f"{row['mfu']:.1%}" if row["mfu"] else "peak not listed"
        unfused = "out of memory | -"
        if row["unfused_seconds"]:
            unfused = f"{row['unfused_seconds']:.3f} | {row['unfused_peak_bytes'] / 1e9:.2f}"
        lines.append(
            f"{start} {row['seconds']:.3f} | {row['tokens_per_s']:,.0f} | {row['peak_bytes'] / 1e9:.2f} | "
            f"{row['tflops']:.2f} | {mfu} | {row['share_of_product']:.0%} | {unfused} | "
            f"{row['normaliser_tokens_per_s']:,.0f} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the checks, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default cuda")
    parser.add_argument("--small", action="store_true", help="measure a tiny drafter only")
    parser.add_argument("--size", choices=SIZES, default="qwen3-8b", help="drafter that is measured (default qwen3-8b)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(
            f"error: torch {torch.__version__} sees no CUDA device; run this on a GPU machine with a CUDA build of "
            "torch (a build whose version ends in +cpu has none), or try the code with --device cpu --small",
            file=sys.stderr,
        )
        return 2
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.cpu.get_capabilities()["cpu_name"]
    size = "tiny" if arguments.small else arguments.size
    print(f"torch {torch.__version__}, {name}, {compute_dtype('auto', device)}, drafter {size}\n")
    print("| check | difference | limit | |\n|---|---|---|---|")
    found = []
    for check in checks(device):
        found.append(check)
        verdict = "ok" if check.passed else f"FAILED ({check.worst})"
        print(f"| {check.name} | {check.difference:.1e} | {check.limit:.0e} | {verdict} |", flush=True)
    rows = list(step_rows(size, device, arguments.small, arguments.steps))
    print("\n" + show_steps(rows))
    if arguments.json:
        result = {"device": name, "torch": torch.__version__, "checks": [vars(check) for check in found], "steps": rows}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(check.passed for check in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
