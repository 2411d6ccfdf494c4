"""Tokens per second and peak memory of one training step: ours against the trainer of speculators.

One step is forward, backward, gradient clipping and AdamW of a drafter for a verifier like Qwen3-0.6B (hidden 1024,
3 layers, blocks of 8) on one packed row of 4096 tokens in 4 documents, with float32 masters and products in bfloat16
(float32 on CPUs that do not multiply bfloat16 natively). Both sides have the same weights, row, anchors and losses;
`loss_difference` shows it. speculators runs in its best setting for a CPU. Each measurement is a process of its own,
the sides in turn, so that memory is told apart and a slow moment of the machine meets both. Only ratios of one run mean
anything on another machine.

  python benchmarks/train_step.py --json result.json     all sizes, at most 15 minutes on two cores
  python benchmarks/train_step.py --vocab 32000 --anchors 128 --rounds 1
  python benchmarks/train_step.py --size tiny            seconds; shows that both sides run

speculators is looked for in this interpreter, then in .venv-peer, which is made (`make peer-env`) if it is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also works where the project is not installed

import torch

from benchmarks.sizes import SIZES
from dspark_model.precision import Dtype, compute_dtype

REPOSITORY = Path(__file__).resolve().parent.parent
SIDE = Path(__file__).with_name("train_side.py")
PEER_PYTHON = REPOSITORY / ".venv-peer" / "bin" / "python"
DEFAULT_SIZE = "qwen3-0.6b"
VOCABULARIES, ANCHORS = (32000, 151936), (128, 256)
MIN_SECONDS = 6.0
"""Timed steps of a process go on for so long, and are at least one."""


class SideError(RuntimeError):
    """A measurement that failed, or a peer that cannot be had."""


def peer_python() -> Path:
    """An interpreter that has speculators.

    Raises:
        SideError: there is none and none could be made.
    """
    if importlib.util.find_spec("speculators"):
        return Path(sys.executable)
    if not PEER_PYTHON.is_file():
        print("==> making .venv-peer with speculators (make peer-env)", file=sys.stderr)
        if subprocess.run(["make", "-C", str(REPOSITORY), "peer-env"], stdout=sys.stderr, check=False).returncode:
            raise SideError(
                "speculators is not installed here and .venv-peer could not be made: run `make peer-env` where a "
                "package index can be reached, or measure our side alone with --only ours"
            )
    return PEER_PYTHON


def run_side(python: Path, side: str, arguments: argparse.Namespace, vocab: int, anchors: int) -> dict[str, Any]:
    """One process's measurement; `{"out_of_memory": True}` where it had too little.

    Raises:
        SideError: it failed otherwise; its own output has been shown.
    """
    command = [str(python), str(SIDE), side, "--size", arguments.size, "--vocab", str(vocab), "--anchors", str(anchors)]
    command += ["--dtype", arguments.dtype, "--min-seconds", str(arguments.min_seconds)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=_first_to_be_killed, check=False
    )
    if done.returncode in {-9, 137}:  # the kernel took the memory back
        return {"out_of_memory": True}
    if done.returncode:
        raise SideError(f"{side} ended with {done.returncode}: {' '.join(command)}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _first_to_be_killed() -> None:
    """If memory runs out, it is this process that Linux stops, not the one that asked for it."""
    score = Path("/proc/self/oom_score_adj")
    if score.exists():
        score.write_text("1000")


class Row:
    """Measurements of both sides at one size."""

    def __init__(self, python: dict[str, Path], arguments: argparse.Namespace, vocab: int, anchors: int) -> None:
        self._python, self._arguments, self._vocab, self._anchors = python, arguments, vocab, anchors
        self._fitting = dict.fromkeys(python, anchors)
        self._runs: dict[str, list[dict[str, Any]]] = {side: [] for side in python}
        self.seconds = 0.0
        """The last round took so long, processes and random weights included."""

    def measure(self) -> None:
        """One process of each side; the peer at half the anchors as often as its memory demands.

        Raises:
            SideError: a side failed, or has too little memory whatever the anchors.
        """
        started = time.monotonic()
        for side in self._python:
            result = self._run(side)
            while result.get("out_of_memory") and side == "speculators" and self._fitting[side] > 1:
                self._fitting[side] //= 2
                print(f"speculators ran out of memory: trying {self._fitting[side]} anchors", file=sys.stderr)
                result = self._run(side)
            if result.get("out_of_memory"):
                raise SideError(f"{side} ran out of memory at vocabulary {self._vocab}, {self._fitting[side]} anchors")
            self._runs[side].append(result)
        self.seconds = time.monotonic() - started

    def _run(self, side: str) -> dict[str, Any]:
        return run_side(self._python[side], side, self._arguments, self._vocab, self._fitting[side])

    def summary(self) -> dict[str, Any]:
        """The row of the JSON."""
        tokens, peer_anchors = SIZES[self._arguments.size].tokens, self._fitting.get("speculators")
        return summarise(self._runs, tokens, self._vocab, self._anchors, peer_anchors)


def measure_rows(
    python: dict[str, Path], arguments: argparse.Namespace, sizes: Sequence[tuple[int, int]]
) -> list[dict[str, Any]]:
    """All sizes in turn, `rounds` times; each once, then again as long as it is expected to end within the budget."""
    started, rows = time.monotonic(), [Row(python, arguments, *size) for size in sizes]
    for number in range(arguments.rounds):
        for row in rows:
            spent = time.monotonic() - started
            if number and spent + row.seconds > 60 * arguments.budget_minutes:
                continue
            row.measure()
            print(table([row.summary()]).splitlines()[2], file=sys.stderr)
    return [row.summary() for row in rows]


def summarise(
    runs: dict[str, list[dict[str, Any]]], tokens: int, vocab: int, anchors: int, peer_anchors: int | None
) -> dict[str, Any]:
    """One row: medians over all timed steps, peaks of the largest process."""
    row: dict[str, Any] = {"vocab": vocab, "anchors": anchors, "rounds": min(len(found) for found in runs.values())}
    for side, results in runs.items():
        row[f"seconds_{side}"] = [seconds for result in results for seconds in result["seconds"]]
        row[f"tokens_per_s_{side}"] = tokens / statistics.median(row[f"seconds_{side}"])
        row[f"peak_bytes_{side}"] = max(result["peak_bytes"] for result in results)
        row[f"loss_{side}"] = results[0]["loss"]
    if len(runs) < 2:
        return row
    row["speed_ratio"] = row["tokens_per_s_ours"] / row["tokens_per_s_speculators"]
    row["memory_ratio"] = row["peak_bytes_speculators"] / row["peak_bytes_ours"]
    row["loss_difference"] = row["loss_ours"] - row["loss_speculators"]
    if peer_anchors != anchors:
        row["note"] = (
            f"speculators ran out of memory at {anchors} anchors and was measured with {peer_anchors}: the ratios "
            "compare its smaller step with our whole one, the losses are of different slots"
        )
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| vocabulary | anchors | tokens/s ours | speculators | ratio | peak GB ours | speculators | ratio | loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours = f"| {row['vocab']:,} | {row['anchors']} | {row['tokens_per_s_ours']:,.0f} |"
        if "speed_ratio" not in row:
            lines.append(f"{ours} - | - | {row['peak_bytes_ours'] / 1e9:.2f} | - | - | {row['loss_ours']:.4f} |")
            continue
        lines.append(
            f"{ours} {row['tokens_per_s_speculators']:,.0f} | {row['speed_ratio']:.2f}x | "
            f"{row['peak_bytes_ours'] / 1e9:.2f} | {row['peak_bytes_speculators'] / 1e9:.2f} | "
            f"{row['memory_ratio']:.2f}x | {row['loss_ours']:.4f} ({row['loss_difference']:+.4f}) |"
        )
    return "\n".join([*lines, *(f"\n{row['note']}" for row in rows if "note" in row)])


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default=DEFAULT_SIZE, help=f"shapes (default {DEFAULT_SIZE})")
    parser.add_argument("--vocab", type=int, action="append", help="draft vocabulary; default 32000 and 151936")
    parser.add_argument("--anchors", type=int, action="append", help="blocks per row; default 128 and 256")
    parser.add_argument(
        "--dtype", choices=get_args(Dtype), default="auto", help="of products; auto: bfloat16 where it is native"
    )
    parser.add_argument("--rounds", type=int, default=2, help="processes per side and size (default 2)")
    parser.add_argument(
        "--budget-minutes", type=float, default=12.0, help="no second round that would end later (default 12)"
    )
    parser.add_argument("--min-seconds", type=float, default=MIN_SECONDS, help="of timed steps per process (default 6)")
    parser.add_argument("--only", choices=("ours", "speculators"), help="measure one side alone, without ratios")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    arguments = parser.parse_args(argv)
    tiny = SIZES[arguments.size]
    if arguments.size != DEFAULT_SIZE:
        arguments.vocab = arguments.vocab or [tiny.draft_vocab_size, tiny.verifier_vocab_size]
        arguments.anchors = arguments.anchors or [tiny.anchors]
    arguments.vocab, arguments.anchors = arguments.vocab or VOCABULARIES, arguments.anchors or ANCHORS
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds} must be at least 1")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table and write the JSON."""
    arguments = parse(argv)
    sides = [arguments.only] if arguments.only else ["ours", "speculators"]
    try:
        python = {side: Path(sys.executable) if side == "ours" else peer_python() for side in sides}
        rows = measure_rows(python, arguments, list(product(arguments.vocab, arguments.anchors)))
        result: dict[str, Any] = {"size": arguments.size, "tokens": SIZES[arguments.size].tokens, "rows": rows}
        if min(arguments.vocab) < SIZES[arguments.size].verifier_vocab_size and "ours" in sides:
            (seconds,) = run_side(python["ours"], "normalisers", arguments, min(arguments.vocab), 1)["seconds"]
            result["normalisers"] = {"seconds": seconds, "tokens_per_s": result["tokens"] / seconds}
    except SideError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    result |= {
        "dtype": str(compute_dtype(arguments.dtype, torch.device("cpu"))).removeprefix("torch."),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": torch.cpu.get_capabilities().get("cpu_name", platform.machine()),
    }
    print(table(rows))
    if "normalisers" in result:
        print(
            f"\nThe verifier's normalisers, once per token of a run with a reduced vocabulary: "
            f"{result['normalisers']['tokens_per_s']:,.0f} tokens/s in the first epoch, then kept."
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
