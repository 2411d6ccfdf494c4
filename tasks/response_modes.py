"""Ways of answering (thinking on or off, reasoning efforts), one per conversation, drawn by weight."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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
    """Names of modes that ask the verifier's chat template for something it does not know."""

    def rendered(mode: ResponseMode) -> str:
        arguments = {**mode.chat_template_kwargs}
        if mode.reasoning_effort is not None:
            arguments["reasoning_effort"] = mode.reasoning_effort
        text: str = tokenizer.apply_chat_template(_PROBE, tokenize=False, add_generation_prompt=True, **arguments)
        return text

    plain = rendered(DEFAULT)
    asking = [mode for mode in modes if mode_fields(mode)]
    # The template's default may be one of the modes: only when none of them differs is the argument unknown.
    texts = {mode.name: rendered(mode) for mode in asking}
    return [] if any(text != plain for text in texts.values()) else list(texts)
