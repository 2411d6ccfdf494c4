"""Time and memory of a training step: the fused, chunked one against the readable reference.

Both compute the same loss of the same drafter on the same row, forward and backward, in the same dtype:

  fused      attention per document in chunks of anchors; heads, losses and their gradient in chunks of slots
  reference  one dense attention over the whole row, then `losses.slot_losses` on float32 logits of all slots at once

Each measurement is a process of its own, fused and reference in turn, so that peak memory is told apart and a slow
moment of the machine meets both. Only ratios of one run mean anything on another machine.

  python benchmarks/train_step.py                          all sizes, about a minute on two cores
  python benchmarks/train_step.py --size embedded          the embedded recipe alone
  python benchmarks/train_step.py --dtype float32 --json result.json
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also works where the project is not installed

import torch
from torch import Tensor, nn

from benchmarks.synthetic import Size, Step, fused_step_loss, make_step
from dspark_model.layers import Chunk, rope_tables
from dspark_model.losses import needs_verifier_distribution, slot_losses

_EMBEDDED: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_layers": 2,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "verifier_vocab_size": 49152,
    "draft_vocab_size": 8192,
    "markov_rank": 128,
    "block_size": 5,
    "tokens": 2048,
    "document_tokens": 128,
    "anchors": 256,
}
SIZES: dict[str, tuple[Size, dict[str, float]]] = {
    # The embedded recipe as it trains; with the losses that read the verifier; with a vocabulary as Qwen3 has.
    "embedded": (Size(**_EMBEDDED), {"ce": 1.0}),
    "embedded-tv": (Size(**_EMBEDDED), {"ce": 0.1, "tv": 0.9}),
    "vocab-152k": (
        Size(**{**_EMBEDDED, "verifier_vocab_size": 151936, "draft_vocab_size": 32000}),
        {"ce": 0.1, "tv": 0.9},
    ),
}
VARIANTS = ("fused", "reference")
_STATUS, _CLEAR_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def dense_chunk(step: Step) -> Chunk:
    """One attention over all context and all slots: masks [S, T + S] straight from the rule in `dspark_model.masks`."""
    row, anchors_A, K = step.row, step.anchor_pos_A, step.drafter.config.block_size
    anchors_S = anchors_A.repeat_interleave(K)
    position_T = torch.arange(row.input_ids_T.shape[0], device=anchors_A.device)
    same_document_ST = row.document_ids_T[anchors_S][:, None] == row.document_ids_T
    own_block_SS = anchors_S[:, None] == anchors_S
    mask = torch.cat([same_document_ST & (position_T < anchors_S[:, None]), own_block_SS], 1)
    return Chunk(slice(0, anchors_S.shape[0]), slice(0, position_T.shape[0]), {"full": mask})


def reference_step_loss(step: Step, terms: dict[str, float], dtype: torch.dtype) -> Tensor:
    """The same loss, readable: nothing is chunked, every logit is held in float32 and autograd makes the gradient."""
    drafter, config, row, slots = step.drafter, step.drafter.config, step.row, step.slots
    with torch.autocast(row.aux_hidden_TF.device.type, dtype=dtype, enabled=dtype != torch.float32):
        context_TD = drafter.hidden_norm(drafter.fc(row.aux_hidden_TF.to(drafter.fc.weight.dtype)))
        x_SD = nn.functional.embedding(slots.input_ids_AK.flatten(), drafter.embed_tokens).to(context_TD.dtype)
        slot_rope = rope_tables(slots.position_ids_AK.flatten(), config.head_dim, config.rope_theta)
        context_rope = rope_tables(row.position_ids_T, config.head_dim, config.rope_theta)
        for layer in drafter.layers:
            x_SD = layer(x_SD, context_TD, [dense_chunk(step)], slot_rope, context_rope)
        markov = drafter.markov_head
        markov_SR = markov.embed(slots.prev_token_ids_AK.flatten()) if markov else None
        logits_SW = drafter.logits(drafter.norm(x_SD), markov_SR)
    p_SW = None
    if needs_verifier_distribution(terms):
        with torch.no_grad():
            p_SW = step.verifier.logits(step.last_hidden_SD).softmax(-1)[:, drafter.verifier_ids_W]
    losses_S = slot_losses(logits_SW, step.draft_targets_S, terms, p_SW)
    return (losses_S * step.weights_S).sum()


def measure(variant: str, size: Size, terms: dict[str, float], dtype: torch.dtype, steps: int) -> dict[str, float]:
    """Run one warm-up step and `steps` timed ones in this process.

    Returns:
        `seconds` per step (median), `peak_mib` above what the process held before the first step, and `loss`.
    """
    step = make_step(size, torch.device("cpu"), dtype)
    _reset_peak()
    before, seconds, loss = _peak_mib(), [], torch.zeros(())
    for _ in range(steps + 1):
        step.drafter.zero_grad(set_to_none=True)
        started = time.perf_counter()
        if variant == "fused":
            loss, _ = fused_step_loss(step, terms, dtype)
        else:
            loss = reference_step_loss(step, terms, dtype)
        loss.backward()
        seconds.append(time.perf_counter() - started)
    peak_mib = max(1.0, _peak_mib() - before)  # 1 MiB is what can be told apart
    return {"seconds": statistics.median(seconds[1:]), "peak_mib": peak_mib, "loss": loss.item()}


def compare(name: str, dtype: str, steps: int, rounds: int) -> dict[str, Any]:
    """Measure both variants of a size in turn, each in a process of its own."""
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for _ in range(rounds):
        for variant in VARIANTS:
            command = [sys.executable, __file__, "--size", name, "--dtype", dtype, "--steps", str(steps)]
            output = subprocess.run([*command, "--measure", variant], check=True, stdout=subprocess.PIPE, text=True)
            found[variant].append(json.loads(output.stdout))
    result: dict[str, Any] = {"size": name, "dtype": dtype, "terms": SIZES[name][1]}
    for variant, runs in found.items():
        result[variant] = {
            "seconds": statistics.median(run["seconds"] for run in runs),
            "peak_mib": statistics.median(run["peak_mib"] for run in runs),
            "loss": runs[0]["loss"],
        }
    fused, reference = result["fused"], result["reference"]
    result["speedup"] = reference["seconds"] / fused["seconds"]
    result["memory_ratio"] = reference["peak_mib"] / fused["peak_mib"]
    return result


def table(results: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| size | loss | s/step fused | s/step reference | speedup | MiB fused | MiB reference | memory ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        terms = " + ".join(f"{weight:g} {term}" for term, weight in result["terms"].items())
        fused, reference = result["fused"], result["reference"]
        lines.append(
            f"| {result['size']} | {terms} | {fused['seconds']:.3f} | {reference['seconds']:.3f} | "
            f"{result['speedup']:.2f}x | {fused['peak_mib']:.0f} | {reference['peak_mib']:.0f} | "
            f"{result['memory_ratio']:.1f}x |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure the chosen sizes and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, action="append", help="default: all; may be repeated")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="compute dtype of both (default bfloat16)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps per process, after one warm-up (default 3)")
    parser.add_argument("--rounds", type=int, default=2, help="processes per variant; medians are shown (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument("--measure", choices=VARIANTS, help="measure one variant in this process and print JSON")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1 or arguments.rounds < 1:
        parser.error("--steps and --rounds must be at least 1")
    names = arguments.size or list(SIZES)
    if arguments.measure:
        size, terms = SIZES[names[0]]
        print(json.dumps(measure(arguments.measure, size, terms, DTYPES[arguments.dtype], arguments.steps)))
        return 0
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, {arguments.dtype}\n")
    results = [compare(name, arguments.dtype, arguments.steps, arguments.rounds) for name in names]
    print(table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def _reset_peak() -> None:
    """Forget the peak so far: building random weights needs more memory than holding them."""
    if _CLEAR_PEAK.exists():
        _CLEAR_PEAK.write_text("5")


def _peak_mib() -> float:
    """Peak resident memory of this process since the last reset; since its start where there is no /proc."""
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    raise SystemExit(main())
