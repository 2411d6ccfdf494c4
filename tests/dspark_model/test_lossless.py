"""What is emitted is distributed exactly as the verifier alone would emit it: every random choice is enumerated.

First the acceptance rules by themselves in float64, on tables of distributions; then `decode` whole, each of its draws
replaced by all that it could have been.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from dspark_model.batch import PackedRow, Slots
from dspark_model.decoding import Decoded, Sampler, decode
from dspark_model.drafter import DrafterOutput, DSparkDrafter
from dspark_model.verification import AcceptanceRule, Verdict, accept_block, accept_greedy, accept_sampling
from tests.dspark_model.decoding_models import TableVerifier, chain_drafter, noisy_drafter
from tests.dspark_model.tiny import tiny_config

Prefix = tuple[int, ...]
Table = dict[Prefix, Tensor]
Law = dict[Prefix, float]
RULES = {"token by token": accept_sampling, "block": accept_block}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


def table(seed: int, V: int, depth: int, kept: Prefix | None = None, sharpness: float = 2.0) -> Table:
    """A distribution [V] after every prefix of up to `depth` tokens; zero outside `kept`."""
    g = torch.Generator().manual_seed(seed)
    allowed = torch.zeros(V, dtype=torch.bool)
    allowed[list(range(V) if kept is None else kept)] = True
    found = {}
    for length in range(depth + 1):
        for prefix in itertools.product(range(V), repeat=length):
            logits = sharpness * torch.randn(V, generator=g, dtype=torch.float64)
            found[prefix] = logits.masked_fill(~allowed, float("-inf")).softmax(-1)
    return found


def drafts(q: Table, K: int, stops: set[Prefix]) -> Iterator[tuple[float, Prefix]]:
    """Every block that could be drafted, with its probability; a block ends at K tokens or at a prefix in `stops`."""
    open_blocks: list[tuple[float, Prefix]] = [(1.0, ())]
    while open_blocks:
        weight, prefix = open_blocks.pop()
        if len(prefix) == K or prefix in stops:
            yield weight, prefix
            continue
        open_blocks += [(weight * float(q[prefix][x]), (*prefix, x)) for x in q[prefix].nonzero().flatten().tolist()]


def judge(rule: AcceptanceRule, p: Table, q: Table, block: Prefix) -> Verdict:
    target_CV = torch.stack([p[block[:i]] for i in range(len(block) + 1)])
    draft_LV = torch.stack([q[block[:i]] for i in range(len(block))]) if block else target_CV[:0]
    verdict = rule(target_CV, draft_LV, torch.tensor(block, dtype=torch.long))
    assert verdict.count_C.shape == (len(block) + 1,)
    assert verdict.next_CV.shape == target_CV.shape
    for law in (verdict.count_C, *verdict.next_CV):
        assert float(law.min()) >= 0
        assert float(law.sum()) == pytest.approx(1, abs=1e-12)
    return verdict


def emitted(rule: AcceptanceRule, p: Table, q: Table, blocks: Iterator[tuple[float, Prefix]]) -> Law:
    """Law of one step's output: accepted tokens and the verifier's own."""
    law: Law = defaultdict(float)
    for weight, block in blocks:
        verdict = judge(rule, p, q, block)
        for n, count in enumerate(verdict.count_C.tolist()):
            for x, chance in enumerate(verdict.next_CV[n].tolist()):
                law[*block[:n], x] += weight * count * chance
    return law


def continued(law: Law, p: Table, length: int) -> Law:
    """Each output continued by the verifier alone to `length` tokens."""
    while any(len(prefix) < length for prefix in law):
        longer: Law = defaultdict(float)
        for prefix, weight in law.items():
            if len(prefix) == length:
                longer[prefix] += weight
            else:
                for x, chance in enumerate(p[prefix].tolist()):
                    longer[*prefix, x] += weight * chance
        law = longer
    return law


def one_hot(p: Table, pick: Callable[[Tensor], Tensor]) -> Table:
    return {prefix: torch.eye(len(law), dtype=torch.float64)[pick(law)] for prefix, law in p.items()}


def distance(law: Law, p: Table, length: int) -> float:
    """Largest difference between a law and the verifier's own."""
    found, alone = continued(law, p, length), continued({(): 1.0}, p, length)
    return max(abs(found.get(text, 0.0) - alone.get(text, 0.0)) for text in {*found, *alone})


@every_rule
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("V", "K", "kept"), [(2, 4, None), (3, 3, None), (4, 2, None), (4, 2, (1, 3)), (3, 3, (2,))])
def test_one_step_emits_what_the_verifier_would(rule, V, K, kept, seed):
    p, q = table(seed, V, K), table(100 + seed, V, K, kept)
    assert distance(emitted(rule, p, q, drafts(q, K, set())), p, K + 1) < 1e-12


@every_rule
@pytest.mark.parametrize("seed", range(4))
def test_a_block_may_end_where_its_tokens_so_far_say(rule, seed):
    p, q, stops = table(seed, 3, 3), table(100 + seed, 3, 3), {(1,), (0, 2), (2, 0), (2, 1)}
    assert {len(block) for _, block in drafts(q, 3, stops)} == {1, 2, 3}
    assert distance(emitted(rule, p, q, drafts(q, 3, stops)), p, 4) < 1e-12
    assert distance(emitted(rule, p, q, drafts(q, 3, {()})), p, 4) < 1e-12, "no proposal at all"


@every_rule
def test_drafts_may_be_certain(rule):
    """An engine's greedy drafts under a sampling verifier: all of q on one token, likely or not."""
    p = table(0, 3, 2)
    for q in (one_hot(p, Tensor.argmax), one_hot(p, Tensor.argmin)):
        assert distance(emitted(rule, p, q, drafts(q, 2, set())), p, 3) < 1e-12


@every_rule
def test_the_verifiers_own_drafts_are_all_accepted(rule):
    p = table(0, 3, 3)
    assert all(judge(rule, p, p, block).count_C[-1] == pytest.approx(1) for _, block in drafts(p, 3, set()))


@every_rule
def test_a_ratio_that_overflows_after_an_impossible_token_is_no_nan(rule):
    """In float32: p = 0 for the first token, q of the second so small that p / q is infinite."""
    target_CV = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]])
    draft_LV = torch.tensor([[0.5, 0.5], [1e-40, 1.0]])
    verdict = rule(target_CV, draft_LV, torch.tensor([0, 0]))
    assert verdict.count_C.tolist() == [1, 0, 0]
    assert verdict.next_CV[0].tolist() == [0, 1]


def test_a_rule_that_is_not_lossless_is_found_out():
    def without_residual(target_CV: Tensor, draft_LV: Tensor, tokens_L: Tensor) -> Verdict:
        return Verdict(accept_sampling(target_CV, draft_LV, tokens_L).count_C, target_CV)

    p, q = table(0, 3, 2), table(100, 3, 2)
    assert distance(emitted(without_residual, p, q, drafts(q, 2, set())), p, 3) > 1e-3


@every_rule
def test_dropping_a_token_for_what_it_is_would_not_be_lossless(rule):
    """The reason why a slot's confidence may not read the slot's own token."""
    p, q = table(0, 3, 1), table(100, 3, 1)
    peeked = ((weight, () if block == (0,) else block) for weight, block in drafts(q, 1, set()))
    assert distance(emitted(rule, p, q, peeked), p, 2) > 0.01


@pytest.mark.parametrize("seed", range(4))
def test_greedy_verification_emits_the_most_likely_tokens_whatever_was_drafted(seed):
    V, K = 3, 3
    p, q = table(seed, V, K), table(100 + seed, V, K)
    best: Prefix = ()
    while len(best) <= K:
        best = (*best, int(p[best].argmax()))
    for n in range(K + 1):
        for block in itertools.product(range(V), repeat=n):
            matches = next((i for i in range(n) if block[i] != best[i]), n)
            verdict = judge(accept_greedy, p, q, block)
            assert verdict.count_C.tolist() == [i == matches for i in range(n + 1)]
            assert int(verdict.next_CV[matches].argmax()) == best[matches]


@every_rule
def test_sampling_from_certain_distributions_is_greedy_verification(rule):
    p = one_hot(table(0, 3, 3), Tensor.argmax)
    for block in itertools.product(range(3), repeat=3):
        q = {block[:i]: torch.eye(3, dtype=torch.float64)[block[i]] for i in range(3)}
        greedy, sampled = judge(accept_greedy, p, q, block), judge(rule, p, q, block)
        n = int(greedy.count_C.argmax())
        assert torch.equal(sampled.count_C, greedy.count_C)
        assert torch.equal(sampled.next_CV[n], greedy.next_CV[n])


def expected_count(rule: AcceptanceRule, p: Table, q: Table, K: int) -> float:
    return sum(
        weight * sum(n * chance for n, chance in enumerate(judge(rule, p, q, block).count_C.tolist()))
        for weight, block in drafts(q, K, set())
    )


def test_block_verification_accepts_at_least_as_many_on_average():
    gains = []
    for seed in range(20):
        p, q = table(seed, 3, 3), table(100 + seed, 3, 3)
        gains.append(expected_count(accept_block, p, q, 3) - expected_count(accept_sampling, p, q, 3))
    assert min(gains) > -1e-12
    assert max(gains) > 0.02


def test_block_verification_gains_what_its_paper_says():
    """The example that opens arXiv 2403.10444: two tokens, 10/9 accepted of two token by token, 11/9 jointly."""
    prefixes = [prefix for n in range(3) for prefix in itertools.product(range(2), repeat=n)]
    p = dict.fromkeys(prefixes, torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
    q = dict.fromkeys(prefixes, torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))
    assert expected_count(accept_sampling, p, q, 2) == pytest.approx(10 / 9)
    assert expected_count(accept_block, p, q, 2) == pytest.approx(11 / 9)


def every_run(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Decoded]) -> Iterator[tuple[float, Decoded]]:
    """`run` once for each way that its draws can fall out, with the probability of that."""
    scripts: list[list[int]] = [[]]
    while scripts:
        script, drawn, weight = scripts.pop(), [], 1.0

        def draw(_: Sampler, probabilities: Tensor, script=script, drawn=drawn) -> int:
            nonlocal weight
            assert abs(float(probabilities.sum()) - 1) < 1e-5
            if len(drawn) == len(script):
                options = (probabilities > 1e-7).nonzero().flatten().tolist()
                scripts.extend([*script, other] for other in options[1:])
                script.append(options[0])
            drawn.append(script[len(drawn)])
            weight *= float(probabilities[drawn[-1]])
            return drawn[-1]

        monkeypatch.setattr(Sampler, "draw", draw)
        result = run()
        yield weight, result


def remember_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs share most of what they draft from: compute each drafter forward once for all that it reads."""
    forward, known = DSparkDrafter.forward, {}

    def remembered(self: DSparkDrafter, row: PackedRow, anchor_pos_A: Tensor, slots: Slots) -> DrafterOutput:
        read = (row.input_ids_T, row.aux_hidden_TF, anchor_pos_A, *vars(slots).values())
        key = tuple(value.numpy().tobytes() for value in read)
        if key not in known:
            known[key] = forward(self, row, anchor_pos_A, slots)
        return known[key]

    monkeypatch.setattr(DSparkDrafter, "forward", remembered)


@pytest.mark.parametrize(("block", "expected"), [(False, 10 / 9), (True, 11 / 9)])
def test_decoding_gains_what_block_verification_should(block, expected, monkeypatch):
    """The example of `test_block_verification_gains_what_its_paper_says`, decoded."""
    p_V, q_V = torch.tensor([1 / 3, 2 / 3]), torch.tensor([2 / 3, 1 / 3])
    verifier, drafter = TableVerifier(2, 2), chain_drafter(q_V.log().expand(2, 2), block_size=2)
    remember_forwards(monkeypatch)
    verifier.logits_VVV = p_V.log().expand(2, 2, 2)

    def run() -> Decoded:
        return decode(verifier, drafter, [0], max_new_tokens=3, temperature=1.0, block_verification=block)

    first = sum(weight * result.accepted_per_step[0] for weight, result in every_run(monkeypatch, run))
    assert first == pytest.approx(expected, abs=1e-5)


def verifiers_own_law(verifier: TableVerifier, prompt: Prefix, length: int, temperature: float, stops: Prefix) -> Law:
    law: Law = {(): 1.0}
    for _ in range(length):
        longer: Law = defaultdict(float)
        for text, weight in law.items():
            if text and text[-1] in stops:
                longer[text] += weight
                continue
            before, last = (0, *prompt, *text)[-2:]
            for x, chance in enumerate((verifier.logits_VVV[before, last] / temperature).softmax(-1).tolist()):
                longer[*text, x] += weight * chance
        law = longer
    return law


SMALL = {"hidden_size": 4, "mask_token_id": 0, "verifier_num_layers": 2, "aux_hidden_state_layer_ids": (1,)}
CASES = {
    "whole vocabulary": {"vocab": 2, "new": 4},
    "a stop token": {"vocab": 2, "new": 4, "stops": (1,)},
    "reduced vocabulary": {"vocab": 3, "kept": (0, 2), "new": 3},
    "confidence threshold": {"vocab": 2, "new": 4, "threshold": 0.5},
    "reduced, threshold, DFlash layout": {"vocab": 3, "kept": (1, 2), "new": 3, "threshold": 0.5, "anchored": False},
}


@pytest.mark.parametrize("block", [False, True], ids=["token by token", "block"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_decoding_is_distributed_as_the_verifier_alone(case, block, monkeypatch):
    V, kept, anchored, stops = case["vocab"], case.get("kept"), case.get("anchored", True), case.get("stops", ())
    config = tiny_config(
        **SMALL, num_layers=1, layer_kinds=("full",), block_size=2 if anchored else 3, sample_from_anchor=anchored,
        verifier_vocab_size=V, draft_vocab_size=V if kept is None else len(kept),
    )  # fmt: skip
    t2d = None if kept is None else torch.isin(torch.arange(V), torch.tensor(kept))
    verifier, drafter = TableVerifier(V, 4), noisy_drafter(config, t2d, seed=2)

    def run() -> Decoded:
        return decode(
            verifier, drafter, (0, 1), max_new_tokens=case["new"], temperature=0.8, block_verification=block,
            stop_token_ids=stops, confidence_threshold=case.get("threshold"),
        )  # fmt: skip

    remember_forwards(monkeypatch)
    law: Law = defaultdict(float)
    lengths: set[int] = set()
    accepted: set[int] = set()
    for weight, result in every_run(monkeypatch, run):
        law[result.tokens] += weight
        lengths.update(result.proposed_per_step)
        accepted.update(result.accepted_per_step)
    expected = verifiers_own_law(verifier, (0, 1), case["new"], 0.8, stops)
    assert set(law) == set(expected)
    assert max(abs(law[text] - expected[text]) for text in expected) < 1e-5
    assert accepted == {0, 1, 2}
    assert lengths == ({0, 1, 2} if "threshold" in case else {2})


def test_draws_come_from_the_generator_and_from_nowhere_else():
    config = tiny_config(**SMALL, verifier_vocab_size=3, draft_vocab_size=3)
    verifier, drafter, state = TableVerifier(3, 4), noisy_drafter(config), torch.get_rng_state()
    runs = [
        decode(
            verifier, drafter, [0], max_new_tokens=30, temperature=1.0, generator=torch.Generator().manual_seed(seed)
        )
        for seed in (0, 0, 1)
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert runs[0] == runs[1]
    assert runs[0].tokens != runs[2].tokens
