"""Conversation data sets of the Hugging Face hub, pinned to a commit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tasks.prompt_files import Record
from tasks.prompt_rows import PromptsError
from tasks.recipe_data import PromptSource

# A streamed data set is shuffled within a window of so many records.
SHUFFLE_BUFFER = 10_000
_SHA = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Preset:
    """A data set that people train drafters on, under a short name."""

    repo_id: str
    split: str = "train"


PRESETS = {
    "open-perfectblend": Preset("mlabonne/open-perfectblend"),
    "ultrachat": Preset("HuggingFaceH4/ultrachat_200k", split="train_sft"),
    "magpie": Preset("Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered"),
    "sharegpt": Preset("Aeala/ShareGPT_Vicuna_unfiltered"),
}


def preset_of(source: PromptSource) -> Preset:
    """The repository and split that a source means."""
    preset = PRESETS.get(source.source, Preset(source.source))
    return Preset(preset.repo_id, source.split or preset.split)


@dataclass(frozen=True)
class HubFacts:
    """What the hub says of a data set: commit and licence."""

    sha: str
    license: str | None


@cache
def hub_facts(repo_id: str, revision: str | None) -> HubFacts:
    """Ask the hub, once per process.

    Raises:
        PromptsError: it cannot be asked, or knows no such data set or revision.
    """
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info(repo_id, revision=revision)
    except Exception as error:
        raise PromptsError(
            f"prompts.sources: the hub was asked for data set {repo_id!r} at {revision or 'its newest revision'} and "
            f"said: {error}. Check the name; without a connection, give its commit as `revision` and a `license`, and "
            "have it in the local cache"
        ) from error
    card = info.card_data
    named = card.get("license") if card else None
    return HubFacts(str(info.sha), ", ".join(named) if isinstance(named, list) else named)


def commit_of(source: PromptSource) -> str:
    """The commit whose records are read; a full sha needs no connection."""
    if source.revision and _SHA.fullmatch(source.revision):
        return source.revision
    return hub_facts(preset_of(source).repo_id, source.revision).sha


def license_of(source: PromptSource) -> str:
    """What the recipe says, else the hub, else `unknown`."""
    if source.license:
        return source.license
    return hub_facts(preset_of(source).repo_id, commit_of(source)).license or "unknown"


def hub_records(source: PromptSource, seed: int) -> Iterator[tuple[str, Record]]:
    """Yield (where, record) in a seeded order.

    Raises:
        PromptsError: the data set cannot be read.
    """
    from datasets import load_dataset

    preset = preset_of(source)
    try:
        loaded = load_dataset(
            preset.repo_id, source.config, split=preset.split, revision=commit_of(source), streaming=source.streaming
        )
    except (ValueError, FileNotFoundError) as error:  # of `datasets`: unknown split or configuration, no data files
        raise PromptsError(f"prompts.sources: {preset.repo_id!r}, split {preset.split!r}: {error}") from error
    window = {"buffer_size": SHUFFLE_BUFFER} if source.streaming else {}
    for number, record in enumerate(loaded.shuffle(seed=seed, **window), start=1):
        yield f"shuffled record {number}", record
