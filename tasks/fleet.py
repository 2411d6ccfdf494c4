"""Which of several servers a request goes to: the least busy one that answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

    from tasks.vllm_protocol import Server

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0


@dataclass
class Member:
    """A server with what is known of it.

    Attributes:
        server: the server.
        client: connections to it.
        in_flight: requests that it has not answered yet.
        resumes: clock (monotonic) until which it is set aside after a failure.
        pause: how long it is set aside next time, in seconds.
    """

    server: Server
    client: httpx.AsyncClient
    in_flight: int = 0
    resumes: float = 0.0
    pause: float = FIRST_PAUSE_SECONDS


class Fleet:
    """Servers that share a load. With a single one, everything goes there."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)

    def choose(self, preferred: Member | None = None) -> Member:
        """The member with the fewest requests among those not set aside; `preferred` if it is not busier by two.

        A conversation's earlier turns lie in the prefix cache of the server that answered them. When all are set
        aside, the one that is due first.
        """
        now = time.monotonic()
        ready = [member for member in self.members if member.resumes <= now]
        if not ready:
            return min(self.members, key=lambda member: member.resumes)
        idlest = min(ready, key=lambda member: member.in_flight)
        if preferred in ready and preferred.in_flight <= idlest.in_flight + 1:
            return preferred
        return idlest

    def failed(self, member: Member) -> None:
        """Set a member aside, each time for longer."""
        now = time.monotonic()
        if member.resumes <= now:  # of many requests that fail together, one counts
            member.resumes = now + member.pause
            member.pause = min(2 * member.pause, LONGEST_PAUSE_SECONDS)

    def answered(self, member: Member) -> None:
        """A member works (again)."""
        member.resumes, member.pause = 0.0, FIRST_PAUSE_SECONDS
