"""Packing of documents into rows, and the order in which training visits them."""

from __future__ import annotations

import random

import pytest

from dspark_model.batch import pack_longest_first
from dspark_model.schedule import RowSampler, learning_rate_factor


@pytest.mark.parametrize("seed", range(5))
def test_no_document_is_lost_split_or_doubled_and_no_bin_overflows(seed):
    draw = random.Random(seed)
    capacity = draw.randint(50, 200)
    lengths = [draw.randint(1, capacity) for _ in range(200)]
    bins = pack_longest_first(lengths, capacity)
    assert sorted(index for members in bins for index in members) == list(range(200))
    assert all(sum(lengths[index] for index in members) <= capacity for members in bins)
    # First fit leaves at most one bin half empty.
    assert sum(sum(lengths[index] for index in members) * 2 <= capacity for members in bins) <= 1


@pytest.mark.parametrize("count", [0, 1, 2, 3, 64, 65, 150])
def test_packing_is_first_fit_decreasing(count):
    """The rule by itself: longest first, each into the first bin with room."""
    draw = random.Random(count)
    lengths = [draw.randint(1, 40) for _ in range(count)]
    bins: list[list[int]] = []
    for index in sorted(range(count), key=lambda i: -lengths[i]):
        for members in bins:
            if sum(lengths[i] for i in members) + lengths[index] <= 64:
                members.append(index)
                break
        else:
            bins.append([index])
    assert pack_longest_first(lengths, 64) == bins


def test_a_document_longer_than_a_row_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"document 1 has 65 tokens, more than tokens_per_step=64"):
        pack_longest_first([3, 65], 64)


def test_an_exactly_full_document_fits():
    assert pack_longest_first([64, 64], 64) == [[0], [1]]


LENGTHS = [5, 30, 12, 60, 44, 8, 9, 31, 2, 64, 17]


def epoch(sampler: RowSampler, number: int) -> list[list[int]]:
    rows = len(sampler.bins)
    return [sampler.row(number * rows + i) for i in range(rows)]


def test_each_epoch_visits_each_document_once_in_an_order_of_its_own():
    sampler = RowSampler(LENGTHS, 64, seed=3)
    epochs = [epoch(sampler, number) for number in range(6)]
    for rows in epochs:
        assert sorted(index for row in rows for index in row) == list(range(len(LENGTHS)))
    assert len({str(rows) for rows in epochs}) > 1


def test_a_row_depends_on_seed_and_step_only_not_on_what_was_asked_before():
    forwards = RowSampler(LENGTHS, 64, seed=3)
    steps = range(4 * len(forwards.bins))
    expected = [forwards.row(step) for step in steps]
    backwards = RowSampler(LENGTHS, 64, seed=3)
    assert [backwards.row(step) for step in reversed(steps)] == expected[::-1]
    assert [RowSampler(LENGTHS, 64, seed=3).row(step) for step in steps] == expected
    assert [RowSampler(LENGTHS, 64, seed=4).row(step) for step in steps] != expected


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        ("constant", [0.5] + [1.0] * 9),
        ("cosine", [0.5, 1.0, 1.0, 0.961940, 0.853553, 0.691342, 0.5, 0.308658, 0.146447, 0.038060]),
    ],
)
def test_learning_rate_factors(schedule, expected):
    assert [learning_rate_factor(step, 10, 0.2, schedule) for step in range(10)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize(("steps", "share"), [(1, 0.0), (1, 1.0), (7, 0.0), (7, 0.5), (7, 1.0)])
def test_no_step_is_wasted_at_rate_zero(schedule, steps, share):
    factors = [learning_rate_factor(step, steps, share, schedule) for step in range(steps)]
    assert all(0 < factor <= 1 for factor in factors)
    assert max(factors) == 1
