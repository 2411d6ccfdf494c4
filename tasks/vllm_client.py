"""Requests to a vLLM server: bounded concurrency and retries for transient faults."""

from __future__ import annotations

import asyncio
import contextvars
import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.speculation_counters import SpecDecodeCounters, read_counters
from tasks.vllm_server import ServingError, VllmServer

if TYPE_CHECKING:
    import httpx

__all__ = ["Completion", "Request", "RequestRefused", "SpecDecodeCounters", "generate", "read_counters"]

ATTEMPTS = 5
RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
REQUEST_TIMEOUT_SECONDS = 1800.0
WATCH_SECONDS = 1.0
# With this many requests failing in a row (or the concurrency, if larger) the server is not worth asking on.
FAILURES_IN_A_ROW = 16


class RequestRefused(ServingError):  # noqa: N818 - reads as what happened
    """The server answered with an error status."""

    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        super().__init__(f"the server answered {status}: {reason}")


@dataclass(frozen=True)
class Request:
    """One question: chat `messages`, or `prompt_token_ids` to be continued as they are."""

    id: str
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None
    with_states: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.prompt_token_ids is None):
            raise ValueError(f"request {self.id!r}: give either messages or prompt_token_ids")


@dataclass(frozen=True)
class Completion:
    """One answer, in exact token ids.

    Attributes:
        prompt_token_ids: the prompt as the server tokenised it, chat template included.
        token_ids: the answer, its end-of-sequence token included when it ended by itself.
        finish_reason: "stop" or "length".
        states_path: file of the hidden states of prompt + answer without its last token. An extracting server
            writes one for every request, of the prompt alone where `with_states` is off: delete those.
        seconds: from sending the request to the last token.
        first_token_seconds: from sending to the first token; only measured when streaming.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    states_path: Path | None
    seconds: float
    first_token_seconds: float | None


def generate(
    server: VllmServer,
    requests: Iterable[Request],
    *,
    concurrency: int,
    on_completion: Callable[[Request, Completion], None],
    on_failure: Callable[[Request, Exception], None],
    stream: bool = False,
) -> None:
    """Ask all `requests`, keeping `concurrency` of them in flight; returns when each has been reported.

    The callbacks run one at a time in a thread of their own, in order of arrival, with the caller's context
    variables; an exception in one ends the whole call. `requests` is read as answers come in.

    Args:
        server: where to ask.
        requests: what to ask.
        concurrency: requests in flight.
        on_completion: receives each answer.
        on_failure: receives each request that failed for good (refused, or transient faults lasted), and why.
        stream: read answers token by token, which measures the time to the first one.

    Raises:
        ServerDied: the server process ended.
        ServingError: many requests failed in a row, or an answer lacks what was asked for.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency={concurrency}: at least one request has to be in flight")
    asyncio.run(_Dispatcher(server, iter(requests), concurrency, on_completion, on_failure, stream).run())


class _Dispatcher:
    """Workers that share one iterator of requests, and a watch on the server process."""

    def __init__(
        self,
        server: VllmServer,
        requests: Iterator[Request],
        concurrency: int,
        on_completion: Callable[[Request, Completion], None],
        on_failure: Callable[[Request, Exception], None],
        stream: bool,
    ) -> None:
        self.server = server
        self.requests = requests
        self.concurrency = concurrency
        self.on_completion = on_completion
        self.on_failure = on_failure
        self.stream = stream
        self.failures_in_a_row = 0

    async def run(self) -> None:
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.concurrency)
        timeout = httpx.Timeout(REQUEST_TIMEOUT_SECONDS, connect=30.0)
        # One thread: callbacks neither overlap nor hold up the requests in flight.
        with ThreadPoolExecutor(1, thread_name_prefix="answers") as self.callbacks:
            async with httpx.AsyncClient(
                base_url=self.server.url, limits=limits, timeout=timeout, trust_env=False
            ) as client:
                workers = [asyncio.create_task(self._work(client)) for _ in range(self.concurrency)]
                watch = asyncio.create_task(self._watch())
                try:
                    await _first_error(workers, watch)
                finally:
                    for task in [*workers, watch]:
                        task.cancel()
                    await asyncio.gather(*workers, watch, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            self.server.check_alive()
            await asyncio.sleep(WATCH_SECONDS)

    async def _work(self, client: httpx.AsyncClient) -> None:
        import httpx

        for request in self.requests:
            try:
                completion = await self._ask_with_retries(client, request)
            except (httpx.TransportError, RequestRefused) as error:
                self.server.check_alive()
                self.failures_in_a_row += 1
                await self._call(self.on_failure, request, error)
                if self.failures_in_a_row >= max(FAILURES_IN_A_ROW, self.concurrency):
                    raise ServingError(
                        f"{self.failures_in_a_row} requests in a row failed, the last one with: {error}"
                    ) from error
            else:
                self.failures_in_a_row = 0
                await self._call(self.on_completion, request, completion)

    async def _call(self, callback: Callable[..., None], *arguments: Any) -> None:
        in_context = partial(contextvars.copy_context().run, callback, *arguments)
        await asyncio.get_running_loop().run_in_executor(self.callbacks, in_context)

    async def _ask_with_retries(self, client: httpx.AsyncClient, request: Request) -> Completion:
        import tenacity

        async for attempt in tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(_is_transient),
            wait=tenacity.wait_exponential(multiplier=0.2, max=10.0) + tenacity.wait_random(0.0, 0.5),
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            reraise=True,
        ):
            with attempt:
                self.server.check_alive()
                return await _ask(client, self.server, request, self.stream)
        raise AssertionError("tenacity ends by returning or raising")


async def _first_error(workers: list[asyncio.Task[None]], watch: asyncio.Task[None]) -> None:
    """Wait for all workers; raise the first error of any of them or of the watch."""
    pending: set[asyncio.Task[None]] = set(workers)
    while pending:
        done, _ = await asyncio.wait({*pending, watch}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        pending -= done


def _is_transient(error: BaseException) -> bool:
    import httpx

    if isinstance(error, RequestRefused):
        return error.status in RETRIED_STATUSES
    return isinstance(error, httpx.TransportError)


async def _ask(client: httpx.AsyncClient, server: VllmServer, request: Request, stream: bool) -> Completion:
    path, body = _payload(server, request)
    start = time.perf_counter()
    if stream:
        answer, first = await _read_stream(client, path, body | {"stream": True})
    else:
        response = await client.post(path, json=body)
        if response.status_code != 200:
            raise RequestRefused(response.status_code, response.text[:500])
        answer, first = response.json(), None
    return _parse(request, answer, time.perf_counter() - start, None if first is None else first - start)


def _payload(server: VllmServer, request: Request) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "model": server.model_name,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "ignore_eos": request.ignore_eos,
        "return_token_ids": True,
    }
    if request.seed is not None:
        body["seed"] = request.seed
    if request.with_states:
        body["kv_transfer_params"] = {"include_output_tokens": True}
    if request.messages is not None:
        return "/v1/chat/completions", body | {"messages": request.messages}
    return "/v1/completions", body | {"prompt": request.prompt_token_ids}


async def _read_stream(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> tuple[dict[str, Any], float | None]:
    """Read a streamed answer into the shape of a whole one; also the clock at its first token."""
    whole: dict[str, Any] = {"choices": [{"token_ids": [], "finish_reason": None}]}
    choice, first = whole["choices"][0], None
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            reason = (await response.aread()).decode(errors="replace")
            raise RequestRefused(response.status_code, reason[:500])
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
    return whole, first


def _parse(request: Request, answer: dict[str, Any], seconds: float, first: float | None) -> Completion:
    choice = answer["choices"][0]
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
    )
