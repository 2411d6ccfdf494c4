"""Answering prompts through the pipeline against vLLM's own offline `LLM.generate`: same prompts, settings and machine.

    python benchmarks/regeneration.py --json result.json

Ours is the whole stage `responses`: HTTP, the server's tokenizer and chat template, the journal on disk, the Parquet
result. Both engines are started first; rounds take turns, each with prompts of its own, and only one side works at a
time. Figures are totals over the rounds; the first round of each side warms it up and does not count.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tasks import responses
from tasks.answer_rows import read_answers
from tasks.answer_servers import answer_spec
from tasks.build import build_artifact
from tasks.jsonl import read_jsonl, write_jsonl
from tasks.pipeline import load_stages, resolve
from tasks.recipe import Recipe
from tasks.recipe_file import DEFAULT_RECIPE, load_recipe
from tasks.server_spec import ServerSpec, engine_name, is_cpu_engine, serve_environment
from tasks.stage import StageContext
from tasks.store import ArtifactStore
from tasks.vllm_server import NOT_INHERITED, ServerPool

OFFLINE = Path(__file__).with_name("offline_generate.py")


@dataclass(frozen=True)
class Round:
    """One side's work on one round's prompts."""

    seconds: float
    tokens: int


class OfflineEngine:
    """`vllm.LLM` in a process of its own, with the arguments of our server."""

    def __init__(self, spec: ServerSpec, log: IO[str]) -> None:
        arguments: dict[str, Any] = {
            "model": str(spec.model), "dtype": spec.dtype, "max_model_len": spec.max_model_len,
            "max_num_seqs": spec.max_num_seqs, "enable_prefix_caching": spec.prefix_caching,
        }  # fmt: skip
        if is_cpu_engine(spec.python):
            arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": int(spec.kv_cache_gib * 2**30)}
        inherited = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
        self._process = subprocess.Popen(
            [str(spec.python), str(OFFLINE), json.dumps(arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=inherited | serve_environment(spec),
        )  # fmt: skip
        self._read()

    def generate(self, prompt_token_ids: list[list[int]], max_tokens: int) -> Round:
        """Answer prompts greedily."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt_token_ids": prompt_token_ids, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        return Round(**self._read())

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the offline engine ended with status {self._process.wait()}: see its log")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def stage_context(
    parents: dict[str, Path], recipe: Recipe, room: Path, prompts: list[dict[str, Any]], pool: ServerPool
) -> StageContext:
    """A room for one round of ours; `parents` names the verifier's folder."""
    asked = room / "prompts"
    for folder in (asked, room / "output", room / "scratch", room / "work"):
        folder.mkdir(parents=True)
    write_jsonl(asked / "train.jsonl", prompts)
    return StageContext(
        recipe=recipe, output=room / "output", scratch=room / "scratch", parents=parents | {"prompts": asked},
        log=logging.getLogger("benchmark"), servers=pool, work=room / "work", fingerprints={}, manifests={},
        keep_states=False,
    )  # fmt: skip


def answer(context: StageContext) -> Round:
    """One round of ours; a server that is not there yet is started first."""
    context.servers.acquire(answer_spec(context))
    started = time.perf_counter()
    counts = responses.build(context)
    return Round(time.perf_counter() - started, int(counts["response_tokens"]))


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    recipe_name: Annotated[str, typer.Option("--recipe", help="Whose verifier and settings.")] = DEFAULT_RECIPE,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="As of the pipeline.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 3,
    prompts_per_round: Annotated[int, typer.Option(min=1)] = 288,
) -> None:
    """Measure ours and vLLM's offline generation in turns."""
    needed = prompts_per_round * (rounds + 1)
    recipe = load_recipe(recipe_name, [*(overrides or []), f"prompts.num_prompts={needed}"])
    store = ArtifactStore()
    with tempfile.TemporaryDirectory(prefix="regeneration-") as folder, ServerPool(Path(folder) / "logs") as pool:
        parents = {}
        for step in list(resolve(recipe, load_stages(("verifier", "prompts"))).values()):
            ref, _ = build_artifact(step, recipe, store, lambda: pool)
            parents[step.stage.name] = store.localise(ref)
        prompts = list(read_jsonl(parents.pop("prompts") / "train.jsonl"))
        found = _measure(recipe, parents, Path(folder), prompts, rounds, prompts_per_round, pool)
    text = json.dumps(found, indent=2)
    print(text)
    if json_file:
        json_file.write_text(text + "\n")


def _measure(
    recipe: Recipe,
    parents: dict[str, Path],
    folder: Path,
    prompts: list[dict[str, Any]],
    rounds: int,
    size: int,
    pool: ServerPool,
) -> dict[str, Any]:
    ours: list[Round] = []
    offline: list[Round] = []
    engine: OfflineEngine | None = None
    log_file = folder / "offline.log"
    with log_file.open("w") as log:
        try:
            for number in range(rounds + 1):
                chosen = prompts[number * size : (number + 1) * size]
                context = stage_context(parents, recipe, folder / f"round-{number}", chosen, pool)
                ours.append(answer(context))
                engine = engine or OfflineEngine(answer_spec(context), log)
                ids = [row.prompt_token_ids for row in read_answers(context.output)]
                offline.append(engine.generate(ids, recipe.responses.max_new_tokens))
                print(f"round {number}: ours {_rate(ours[-1:]):.1f}, offline {_rate(offline[-1:]):.1f} tokens/s")
        except SystemExit:
            print(log_file.read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            if engine is not None:
                engine.close()
    return figures(ours[1:], offline[1:]) | {
        "prompts_per_round": size,
        "max_new_tokens": recipe.responses.max_new_tokens,
        "concurrency": recipe.serving.concurrency,
        "max_num_seqs": recipe.serving.max_num_seqs,
        "engine": engine_name(answer_spec(context).python),
        "dtype": recipe.verifier.dtype,
    }


def figures(ours: list[Round], offline: list[Round]) -> dict[str, Any]:
    """Totals over rounds, and each round."""
    mine, theirs = _rate(ours), _rate(offline)
    return {
        "tokens_per_s_ours": round(mine, 2),
        "tokens_per_s_offline": round(theirs, 2),
        "ratio": round(mine / theirs, 4),
        "rounds": [
            {"ours": round(_rate([one]), 2), "offline": round(_rate([other]), 2), "tokens": [one.tokens, other.tokens]}
            for one, other in zip(ours, offline, strict=True)
        ],
    }


def _rate(rounds: list[Round]) -> float:
    return sum(one.tokens for one in rounds) / sum(one.seconds for one in rounds)


if __name__ == "__main__":
    typer.run(main)
