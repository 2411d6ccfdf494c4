"""How the verifier samples: every value is sent, so that no server's own defaults enter.

vLLM fills what a request leaves out from the model's generation_config.json (`--generation-config auto`), greedy
requests included: a repetition penalty there would change which token is the most likely one.
Source: https://docs.vllm.ai/en/latest/configuration/engine_args.html (generation-config).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.recipe import RecipeError
from tasks.recipe_data import ResponsesSection

# What "off" is for each value: https://docs.vllm.ai/en/latest/api/vllm/sampling_params.html
OFF: Mapping[str, float | int] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class Sampling:
    """Temperature, and the values that go with it by OpenAI/vLLM name."""

    temperature: float
    extra: Mapping[str, float | int] = field(default_factory=lambda: dict(OFF))

    @property
    def is_greedy(self) -> bool:
        """Whether the answer is the most likely token each time."""
        return self.temperature == 0.0


GREEDY = Sampling(0.0)


def sampling_of(responses: ResponsesSection, verifier: Path) -> Sampling:
    """The recipe's sampling; `temperature: model` reads the verifier's generation_config.json.

    Raises:
        RecipeError: `model`, and that file is absent or says nothing about sampling.
    """
    own = {name: value for name in ("top_p", "top_k") if (value := getattr(responses, name)) is not None}
    if responses.temperature != "model":
        return Sampling(responses.temperature, {**OFF, **own})
    path = verifier / "generation_config.json"
    config: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if not config.get("do_sample") and config.get("temperature") is None:
        raise RecipeError(
            "responses.temperature='model', but the verifier's generation_config.json "
            f"{'does not say how to sample' if config else 'does not exist'}: give a number, such as 0 or 0.7"
        )
    given = {name: config[name] for name in OFF if config.get(name) is not None}
    # transformers' default where sampling is on and no temperature is given.
    temperature = config.get("temperature")
    return Sampling(1.0 if temperature is None else float(temperature), {**OFF, **given, **own})


def request_seed(seed: int, conversation: str, turn: int) -> int:
    """Seed of one answer: a function of what is asked, so that order and restarts do not matter."""
    digest = hashlib.sha256(f"{seed}:{conversation}:{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
