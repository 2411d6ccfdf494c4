"""One request to an OpenAI-compatible vLLM server, and its answer in exact token ids."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tasks.server_spec import ServingError

if TYPE_CHECKING:
    import httpx

# Longest pause that a server may ask for.
RETRY_AFTER_SECONDS = 60.0


class Server(Protocol):
    """Where requests go: a server of ours, or one by URL."""

    @property
    def url(self) -> str:
        """Without a path."""

    @property
    def model_name(self) -> str:
        """As requests name it."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Of every request."""

    @property
    def request_timeout_seconds(self) -> float:
        """For a whole answer."""

    def check_alive(self) -> None:
        """Raise ServerDied when the server is known to have ended."""


class RequestRefused(ServingError):  # noqa: N818 - reads as what happened
    """The server answered with an error status; `retry_after` is in seconds, where it named any."""

    def __init__(self, status: int, reason: str, retry_after: float | None = None) -> None:
        self.status, self.retry_after = status, retry_after
        super().__init__(f"the server answered {status}: {reason}")


class BrokenAnswer(ServingError):  # noqa: N818
    """An answer that was cut short on the way; asking again may help."""


@dataclass(frozen=True)
class Request:
    """One question: chat `messages`, or `prompt_token_ids` to be continued as they are.

    Attributes:
        id: for callbacks and messages.
        messages: OpenAI chat messages.
        prompt_token_ids: instead of messages.
        max_tokens: length limit of the answer.
        temperature: 0 is greedy.
        seed: of sampling.
        with_states: ask an extracting server for hidden states.
        ignore_eos: go on to max_tokens.
        tools: OpenAI tools that the verifier may call.
        extra: further fields of the body, such as top_p or chat_template_kwargs.
    """

    id: str
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None
    with_states: bool = False
    ignore_eos: bool = False
    tools: list[dict[str, Any]] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.prompt_token_ids is None):
            raise ValueError(f"request {self.id!r}: give either messages or prompt_token_ids")


@dataclass(frozen=True)
class Completion:
    """One answer, in exact token ids.

    Attributes:
        prompt_token_ids: the prompt as the server tokenised it, chat template included.
        token_ids: the answer, its end-of-sequence token included when it ended by itself.
        finish_reason: "stop", "length" or "tool_calls".
        states_path: file of the hidden states of prompt + answer without its last token. An extracting server
            writes one for every request, of the prompt alone where `with_states` is off: delete those.
        seconds: from sending the request to the last token.
        first_token_seconds: from sending to the first token; only measured when streaming.
        message: of a chat: the assistant message as the server returned it.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    states_path: Path | None
    seconds: float
    first_token_seconds: float | None
    message: dict[str, Any] | None = None


async def ask(client: httpx.AsyncClient, server: Server, request: Request, stream: bool) -> Completion:
    """Send one request and read its answer.

    Raises:
        RequestRefused: an error status.
        BrokenAnswer: no whole JSON.
        ServingError: a whole answer that lacks what was asked for, or is another model's.
        httpx.TransportError: the connection failed.
    """
    path, body = _payload(server, request)
    start = time.perf_counter()
    if stream:
        answer, first = await _read_stream(client, path, body | {"stream": True})
    else:
        response = await client.post(path, json=body)
        if response.status_code != 200:
            raise _refused(response, response.text)
        answer, first = _whole_json(request, response.content), None
    return _parse(server, request, answer, time.perf_counter() - start, None if first is None else first - start)


def _payload(server: Server, request: Request) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "model": server.model_name,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "ignore_eos": request.ignore_eos,
        "return_token_ids": True,
        **request.extra,
    }
    if request.seed is not None:
        body["seed"] = request.seed
    if request.with_states:
        body["kv_transfer_params"] = {"include_output_tokens": True}
    if request.tools:
        body["tools"] = request.tools
    if request.messages is not None:
        return "/v1/chat/completions", body | {"messages": request.messages}
    return "/v1/completions", body | {"prompt": request.prompt_token_ids}


def _refused(response: httpx.Response, reason: str) -> RequestRefused:
    named = response.headers.get("retry-after", "")
    seconds = min(float(named), RETRY_AFTER_SECONDS) if named.replace(".", "", 1).isdigit() else None
    return RequestRefused(response.status_code, reason[:500], seconds)


def _whole_json(request: Request, content: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(content)
    except ValueError as error:
        raise BrokenAnswer(f"request {request.id!r}: the answer is not whole JSON: {error}") from error
    if not isinstance(answer, dict):
        raise BrokenAnswer(f"request {request.id!r}: the answer is no JSON object: {content[:80]!r}")
    return answer


async def _read_stream(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> tuple[dict[str, Any], float | None]:
    """Read a streamed answer into the shape of a whole one; also the clock at its first token."""
    whole: dict[str, Any] = {"choices": [{"token_ids": [], "finish_reason": None}]}
    choice, first = whole["choices"][0], None
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            raise _refused(response, (await response.aread()).decode(errors="replace"))
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            for key in ("prompt_token_ids", "kv_transfer_params"):
                whole[key] = event.get(key) or whole.get(key)
            for part in event["choices"]:
                choice["prompt_token_ids"] = part.get("prompt_token_ids") or choice.get("prompt_token_ids")
                choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
                if part.get("token_ids"):
                    first = first or time.perf_counter()
                    choice["token_ids"] += part["token_ids"]
    if choice["finish_reason"] is None:
        raise BrokenAnswer("the stream ended before the answer did")
    return whole, first


def _parse(server: Server, request: Request, answer: dict[str, Any], seconds: float, first: float | None) -> Completion:
    if answer.get("model", server.model_name) != server.model_name:
        raise ServingError(
            f"request {request.id!r}: {server.url} answered as model {answer['model']!r}, asked was "
            f"{server.model_name!r}; check serving.served_model"
        )
    try:
        choice = answer["choices"][0]
    except (KeyError, IndexError) as error:
        raise ServingError(f"request {request.id!r}: the answer has no choices: {str(answer)[:200]}") from error
    prompt = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    tokens = choice.get("token_ids")
    if not prompt or tokens is None:
        raise ServingError(
            f"request {request.id!r}: the answer has no token ids; this vLLM does not know "
            "`return_token_ids`, use version 0.32 or newer"
        )
    if request.prompt_token_ids is not None and prompt != request.prompt_token_ids:
        raise ServingError(f"request {request.id!r}: the server answered another prompt than the one sent")
    states: str | None = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
    if request.with_states and states is None:
        raise ServingError(
            f"request {request.id!r}: asked for hidden states and got none; use a server of mode 'extract'"
        )
    return Completion(
        prompt_token_ids=prompt,
        token_ids=tokens,
        finish_reason=choice["finish_reason"],
        states_path=None if states is None else Path(states),
        seconds=seconds,
        first_token_seconds=first,
        message=choice.get("message"),
    )
