"""What is left out and why: every filter against a plain loop, and the mixture of sources against its weights."""

from __future__ import annotations

import logging
import random
import re

import pytest

from tasks.near_duplicates import NearDuplicates, shingles
from tasks.prompt_filters import REASONS, EvaluationGuard, FilterResult, Filters, Limits, token_counter
from tasks.prompt_language import language_of
from tasks.prompt_rows import PromptRow, Unusable, row_text
from tasks.prompt_sources import Stream, mix
from tasks.recipe_data import PromptSource
from tests.tiny_verifier import make_tiny_verifier

LOG = logging.getLogger("t")


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return make_tiny_verifier(tmp_path_factory.mktemp("tiny") / "verifier")


def row(text, role="user", license_name="none"):
    return PromptRow.create("s", [{"role": role, "content": text}], "test", license_name)


def words(one):
    """A stand-in for the tokenizer: ten tokens of template, one per word."""
    return 10 + len(row_text(one).split()), len(one.messages[-1]["content"].split())


def filters(guard=None, count=words, **limits):
    return Filters(Limits(**{"min_prompt_tokens": 2, "max_prompt_tokens": 40, **limits}), count, guard)


def run(chain, candidates, **options):
    result = FilterResult()
    kept = [row_text(one) for one in candidates if chain.passes(one, result, **options)]
    return kept, result


def test_each_candidate_has_one_reason_and_samples_are_kept():
    guard = EvaluationGuard(
        [("qa", "What is a kite?", []), ("rag", "x", ["one two three four five six seven eight nine"])], words=8
    )
    candidates = [
        row("How are you today?"),
        row("how  are you TODAY?"),
        Unusable("no_conversation", "d.jsonl record 3", "{}"),
        Unusable("superseded", "d.jsonl record 4", "again"),
        row("Hm"),
        row("word " * 60),
        row("what is a kite?"),
        row("And now: what is a kite, please?"),
        row("Say: two three four five six seven eight nine!"),
        row("Tell me a joke."),
    ]
    kept, result = run(filters(guard), candidates)
    assert kept == ["How are you today?", "Tell me a joke."]
    assert result.dropped == {
        "duplicate": 1, "unusable": 1, "superseded": 1, "too_short": 1, "too_long": 1, "evaluation_overlap": 3,
    }  # fmt: skip
    assert set(result.dropped) <= set(REASONS)
    assert result.overlaps == {"qa": 2, "rag": 1}
    assert result.candidates == 10 == result.kept + result.dropped.total()
    assert result.samples["too_short"] == ["Hm"]
    assert result.samples["unusable"] == ["d.jsonl record 3: no_conversation: {}"]
    assert result.tokens == 14 + 14
    assert "10 candidates, 2 kept" in result.describe()
    assert "1 no_conversation" in result.describe()


def test_a_duplicate_is_one_over_all_sources_and_tools_make_a_difference():
    chain = filters()
    assert run(chain, [row("How are you?")])[0]
    assert run(chain, [row("how are  you?")])[1].dropped == {"duplicate": 1}
    message = [{"role": "user", "content": "How are you?"}]
    tooled = PromptRow.create("s", message, "t", "n", [{"type": "function", "function": {"name": "f"}}])
    assert run(chain, [tooled])[1].kept == 1
    assert tooled.id != PromptRow.create("s", message, "t", "n").id


def test_overlap_is_that_of_a_plain_double_loop():
    draw = random.Random(0)
    vocabulary = [f"w{i}" for i in range(6)]

    def text(length):
        return " ".join(draw.choice(vocabulary) for _ in range(length))

    for width in (4, 5, 8):
        held_out = [(f"s{i}", text(draw.randint(2, 14))) for i in range(12)]
        guard = EvaluationGuard([(subset, whole, [whole]) for subset, whole in held_out], width)
        for _ in range(150):
            candidate = text(draw.randint(2, 14))
            inside = candidate.split()
            expected = False
            for _, whole in held_out:
                other = whole.split()
                size = width if len(other) >= width else len(other)
                long_enough = len(other) >= 4
                for start in range(len(other) - size + 1):
                    for place in range(len(inside) - size + 1):
                        expected |= long_enough and other[start : start + size] == inside[place : place + size]
                expected |= whole == candidate
            assert (guard.overlap(candidate) is not None) == expected, candidate


def jaccard(one, other):
    a, b = set(), set()
    for text, found in ((one, a), (other, b)):
        tokens = re.findall(r"\w+", text.lower())
        for start in range(len(tokens) - 2):
            found.add(" ".join(tokens[start : start + 3]))
    return len(a & b) / len(a | b)


def test_near_duplicates_are_those_of_exact_similarity():
    draw = random.Random(1)
    originals = [[f"word{draw.randrange(400)}" for _ in range(120)] for _ in range(20)]
    wrong = decided = 0
    for original in originals:
        for changes in (0, 1, 2, 3, 5, 8, 15, 30, 60):
            changed = list(original)
            for place in draw.sample(range(120), changes):
                changed[place] = f"new{draw.randrange(400)}"
            one, other = " ".join(original), " ".join(changed)
            similarity = jaccard(one, other)
            index = NearDuplicates(0.8)
            assert not index.seen(one)
            found = index.seen(other)
            if abs(similarity - 0.8) > 0.1:  # an estimate from 128 hashes is good to about 0.035
                decided += 1
                wrong += found != (similarity >= 0.8)
    assert decided > 100
    assert wrong <= decided * 0.02


def test_short_texts_and_builtin_rows_have_no_near_duplicates():
    index = NearDuplicates(0.8)
    assert not index.seen("What language do most people speak in Ireland?")
    assert not index.seen("What language do most people speak in Ireland?")
    long = "a rather long text about nothing in particular that goes on and on " * 3
    near = [row(long), row(long + "now")]
    limits = {"near_duplicate_similarity": 0.8, "max_prompt_tokens": 99}
    assert run(filters(**limits), near)[1].dropped == {"near_duplicate": 1}
    assert run(filters(**limits), near, alike=True)[1].kept == 2
    assert run(filters(max_prompt_tokens=99), near)[1].kept == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [("one two three four five", 3), ("今天天气很好我们去公园散步吧，今天天气", 15)],
)
def test_shingles(text, size):
    assert len(shingles(text)) == size


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Write a short poem about the rain in spring.", "en"),
        ("Schreibe ein kurzes Gedicht über den Regen im Frühling.", "de"),
        ("Écris un court poème sur la pluie au printemps, s'il te plaît.", "fr"),
        ("请写一首关于春天下雨的短诗，不要超过十行，并且用简单的词语来写", "zh"),
        ("Hi", None),
        ("12 + 34 * 56 = ?", None),
    ],
)
def test_languages(text, code):
    assert language_of(text) == code


def test_other_languages_are_left_out_and_what_cannot_be_told_passes():
    candidates = [
        row("Schreibe ein kurzes Gedicht über den Regen."),
        row("Write a short poem about the rain in spring."),
        row("Hi there!"),
    ]
    kept, result = run(filters(languages=("en",)), candidates)
    assert kept == [row_text(one) for one in candidates[1:]]
    assert result.dropped == {"language": 1}


def test_a_megabyte_of_text_is_not_tokenised():
    def refuse(one):
        raise AssertionError("tokenised")

    _, result = run(filters(count=refuse), [row("x" * 1_000_000), row("word " * 200_000)])
    assert result.dropped == {"too_long": 2}
    assert all(len(sample) <= 300 for sample in result.samples["too_long"])


def test_tokens_are_counted_with_the_chat_template_and_tools(verifier):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(verifier)
    count = token_counter(tokenizer)
    text = "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    assert count(row("Hello there")) == (
        len(tokenizer.encode(text, add_special_tokens=False)),
        len(tokenizer.encode("Hello there", add_special_tokens=False)),
    )
    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}" + tokenizer.chat_template
    tooled = PromptRow.create("s", [{"role": "user", "content": "Hello"}], "t", "n", [{"function": {"name": "f"}}])
    assert count(tooled)[0] > count(row("Hello"))[0]
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    assert count(row("Hello")) is None
    assert run(filters(count=count), [row("Hello")])[1].dropped == {"refused_by_template": 1}


# --- mixing


def stream(name, weight, size):
    return Stream(
        PromptSource(source=f"org/{name}", weight=weight), iter([row(f"{name} says {i}") for i in range(size)])
    )


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (5, 3, 2), (1, 0.1), (7, 7, 1)])
def test_every_beginning_follows_the_weights(weights):
    streams = [stream(f"s{i}", weight, 500) for i, weight in enumerate(weights)]
    seen = dict.fromkeys(range(len(weights)), 0)
    for number, one in enumerate(mix(streams, filters(), 300, LOG), start=1):
        seen[int(row_text(one).split()[0][1:])] += 1
        for index, weight in enumerate(weights):
            assert abs(seen[index] - number * weight / sum(weights)) <= 1.0
    assert sum(seen.values()) == 300


def test_a_source_that_runs_dry_leaves_its_share_and_is_named(caplog):
    streams = [stream("small", 1, 5), stream("large", 1, 500)]
    with caplog.at_level(logging.WARNING):
        kept = list(mix(streams, filters(), 40, LOG))
    assert len(kept) == 40
    assert [one.result.kept for one in streams] == [5, 35]
    assert [record.getMessage() for record in caplog.records] == [
        "source org/small has no more prompts after 5: the others fill its share"
    ]


def test_without_a_limit_everything_is_taken():
    streams = [stream("a", 1, 30), stream("b", 9, 20)]
    assert len(list(mix(streams, filters(), None, LOG))) == 50
