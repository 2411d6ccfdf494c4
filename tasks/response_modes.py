"""Ways of answering (thinking on or off, reasoning efforts), one per conversation, drawn by weight."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from tasks.recipe_data import ResponseMode

DEFAULT = ResponseMode(name="default")
_PROBE = [{"role": "user", "content": "Hello."}]


def choose_mode(modes: Sequence[ResponseMode], seed: int, conversation: str) -> ResponseMode:
    """The mode of a conversation: a function of its id, whatever else is asked."""
    if not modes:
        return DEFAULT
    digest = hashlib.sha256(f"{seed}:mode:{conversation}".encode()).digest()
    point = int.from_bytes(digest[:8], "big") / 2**64 * sum(mode.weight for mode in modes)
    limits = accumulate(mode.weight for mode in modes)
    return next((mode for mode, limit in zip(modes, limits, strict=True) if point < limit), modes[-1])


def mode_fields(mode: ResponseMode) -> dict[str, Any]:
    """Fields of a chat request that ask for the mode."""
    fields: dict[str, Any] = {}
    if mode.chat_template_kwargs:
        fields["chat_template_kwargs"] = dict(mode.chat_template_kwargs)
    if mode.reasoning_effort is not None:
        fields["reasoning_effort"] = mode.reasoning_effort
    return fields


def ignored_modes(modes: Sequence[ResponseMode], tokenizer: Any) -> list[str]:
    """Names of modes with an argument that makes no difference to the verifier's chat template.

    A value may be the template's default: an argument is known when any mode's value of it makes a difference.
    """

    def rendered(arguments: Mapping[str, Any]) -> str:
        text: str = tokenizer.apply_chat_template(_PROBE, tokenize=False, add_generation_prompt=True, **arguments)
        return text

    def arguments_of(mode: ResponseMode) -> dict[str, dict[str, Any]]:
        """Argument -> what the template is told for it alone."""
        found: dict[str, dict[str, Any]] = {name: {name: value} for name, value in mode.chat_template_kwargs.items()}
        if mode.reasoning_effort is not None:
            found["reasoning_effort"] = {"reasoning_effort": mode.reasoning_effort, **_thinking(mode)}
        return found

    plain = rendered({})
    told = {mode.name: arguments_of(mode) for mode in modes}
    known = {name for given in told.values() for name, alone in given.items() if rendered(alone) != plain}
    return [mode for mode, given in told.items() if not given.keys() <= known]


def _thinking(mode: ResponseMode) -> dict[str, Any]:
    """What vLLM adds to a reasoning effort (ChatCompletionRequest.build_chat_params), for templates without efforts."""
    return {} if "enable_thinking" in mode.chat_template_kwargs else {"enable_thinking": True}
