"""Figures of the served evaluation: sums of counters, exact identities, and loud contradictions."""

from __future__ import annotations

import json
from fractions import Fraction
from types import SimpleNamespace

import pytest

from dspark_model.metrics import Acceptance
from tasks import served_rounds
from tasks.answer_rows import AnswerRow
from tasks.evaluation import ReconciliationError, reconcile, summarise, walked_interval
from tasks.served_rounds import Answers, ServedEvaluationError, SubsetRound, run_rounds
from tasks.speculation_counters import SpecDecodeCounters
from tasks.vllm_server import ServingError
from tests.stage_room import FakeEngine, stage_context, toy_recipe

# Two subsets of very different size: a mean of rates would be far from the rate of sums.
LARGE = SubsetRound(
    "large",
    Answers({"a": [1, 2, 3], "b": [4, 5]}, seconds=4.0),
    Answers({"a": [1, 2, 3], "b": [4, 9]}, seconds=2.0),
    Acceptance(100, (20, 10, 0)),
    draft_tokens=300,
)
SMALL = SubsetRound(
    "small",
    Answers({"c": [7] * 15}, seconds=1.0),
    Answers({"c": [7] * 15}, seconds=3.0),
    Acceptance(4, (4, 3, 1)),
    draft_tokens=12,
)
WALKED = {"a": Acceptance(60, (10, 6, 0)), "b": Acceptance(40, (8, 4, 0)), "c": Acceptance(4, (4, 3, 1))}


@pytest.fixture
def result():
    return summarise([LARGE, SMALL], WALKED)


def test_overall_rates_are_of_sums_not_means(result):
    assert result["acceptance_length"] == pytest.approx(float(1 + Fraction(30 + 8, 104)))
    assert result["positions"]["survival"] == pytest.approx((24 / 104, 13 / 104, 1 / 104))
    assert result["positions"]["conditional"] == pytest.approx([24 / 104, 13 / 24, 1 / 13])
    assert result["walked_acceptance_length"] == pytest.approx(1 + 36 / 104)
    assert result["positions"]["walked_survival"] == pytest.approx((22 / 104, 13 / 104, 1 / 104))
    assert (result["drafts"], result["accepted"], result["requests"]) == (104, 38, 3)
    assert result["accepted_share_of_drafted"] == pytest.approx(38 / 312)
    # Whole tokens over whole time, not a mean of speeds.
    assert result["tokens_per_second"] == pytest.approx({"verifier_alone": 20 / 5, "with_drafter": 20 / 5})


def test_acceptance_length_is_one_plus_the_survival_of_every_row(result):
    for row in result["subsets"].values():
        assert row["acceptance_length"] == pytest.approx(1 + sum(row["survival"]))
    assert result["acceptance_length"] == pytest.approx(1 + sum(result["positions"]["survival"]))
    assert result["walked_acceptance_length"] == pytest.approx(1 + sum(result["positions"]["walked_survival"]))


def test_each_subset_has_its_own_counters_and_walk(result):
    large, small = result["subsets"]["large"], result["subsets"]["small"]
    assert large["acceptance_length"] == pytest.approx(1.3)
    assert large["walked_acceptance_length"] == pytest.approx(1.28)
    assert (small["acceptance_length"], small["walked_acceptance_length"]) == (3.0, 3.0)
    assert (large["drafts"], large["requests"], small["drafts"], small["requests"]) == (100, 2, 4, 1)
    assert (small["tokens_per_second_verifier_alone"], small["tokens_per_second_with_drafter"]) == (15, 5)


def test_equal_share_counts_requests_whose_tokens_are_all_equal(result):
    assert result["greedy_equal_share"] == pytest.approx(2 / 3)
    assert result["subsets"]["large"]["greedy_equal_share"] == 0.5
    assert result["subsets"]["small"]["greedy_equal_share"] == 1.0
    shorter = SubsetRound("s", SMALL.plain, Answers({"c": [7] * 14}, 1.0), SMALL.acceptance, 12)
    assert summarise([shorter], {"c": WALKED["c"]})["greedy_equal_share"] == 0.0


def test_the_result_is_strict_json_even_where_nothing_was_accepted():
    rejected = SubsetRound("s", SMALL.plain, SMALL.drafted, Acceptance(15, (0, 0, 0)), 45)
    result = summarise([rejected], {"c": Acceptance(15, (0, 0, 0))})
    assert json.loads(json.dumps(result, allow_nan=False))["positions"]["conditional"] == [0.0, None, None]
    assert result["acceptance_length"] == 1.0


def test_the_interval_holds_the_estimate_and_narrows_with_requests():
    def requests(count):
        return [Acceptance(10 + i % 7, (5 + i % 4, 2 + i % 3)) for i in range(count)]

    def estimate(rows):
        return 1 + sum(row.accepted for row in rows) / sum(row.drafts for row in rows)

    few, many = requests(5), requests(200)
    for rows in (few, many):
        low, high = walked_interval(rows)
        assert low < estimate(rows) < high
        assert walked_interval(rows) == (low, high), "seeded"
    assert walked_interval(many)[1] - walked_interval(many)[0] < (walked_interval(few)[1] - walked_interval(few)[0]) / 2
    assert walked_interval(many, confidence=0.5)[0] > walked_interval(many)[0]


def test_the_interval_weighs_requests_by_their_steps():
    # A mean of ratios would lie at 1.5.
    rows = [Acceptance(1000, (0,)), Acceptance(1, (1,))] * 20
    low, high = walked_interval(rows)
    assert low < 1 + 20 / 20020 < high < 1.1


def test_one_request_says_nothing_about_others():
    assert walked_interval([Acceptance(10, (9, 3))]) == (1.0, 3.0)


def figures(served, walked):
    return {
        "acceptance_length": served,
        "walked_acceptance_length": walked,
        "positions": {"survival": (0.5, 0.125), "walked_survival": (0.75, 0.25)},
    }


@pytest.mark.parametrize("walked", [1.625, 1.65, 1.60])
def test_reconciled_inside_the_tolerance_and_not_just_outside(walked):
    def accepted(tolerance):
        try:
            reconcile(figures(1.625, walked), tolerance)
        except ReconciliationError:
            return False
        return True

    gap = abs(walked - 1.625)
    assert accepted(0.03)
    assert accepted(gap + 1e-9)
    assert not gap or not accepted(gap - 1e-9)


@pytest.mark.parametrize("served", [1.625, float("nan")])
def test_irreconcilable_figures_name_both_and_every_position(served):
    with pytest.raises(ReconciliationError, match=r"reconciliation_tolerance=0\.03") as caught:
        reconcile(figures(served, 2.0), 0.03)
    message = str(caught.value)
    assert f"served acceptance length {served:.3f}, walked 2.000" in message
    assert "position 0: served 0.500, walked 0.750" in message
    assert "position 1: served 0.125, walked 0.250" in message


ROWS = [
    AnswerRow(f"r{i}", f"r{i}", 0, "even" if i % 2 == 0 else "odd", "builtin", "", [i, i + 1], [9], "stop", "{}")
    for i in range(5)
]


@pytest.fixture
def evaluated(tmp_path, monkeypatch):
    """Evaluates `ROWS` with 2 tokens per step; each drafted request is 3 steps, 2 of which accept one token."""
    engine, order = FakeEngine(), []

    def generate(server, requests, **options):
        requests = list(requests)
        order.append((server.kind, [r.id for r in requests], requests[0].max_tokens))
        engine.generate(server, requests, **options)

    def counters(server):
        assert server.kind == "drafting"
        drafted = sum(len(ids) for kind, ids, _ in order if kind == "drafting")
        return SpecDecodeCounters(3 * drafted, 6 * drafted, 2 * drafted, (2 * drafted,))

    monkeypatch.setattr(served_rounds, "generate", generate)
    monkeypatch.setattr(served_rounds, "read_counters", counters)
    recipe = toy_recipe(tmp_path, evaluation={"num_speculative_tokens": 2})
    context = stage_context(tmp_path, recipe, {})

    def run():
        plain, drafting = SimpleNamespace(kind="plain"), SimpleNamespace(kind="drafting")
        return run_rounds(context, plain, drafting, ROWS, max_new_tokens=11, concurrency=2)

    return SimpleNamespace(run=run, order=order, engine=engine)


def test_subsets_alternate_and_the_warm_up_is_not_counted(evaluated):
    rounds = evaluated.run()
    even, odd = ["r0", "r2", "r4"], ["r1", "r3"]
    assert evaluated.order == [
        ("plain", ["r0"], 8), ("drafting", ["r0"], 8),
        ("plain", even, 11), ("drafting", even, 11), ("plain", odd, 11), ("drafting", odd, 11),
    ]  # fmt: skip
    assert [(r.subset, r.acceptance, r.draft_tokens) for r in rounds] == [
        ("even", Acceptance(9, (6, 0)), 18),
        ("odd", Acceptance(6, (4, 0)), 12),
    ]
    assert rounds[0].plain.token_ids == {name: [7] * 11 for name in even}
    assert rounds[0].plain.tokens == 33
    assert {(r.temperature, r.ignore_eos, r.with_states) for r in evaluated.engine.asked} == {(0.0, False, False)}


def test_a_failed_request_ends_the_evaluation(evaluated):
    evaluated.engine.failing = {"r3": RuntimeError("gone")}
    with pytest.raises(ServedEvaluationError, match="request r3 failed: gone"):
        evaluated.run()


@pytest.mark.parametrize(
    ("drafts", "draft_tokens", "positions", "message"),
    [
        (10, 30, (5, 6, 1), "inconsistent"),
        (10, 30, (11, 3, 1), "inconsistent"),
        (10, 8, (5, 3, 1), "inconsistent"),
        (-10, 30, (0, 0, 0), "inconsistent"),
        (10, 40, (5, 3, 1, 0), "counts 4 positions, the recipe serves 3"),
    ],
    ids=["later above earlier", "first above steps", "accepted above drafted", "restarted", "too many positions"],
)
def test_inconsistent_counters_are_refused(drafts, draft_tokens, positions, message):
    counted = SpecDecodeCounters(drafts, draft_tokens, sum(positions), positions)
    with pytest.raises(ServedEvaluationError, match=message):
        served_rounds._checked(counted, 3)


def test_consistent_counters_become_rates_numerators():
    assert served_rounds._checked(SpecDecodeCounters(10, 30, 6, (5, 1)), 3) == Acceptance(10, (5, 1, 0))
    with pytest.raises(ServingError, match="disagree"):
        SpecDecodeCounters(10, 30, 7, (5, 1))
