"""Step metrics against double loops over blocks and positions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dspark_model.step_metrics import StepMetrics, acceptance_metrics, token_metrics

A, K = 60, 5


class Step:
    """Random slots in either anchor layout: whole blocks, blocks cut short, blocks with nothing supervised."""

    def __init__(self, sample_from_anchor: bool, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.sample_from_anchor = sample_from_anchor
        self.first = 0 if sample_from_anchor else 1
        lengths = torch.randint(0, K - self.first + 1, (A, 1), generator=g)
        index = torch.arange(K) - self.first
        self.mask = (index >= 0) & (index < lengths)
        self.acceptance = torch.rand(A, K, generator=g) ** 0.3
        self.confidence = torch.rand(A, K, generator=g) ** 0.2
        self.confidence[:4] = 1.0  # a prefix product of exactly 1 belongs to the last bin
        self.match = torch.rand(A, K, generator=g) < 0.7
        self.targets = torch.randint(-1, 6, (A, K), generator=g)
        self.acceptance[~self.mask] = math.nan

    def metrics(self, blocks: slice = slice(None)) -> StepMetrics:
        layout = {"sample_from_anchor": self.sample_from_anchor}
        tokens = token_metrics(self.match[blocks], self.targets[blocks], self.mask[blocks], **layout)
        return tokens + acceptance_metrics(
            self.acceptance[blocks], self.mask[blocks], confidence_AK=self.confidence[blocks], **layout
        )

    def blocks(self, values: Tensor) -> list[list[float]]:
        """The supervised values of each block, in order."""
        return [values[a][self.mask[a]].tolist() for a in range(A)]


def lengths_by_loop(accepted: list[list[float]], positions: int) -> tuple[float, list[float], list[float]]:
    """Expected length, survival and conditional rate per position."""
    blocks = sum(1 for block in accepted if block)
    lengths, survival, before = 0.0, [0.0] * positions, [0.0] * positions
    for block in accepted:
        if block:
            lengths += 1 + sum(math.prod(block[: i + 1]) for i in range(len(block)))
        for i in range(len(block)):
            survival[i] += math.prod(block[: i + 1])
            before[i] += math.prod(block[:i])
    conditional = [s / b for s, b in zip(survival, before, strict=True)]
    return lengths / blocks, [s / blocks for s in survival], conditional


@pytest.mark.parametrize("sample_from_anchor", [True, False])
@pytest.mark.parametrize("kind", ["sampling", "greedy"])
def test_lengths_survival_and_conditional_rates_equal_loops(kind, sample_from_anchor):
    step = Step(sample_from_anchor)
    found = step.metrics().means()
    accepted = step.blocks(step.acceptance if kind == "sampling" else step.match.double())
    length, survival, conditional = lengths_by_loop(accepted, K - step.first)
    assert found[f"expected_length_{kind}"] == pytest.approx(length)
    assert found[f"survival_{kind}"] == pytest.approx(survival)
    assert found[f"conditional_{kind}"] == pytest.approx(conditional)
    assert found[f"expected_length_{kind}"] == pytest.approx(1 + sum(found[f"survival_{kind}"]))


def test_conditional_rates_are_ratios_of_survival_when_no_block_is_cut_short():
    mask, acceptance = torch.ones(7, K, dtype=torch.bool), torch.rand(7, K, generator=torch.Generator().manual_seed(1))
    found = acceptance_metrics(acceptance, mask, sample_from_anchor=True).means()
    survival = found["survival_sampling"]
    ratios = [after / before for before, after in zip([1.0, *survival[:-1]], survival, strict=True)]
    assert found["conditional_sampling"] == pytest.approx(ratios)


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_rates_over_slots_equal_loops(sample_from_anchor):
    step = Step(sample_from_anchor)
    found = step.metrics().means()
    slots = [(a, k) for a in range(A) for k in range(K) if step.mask[a, k]]
    match, alpha, confidence = step.match.tolist(), step.acceptance.tolist(), step.confidence.tolist()
    assert found["accuracy"] == pytest.approx(sum(match[a][k] for a, k in slots) / len(slots))
    for position in range(K - step.first):
        here = [match[a][k] for a, k in slots if k == position + step.first]
        assert found["accuracy_per_position"][position] == pytest.approx(sum(here) / len(here))
    assert found["acceptance_rate"] == pytest.approx(sum(alpha[a][k] for a, k in slots) / len(slots))
    covered = sum(int(step.targets[a, k]) >= 0 for a, k in slots)
    assert found["draft_vocab_coverage"] == pytest.approx(covered / len(slots))
    errors = [abs(confidence[a][k] - alpha[a][k]) for a, k in slots]
    assert found["confidence_abs_error"] == pytest.approx(sum(errors) / len(slots))


def prefixes_by_position(step: Step) -> list[list[tuple[float, float]]]:
    """Per position, the prefix products (confidences, alphas) of the blocks supervised there."""
    found: list[list[tuple[float, float]]] = [[] for _ in range(K - step.first)]
    for confidences, alphas in zip(step.blocks(step.confidence), step.blocks(step.acceptance), strict=True):
        for i in range(len(alphas)):
            found[i].append((math.prod(confidences[: i + 1]), math.prod(alphas[: i + 1])))
    return found


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_calibration_of_the_prefix_product_equals_loops(sample_from_anchor):
    step = Step(sample_from_anchor)
    found = step.metrics().means()
    prefixes = prefixes_by_position(step)
    errors = []
    for pairs in prefixes:
        bins: list[list[tuple[float, float]]] = [[] for _ in range(20)]
        for predicted, outcome in pairs:
            bins[min(19, math.floor(predicted * 20))].append((predicted, outcome))
        gaps = [abs(sum(p for p, _ in each) / len(each) - sum(o for _, o in each) / len(each)) for each in bins if each]
        counts = [len(each) for each in bins if each]
        errors.append(sum(gap * count for gap, count in zip(gaps, counts, strict=True)) / len(pairs))
    assert found["confidence_ece"] == pytest.approx(errors)
    flat = [predicted - outcome for pairs in prefixes for predicted, outcome in pairs]
    assert found["confidence_prefix_bias"] == pytest.approx(sum(flat) / len(flat))


def test_confidences_equal_to_the_acceptance_rate_are_calibrated():
    step = Step(True)
    found = acceptance_metrics(
        step.acceptance, step.mask, sample_from_anchor=True, confidence_AK=step.acceptance
    ).means()
    assert found["confidence_ece"] == pytest.approx([0.0] * K)
    assert found["confidence_prefix_bias"] == found["confidence_abs_error"] == 0.0


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_merged_parts_of_unequal_size_equal_the_whole(sample_from_anchor):
    step = Step(sample_from_anchor)
    whole = step.metrics().means()
    parts = [step.metrics(slice(0, 7)), step.metrics(slice(7, 41)), step.metrics(slice(41, A))]
    merged = sum(parts, StepMetrics()).means()
    assert merged.keys() == whole.keys()
    for name, value in whole.items():
        assert merged[name] == pytest.approx(value), name


def test_a_step_without_acceptance_rates_leaves_those_of_other_steps_as_they_are():
    with_rates = acceptance_metrics(torch.tensor([[0.5]]), torch.tensor([[True]]), sample_from_anchor=True)
    without = token_metrics(
        torch.tensor([[True]]), torch.tensor([[0]]), torch.tensor([[True]]), sample_from_anchor=True
    )
    assert (with_rates + without).means() == {**with_rates.means(), **without.means()}
    assert (without + with_rates).means()["acceptance_rate"] == 0.5


def test_the_dflash_layout_reports_one_position_less_whatever_its_slot_zero_holds():
    mask, values = torch.tensor([[False, True, True]]), torch.tensor([[0.0, 0.5, 0.5]])
    found = acceptance_metrics(values, mask, sample_from_anchor=False).means()
    assert found["survival_sampling"] == pytest.approx([0.5, 0.25])
    assert found["expected_length_sampling"] == pytest.approx(1.75)


def test_a_step_with_nothing_supervised_has_no_rates_and_adds_nothing():
    step, empty = Step(True), Step(True)
    empty.mask = torch.zeros_like(empty.mask)
    nothing = empty.metrics().means()
    flat = [x for value in nothing.values() for x in (value if isinstance(value, list) else [value])]
    assert all(map(math.isnan, flat))
    merged, alone = (step.metrics() + empty.metrics()).means(), step.metrics().means()
    assert merged == alone
    assert StepMetrics().means() == {}


def test_metrics_carry_no_gradient():
    acceptance = torch.rand(2, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    metrics = acceptance_metrics(
        acceptance, torch.ones(2, 3, dtype=torch.bool), sample_from_anchor=True, confidence_AK=acceptance
    )
    assert not any(part.requires_grad for pair in metrics.pairs.values() for part in pair)


def test_forming_metrics_never_waits_for_the_device():
    values, mask = torch.empty(2, 3, device="meta"), torch.empty(2, 3, dtype=torch.bool, device="meta")
    step = token_metrics(mask, values.long(), mask, sample_from_anchor=True)
    step += acceptance_metrics(values, mask, sample_from_anchor=True, confidence_AK=values)
    merged = step + step
    with pytest.raises(RuntimeError, match="meta"):  # what reads a number on a device without numbers
        merged.means()
