"""What a server counted while decoding with a drafter, read from its /metrics."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.vllm_server import ServingError, VllmServer

PREFIX = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class SpecDecodeCounters:
    """Counters since the server started; subtract two readings to get those of what ran in between.

    Attributes:
        drafts: verification steps that had drafted tokens.
        draft_tokens: tokens drafted in them.
        accepted_tokens: drafted tokens that the verifier accepted.
        accepted_per_position: steps in which the token at each position was accepted.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]

    def __post_init__(self) -> None:
        total = sum(self.accepted_per_position)
        if total != self.accepted_tokens:
            raise ServingError(
                f"the server's counters disagree: {self.accepted_tokens} accepted tokens, but "
                f"{list(self.accepted_per_position)} per position add up to {total}; "
                "read them while no request is running"
            )

    def __sub__(self, earlier: SpecDecodeCounters) -> SpecDecodeCounters:
        """What was counted since an earlier reading of the same server."""
        width = max(len(self.accepted_per_position), len(earlier.accepted_per_position))
        return SpecDecodeCounters(
            drafts=self.drafts - earlier.drafts,
            draft_tokens=self.draft_tokens - earlier.draft_tokens,
            accepted_tokens=self.accepted_tokens - earlier.accepted_tokens,
            accepted_per_position=tuple(
                now - before
                for now, before in zip(
                    _padded(self.accepted_per_position, width),
                    _padded(earlier.accepted_per_position, width),
                    strict=True,
                )
            ),
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification step, the verifier's own included: 1 + accepted / drafts.

        Raises:
            ServingError: nothing was drafted.
        """
        if self.drafts == 0:
            raise ServingError("acceptance_length of no verification steps: the server drafted nothing")
        return 1.0 + self.accepted_tokens / self.drafts


def read_counters(server: VllmServer) -> SpecDecodeCounters:
    """Read a server's counters, summed over engines and other labels.

    Raises:
        ServingError: the server has no such counters, so it runs without a drafter.
    """
    import httpx
    import tenacity

    fetch = tenacity.retry(
        retry=tenacity.retry_if_exception_type(httpx.TransportError),
        wait=tenacity.wait_exponential(multiplier=0.2, max=5.0) + tenacity.wait_random(0.0, 0.5),
        stop=tenacity.stop_after_attempt(4),
        reraise=True,
    )(_fetch_metrics)
    try:
        return parse_counters(fetch(server))
    except httpx.TransportError:
        server.check_alive()
        raise


def parse_counters(metrics: str) -> SpecDecodeCounters:
    """Sum the speculation counters of a Prometheus text page.

    Raises:
        ServingError: the page has none.
    """
    from prometheus_client.parser import text_string_to_metric_families

    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if not sample.name.startswith(PREFIX) or not sample.name.endswith("_total"):
                continue
            name = sample.name.removeprefix(PREFIX).removesuffix("_total")
            totals[name] = totals.get(name, 0) + int(sample.value)
            if "position" in sample.labels:
                position = int(sample.labels["position"])
                positions[position] = positions.get(position, 0) + int(sample.value)
    if "drafts" not in totals:
        raise ServingError("the server has no speculation counters: read them from a server of mode 'dspark'")
    return SpecDecodeCounters(
        drafts=totals["drafts"],
        draft_tokens=totals["draft_tokens"],
        accepted_tokens=totals["accepted_tokens"],
        accepted_per_position=tuple(positions.get(i, 0) for i in range(max(positions, default=-1) + 1)),
    )


def _fetch_metrics(server: VllmServer) -> str:
    import httpx

    return httpx.get(f"{server.url}/metrics", timeout=30.0, trust_env=False).raise_for_status().text


def _padded(values: tuple[int, ...], width: int) -> tuple[int, ...]:
    return values + (0,) * (width - len(values))
