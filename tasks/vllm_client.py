"""Requests to one or several vLLM servers: bounded concurrency, retries for transient faults, conversations."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from tasks.fleet import Fleet, Member
from tasks.speculation_counters import SpecDecodeCounters, read_counters
from tasks.vllm_protocol import BrokenAnswer, Completion, Request, RequestRefused, Server, ask
from tasks.vllm_server import ServingError

if TYPE_CHECKING:
    import tenacity

__all__ = ["Completion", "Request", "RequestRefused", "SpecDecodeCounters", "generate", "read_counters"]

# With the waits below a server may be away for about a minute.
ATTEMPTS = 9
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, JITTER_SECONDS = 0.2, 20.0, 0.5
RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
WATCH_SECONDS = 1.0
# With this many requests failing in a row (or the concurrency, if larger) the server is not worth asking on.
FAILURES_IN_A_ROW = 16

OnCompletion = Callable[[Request, Completion], Request | None]
OnFailure = Callable[[Request, Exception], None]


def generate(
    servers: Server | Sequence[Server],
    requests: Iterable[Request],
    *,
    concurrency: int,
    on_completion: OnCompletion,
    on_failure: OnFailure,
    stream: bool = False,
) -> None:
    """Ask all `requests`, keeping `concurrency` of them in flight at each server; returns when each was reported.

    The callbacks run one at a time in a thread of their own, in order of arrival, with the caller's context
    variables; an exception in one ends the whole call. `requests` is read as answers come in.

    Args:
        servers: where to ask; several share the load, and one that fails is set aside for a while.
        requests: what to ask.
        concurrency: requests in flight, per server.
        on_completion: receives each answer; may return the conversation's next request, which is then asked first.
        on_failure: receives each request that failed for good (refused, or transient faults lasted), and why.
        stream: read answers token by token, which measures the time to the first one.

    Raises:
        ServerDied: a server process of ours ended.
        ServingError: nothing gets through (many requests failed in a row on faults of the server, or all of the first
            ones were refused), or an answer lacks what was asked for.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency={concurrency}: at least one request has to be in flight")
    chosen = list(servers) if isinstance(servers, Sequence) else [servers]
    asyncio.run(_Dispatcher(chosen, iter(requests), concurrency, on_completion, on_failure, stream).run())


class _Dispatcher:
    """Workers that share one iterator of requests, and a watch on the server processes."""

    def __init__(
        self,
        servers: Sequence[Server],
        requests: Iterator[Request],
        concurrency: int,
        on_completion: OnCompletion,
        on_failure: OnFailure,
        stream: bool,
    ) -> None:
        self.servers, self.requests, self.stream = servers, requests, stream
        self.concurrency, self.workers = concurrency, concurrency * len(servers)
        self.on_completion, self.on_failure = on_completion, on_failure
        self.failures_in_a_row = 0
        self.any_answer = False

    async def run(self) -> None:
        # One thread: callbacks neither overlap nor hold up the requests in flight.
        with ThreadPoolExecutor(1, thread_name_prefix="answers") as self.callbacks:
            async with AsyncExitStack() as stack:
                self.fleet = Fleet(
                    [Member(server, await stack.enter_async_context(self._client(server))) for server in self.servers]
                )
                workers = [asyncio.create_task(self._work()) for _ in range(self.workers)]
                watch = asyncio.create_task(self._watch())
                try:
                    await _first_error(workers, watch)
                finally:
                    for task in [*workers, watch]:
                        task.cancel()
                    await asyncio.gather(*workers, watch, return_exceptions=True)

    def _client(self, server: Server) -> Any:
        import httpx

        return httpx.AsyncClient(
            base_url=server.url,
            headers=dict(server.headers),
            # Any member may have to carry what the others cannot.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=self.workers),
            timeout=httpx.Timeout(server.request_timeout_seconds, connect=30.0),
            trust_env=False,
        )

    async def _watch(self) -> None:
        while True:
            self._check_alive()
            await asyncio.sleep(WATCH_SECONDS)

    def _check_alive(self) -> None:
        for server in self.servers:
            server.check_alive()

    async def _work(self) -> None:
        for first in self.requests:
            request: Request | None = first
            member: Member | None = None
            while request is not None:
                try:
                    completion, member = await self._ask_with_retries(request, member)
                except Exception as error:
                    if not _is_reported(error):
                        raise
                    await self._fail(request, error)
                    break
                self.failures_in_a_row, self.any_answer = 0, True
                request = await self._call(self.on_completion, request, completion)

    async def _fail(self, request: Request, error: Exception) -> None:
        self._check_alive()
        # A row that is refused says nothing about the server, unless it never answered any.
        self.failures_in_a_row += _is_transient(error) or not self.any_answer
        await self._call(self.on_failure, request, error)
        if self.failures_in_a_row >= max(FAILURES_IN_A_ROW, self.workers):
            raise ServingError(
                f"{self.failures_in_a_row} requests in a row failed, the last one with: {_text(error)}"
            ) from error

    async def _call(self, callback: Callable[..., Request | None], *arguments: Any) -> Request | None:
        in_context = partial(contextvars.copy_context().run, callback, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self.callbacks, in_context)

    async def _ask_with_retries(self, request: Request, preferred: Member | None) -> tuple[Completion, Member]:
        import tenacity

        async for attempt in tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(_is_transient),
            wait=_wait_seconds,
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            reraise=True,
        ):
            with attempt:
                self._check_alive()
                member = self.fleet.choose(preferred)
                return await self._ask(request, member), member
        raise AssertionError("tenacity ends by returning or raising")

    async def _ask(self, request: Request, member: Member) -> Completion:
        member.in_flight += 1
        try:
            # Of the whole answer: a body that trickles in never runs into a timeout between two reads.
            async with asyncio.timeout(member.server.request_timeout_seconds):
                completion = await ask(member.client, member.server, request, self.stream)
        except Exception as error:
            if _is_transient(error):
                self.fleet.failed(member)
            raise
        finally:
            member.in_flight -= 1
        self.fleet.answered(member)
        return completion


async def _first_error(workers: list[asyncio.Task[None]], watch: asyncio.Task[None]) -> None:
    """Wait for all workers; raise the first error of any of them or of the watch."""
    pending: set[asyncio.Task[None]] = set(workers)
    while pending:
        done, _ = await asyncio.wait({*pending, watch}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        pending -= done


def _wait_seconds(state: tenacity.RetryCallState) -> float:
    """Exponential with jitter, and never less than the server asked for."""
    import tenacity

    own = tenacity.wait_exponential(multiplier=FIRST_WAIT_SECONDS, max=LONGEST_WAIT_SECONDS)(state)
    error = state.outcome.exception() if state.outcome else None
    asked = getattr(error, "retry_after", None) or 0.0
    return max(own, asked) + tenacity.wait_random(0.0, JITTER_SECONDS)(state)


def _is_transient(error: BaseException) -> bool:
    import httpx

    if isinstance(error, RequestRefused):
        return error.status in RETRIED_STATUSES
    return isinstance(error, (httpx.TransportError, BrokenAnswer, TimeoutError))


def _is_reported(error: BaseException) -> bool:
    """Whether an error concerns one request; any other ends the call."""
    return isinstance(error, RequestRefused) or _is_transient(error)


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
