"""The client against a spoiled network, several servers, and conversations: each request is reported exactly once."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import pytest

from tasks import fleet, vllm_client
from tasks.external_server import ExternalServer
from tasks.vllm_client import Request, RequestRefused, generate
from tasks.vllm_server import ServingError
from tests.fault_proxy import FAULTS, fault_proxy
from tests.toy_openai_server import ToyServer, answer_ids, prompt_ids


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(vllm_client, "FIRST_WAIT_SECONDS", 0.002)
    monkeypatch.setattr(vllm_client, "JITTER_SECONDS", 0.002)
    monkeypatch.setattr(fleet, "FIRST_PAUSE_SECONDS", 0.02)


def external(url, timeout=20.0):
    return ExternalServer(url, "verifier", timeout)


def chats(count):
    return [Request(f"r{i}", messages=[{"role": "user", "content": f"{i}?"}]) for i in range(count)]


class Reports:
    """What was reported, in order."""

    def __init__(self):
        self.answers, self.failures, self.order = {}, {}, []

    def completed(self, request, completion):
        assert request.id not in self.answers
        self.answers[request.id] = completion
        self.order.append(request.id)

    def failed(self, request, error):
        assert request.id not in self.failures
        self.failures[request.id] = error


def ask(servers, requests, concurrency=4):
    reports = Reports()
    generate(servers, requests, concurrency=concurrency, on_completion=reports.completed, on_failure=reports.failed)
    return reports


def check(reports, requests):
    assert reports.failures == {}
    assert sorted(reports.answers) == sorted(request.id for request in requests)
    for request in requests:
        prompt = prompt_ids(request.messages)
        answer = reports.answers[request.id]
        assert (answer.prompt_token_ids, answer.token_ids) == (prompt, answer_ids(prompt, 128))


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_survived(fault):
    requests = chats(24)
    with ToyServer() as server, fault_proxy(server.url, faults=[fault], every=3) as proxy:
        check(ask(external(proxy.url), requests), requests)
        assert proxy.injected[fault] >= 8


def test_a_server_that_never_recovers_is_reported_with_the_last_fault(monkeypatch):
    monkeypatch.setattr(vllm_client, "ATTEMPTS", 3)
    with ToyServer() as server, fault_proxy(server.url, faults=["half_json"], every=1) as proxy:
        reports = ask(external(proxy.url), chats(3))
    assert not reports.answers
    assert all("not whole JSON" in str(error) for error in reports.failures.values())
    assert len(proxy.requests) == 9


def test_a_body_that_trickles_in_meets_the_deadline(monkeypatch):
    monkeypatch.setattr(vllm_client, "ATTEMPTS", 2)
    with ToyServer() as server, fault_proxy(server.url, faults=["slow"], every=1) as proxy:
        reports = ask(external(proxy.url, timeout=0.1), chats(1))
    assert isinstance(reports.failures["r0"], TimeoutError)
    assert len(proxy.requests) == 2


def test_a_pause_that_the_server_asks_for_is_kept(monkeypatch):
    waits = []
    original = vllm_client._wait_seconds

    def noted(state):
        waits.append(original(state))
        return 0.0

    monkeypatch.setattr(vllm_client, "_wait_seconds", noted)
    refusal = RequestRefused(429, "slow down", retry_after=7.0)

    async def busy_once(client, server, request, stream, asked=[]):  # noqa: B006
        asked.append(request)
        if len(asked) == 1:
            raise refusal
        return await vllm_client_ask(client, server, request, stream)

    vllm_client_ask = vllm_client.ask
    monkeypatch.setattr(vllm_client, "ask", busy_once)
    with ToyServer() as server:
        check(ask(external(server.url), chats(1)), chats(1))
    assert 7.0 <= waits[0] <= 7.0 + vllm_client.JITTER_SECONDS


def test_rows_that_are_refused_do_not_end_a_run_that_gets_answers():
    requests = chats(200)
    for index in range(5, 100):
        requests[index] = Request(f"r{index}", messages=[{"role": "user", "content": f"refuse {index}"}])
    with ToyServer() as server:
        reports = ask(external(server.url), requests)
    assert (len(reports.answers), len(reports.failures)) == (105, 95)


def test_several_servers_share_the_load_and_never_get_more_than_their_part():
    with ExitStack() as stack:
        servers = [stack.enter_context(ToyServer(delay=0.01)) for _ in range(3)]
        requests = chats(120)
        check(ask([external(server.url) for server in servers], requests, concurrency=2), requests)
        # An idler server may carry a little more for a moment, never all that is in flight.
        assert max(server.peak for server in servers) <= 3
        assert sum(server.asked for server in servers) == 120
        assert all(server.asked >= 30 for server in servers)


def test_the_others_carry_on_when_one_server_is_away():
    requests = chats(60)
    with ToyServer() as gone:
        address = gone.url
    with ToyServer(delay=0.002) as alive:
        check(ask([external(address), external(alive.url)], requests), requests)
        assert alive.asked == 60


def test_all_servers_away_ends_the_run_with_the_reason(monkeypatch):
    monkeypatch.setattr(vllm_client, "ATTEMPTS", 2)
    with ToyServer() as gone:
        address = gone.url
    with pytest.raises(ServingError, match=r"1[6-9] requests in a row failed.*onnect"):
        ask(external(address), chats(100))


def test_the_next_turn_is_asked_at_once_and_of_the_same_server():
    """Three turns a conversation: while it lasts, its worker asks nothing else."""
    places = {}
    with ExitStack() as stack:
        servers = [stack.enter_context(ToyServer(delay=0.003)) for _ in range(2)]

        def keep(request, completion):
            name, turn = request.id.split("/")
            messages = [*request.messages, completion.message, {"role": "user", "content": "and?"}]
            places.setdefault(name, []).append(int(turn))
            if turn == "2":
                return None
            return Request(f"{name}/{int(turn) + 1}", messages=messages)

        first = [Request(f"c{i}/0", messages=[{"role": "user", "content": f"{i}?"}]) for i in range(20)]
        generate(
            [external(server.url) for server in servers],
            first, concurrency=2, on_completion=keep, on_failure=lambda *_: None,
        )  # fmt: skip
        asked = [{body["messages"][0]["content"] for body in server.bodies} for server in servers]
        bodies = Counter(body["messages"][0]["content"] for server in servers for body in server.bodies)
    assert all(turns == [0, 1, 2] for turns in places.values())
    assert len(places) == 20
    assert set(bodies.values()) == {3}
    assert len(asked[0] & asked[1]) <= 6, "most conversations stay where their prefix is cached"


def test_an_answer_of_another_model_ends_the_run():
    with (
        ToyServer(model="other") as server,
        pytest.raises(ServingError, match="as model 'other', asked was 'verifier'"),
    ):
        ask(external(server.url), chats(3))


class Member:
    def __init__(self, in_flight, resumes=0.0):
        self.in_flight, self.resumes, self.pause = in_flight, resumes, 1.0


@pytest.mark.parametrize(
    ("loads", "preferred", "chosen"),
    [([3, 1, 2], None, 1), ([3, 1, 2], 2, 2), ([3, 1, 2], 0, 1), ([0, 0], 1, 1), ([5], None, 0)],
)
def test_the_idlest_server_is_chosen_unless_a_preferred_one_is_nearly_as_idle(loads, preferred, chosen):
    members = [Member(load) for load in loads]
    one = fleet.Fleet(members).choose(None if preferred is None else members[preferred])
    assert members.index(one) == chosen


def test_a_failing_server_is_set_aside_for_longer_each_time_and_forgiven_by_an_answer(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(fleet.time, "monotonic", lambda: now[0])
    bad, good = Member(0), Member(5)
    group = fleet.Fleet([bad, good])
    for pause in (1.0, 2.0, 4.0):
        group.failed(bad)
        group.failed(bad)  # requests that fail together count once
        assert bad.resumes == now[0] + pause
        assert group.choose(bad) is good
        now[0] = bad.resumes
        assert group.choose() is bad
    group.failed(good)
    group.failed(bad)
    assert group.choose() is good, "all are set aside: the one that is due first"
    group.answered(bad)
    assert group.choose() is bad
    assert bad.pause == fleet.FIRST_PAUSE_SECONDS
