"""The built-in prompt set: templates x topics over nine kinds of request, some topics held out.

Each `data/prompts_<subset>.yaml` holds groups. A group crosses its `templates` with its `topics` (training)
or its `held_out` topics (evaluation), so that no evaluation topic is ever trained on. A topic is a text
(the template's `{topic}`) or a record of fields whose first field identifies it; a list in a record stands
for one prompt per entry. `vary` crosses further fields; `numbers` draws integers from inclusive ranges, one
draw per prompt, the same anywhere.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from tasks.prompt_rows import Message, PromptRow, PromptsError, ngrams, normalised, row_text

DATA_DIR = Path(__file__).resolve().parent / "data"
SUBSETS = (
    "HumanEval",
    "math_reasoning",
    "qa",
    "question",
    "rag",
    "summarization",
    "tool_call",
    "translation",
    "writing",
)
LICENSE = "apache-2.0"
OVERLAP_WORDS = 8

Split = Literal["topics", "held_out"]


@dataclass(frozen=True)
class BuiltinPrompt:
    """One rendered prompt and what of it is not template."""

    row: PromptRow
    topic: str
    """Text that identifies the topic; a held-out one occurs in no training prompt."""
    values: tuple[str, ...]
    """Field values that the template received."""


def builtin_digest() -> str:
    """Sha256 over the data files, so that editing a template makes a new artifact."""
    digest = hashlib.sha256()
    for path in sorted(DATA_DIR.glob("prompts_*.yaml")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def training_prompts(seed: int) -> list[BuiltinPrompt]:
    """All built-in training prompts: shuffled within each subset, then the subsets in turn.

    Any prefix is balanced over the nine subsets for as long as none of them is used up.
    """
    columns = []
    for subset in SUBSETS:
        prompts = _distinct(_expand(subset, "topics"))
        random.Random(f"{seed}:train:{subset}").shuffle(prompts)
        columns.append(prompts)
    turns = itertools.zip_longest(*columns)
    return [prompt for turn in turns for prompt in turn if prompt is not None]


def evaluation_prompts(seed: int) -> dict[str, list[BuiltinPrompt]]:
    """Held-out prompts by subset, in a fixed order: a smaller number of them is a prefix of a larger one.

    Topics take turns, so that the first few prompts of a subset speak about different things.
    """
    ordered: dict[str, list[BuiltinPrompt]] = {}
    for subset in SUBSETS:
        prompts = _distinct(_expand(subset, "held_out"))
        random.Random(f"{seed}:evaluation:{subset}").shuffle(prompts)
        seen: dict[str, int] = {}
        turns = []
        for prompt in prompts:
            turns.append(seen.get(prompt.topic, 0))
            seen[prompt.topic] = turns[-1] + 1
        order = sorted(range(len(prompts)), key=lambda index: turns[index])
        ordered[subset] = [prompts[index] for index in order]
    return ordered


def check_disjoint(training: Iterable[PromptRow], evaluation: Sequence[BuiltinPrompt]) -> dict[str, int]:
    """Verify that built-in training rows and held-out prompts have no content in common.

    Checked: identical texts, held-out topics named in a training row, and runs of eight words of the held-out
    fields (templates excluded) that occur in a training row.

    Returns:
        How many rows, topics and word runs were compared.

    Raises:
        PromptsError: naming the first overlap of each kind and how many there are.
    """
    texts = [normalised(row_text(row)) for row in training]
    held_texts = {normalised(row_text(prompt.row)) for prompt in evaluation}
    topics = sorted({normalised(prompt.topic) for prompt in evaluation}, key=len, reverse=True)
    runs = {gram for prompt in evaluation for value in prompt.values for gram in ngrams(value, OVERLAP_WORDS)}
    pattern = re.compile(r"(?<!\w)(?:" + "|".join(re.escape(topic) for topic in topics) + r")(?!\w)")
    identical = [text for text in texts if text in held_texts]
    named = [(match.group(), text) for text in texts if topics and (match := pattern.search(text))]
    shared = [text for text in texts if runs and not runs.isdisjoint(ngrams(text, OVERLAP_WORDS))]
    if identical or named or shared:
        raise PromptsError(
            f"built-in training prompts overlap the evaluation prompts: {len(identical)} identical, "
            f"{len(named)} name a held-out topic, {len(shared)} share {OVERLAP_WORDS} words in a row; first: "
            f"{(identical or named or shared)[0]!r}. Change the topic in tasks/data/prompts_*.yaml"
        )
    return {
        "disjoint_training_rows": len(texts),
        "disjoint_evaluation_rows": len(held_texts),
        "disjoint_topics": len(topics),
        "disjoint_word_runs": len(runs),
    }


def _expand(subset: str, split: Split) -> Iterator[BuiltinPrompt]:
    path = DATA_DIR / f"prompts_{subset}.yaml"
    with path.open(encoding="utf-8") as stream:
        data = yaml.load(stream, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    for group in data["groups"]:
        for topic in group[split]:
            for fields in _field_sets(topic, group.get("vary", {})):
                for template in group["templates"]:
                    yield _render(subset, template, fields, group.get("numbers", {}))


def _field_sets(topic: str | Mapping[str, Any], vary: Mapping[str, list[str]]) -> Iterator[dict[str, str]]:
    record = {"topic": topic} if isinstance(topic, str) else dict(topic)
    choices = {**record, **vary}
    options = [value if isinstance(value, list) else [value] for value in choices.values()]
    for combination in itertools.product(*options):
        yield dict(zip(choices, combination, strict=True))


def _render(
    subset: str,
    template: str | Mapping[str, str],
    fields: Mapping[str, str],
    numbers: Mapping[str, list[int]],
) -> BuiltinPrompt:
    parts = {"text": template} if isinstance(template, str) else dict(template)
    draw = random.Random(f"{parts['text']}|{sorted(fields.items())}")
    drawn = {name: draw.randint(low, high) for name, (low, high) in numbers.items()}
    messages: list[Message] = []
    for part, role in (("system", "system"), ("text", "user")):
        if part in parts:
            messages.append({"role": role, "content": parts[part].format(**fields, **drawn)})
    values = tuple(fields.values())
    row = PromptRow.create(subset, messages, source="builtin", license_name=LICENSE)
    return BuiltinPrompt(row, values[0], values)


def _distinct(prompts: Iterable[BuiltinPrompt]) -> list[BuiltinPrompt]:
    return list({prompt.row.id: prompt for prompt in prompts}.values())
