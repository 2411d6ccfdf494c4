"""Training rows: token ids with the loss on the verifier's own tokens, split by conversation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.recipe import Recipe
from tasks.stage import Stage, StageContext

if TYPE_CHECKING:
    import pyarrow as pa

    from tasks.example_shards import ExampleShard

ROWS = "rows.parquet"
SPLITS = ("train", "validation")


class ExamplesError(ValueError):
    """Answers that cannot become training rows; says which, and what to do."""


class TooFewExamplesError(ExamplesError):
    """Not enough usable conversations for a training and a validation split."""


def identity(recipe: Recipe) -> dict[str, Any]:
    """The whole section."""
    return recipe.examples.model_dump()


def build(context: StageContext) -> Mapping[str, int | float | str]:
    """Turn answers into examples and hold out conversations for validation."""
    from tasks.example_report import write_report

    kept = _read(context)
    held_out = held_out_ids(
        [name for shard in kept.shards for name in shard.rows.column("conversation").to_pylist()],
        context.recipe.examples.validation_share,
        context.recipe.examples.seed,
    )
    tables = [_write_split(context.output, split, kept.shards, held_out) for split in SPLITS]
    counts = {**_split_counts(tables), "dropped": sum(kept.dropped.values())}
    counts |= {f"dropped_{reason}": number for reason, number in kept.dropped.items()}
    counts |= {"clipped": kept.clipped, "clipped_supervised_tokens": kept.clipped_supervised_tokens}
    write_report(context, tables, counts)
    return counts


@dataclass
class _Kept:
    shards: list[ExampleShard]
    dropped: dict[str, int]
    clipped: int
    clipped_supervised_tokens: int


def _read(context: StageContext) -> _Kept:
    """All usable rows, shard by shard.

    Raises:
        TooFewExamplesError: fewer than two conversations are usable.
        ExamplesError: an id occurs twice, or a token is none of the verifier's.
    """
    from tasks.answer_rows import answer_tables
    from tasks.example_shards import make_shard
    from tasks.server_specs import text_config
    from tasks.verifier import verifier_folder

    settings = context.recipe.examples
    vocab_size = text_config(verifier_folder(context.parents["verifier"]))["vocab_size"]
    kept = _Kept([], {"short": 0, "truncated": 0}, 0, 0)
    seen: set[str] = set()
    total = 0
    for table in answer_tables(context.parents["responses"]):
        ids = table.column("id").to_pylist()
        total += len(ids)
        if len(seen | set(ids)) < len(seen) + len(ids):
            twice = next(name for index, name in enumerate(ids) if name in seen or name in ids[:index])
            raise ExamplesError(f"answer {twice!r} occurs twice: delete the responses artifact and run again")
        seen.update(ids)
        shard = make_shard(table, settings, vocab_size)
        kept.shards.append(shard)
        for reason, number in shard.dropped.items():
            kept.dropped[reason] += number
        kept.clipped += shard.clipped
        kept.clipped_supervised_tokens += shard.clipped_supervised_tokens
    conversations = {name for shard in kept.shards for name in shard.rows.column("conversation").to_pylist()}
    if len(conversations) < 2:
        raise TooFewExamplesError(
            f"{sum(len(shard.rows) for shard in kept.shards)} of {total} answers are usable, of {len(conversations)} "
            f"conversations (dropped: {kept.dropped['short']} with fewer than examples.min_supervised_tokens="
            f"{settings.min_supervised_tokens} tokens, {kept.dropped['truncated']} cut off at "
            f"responses.max_new_tokens={context.recipe.responses.max_new_tokens}): too few to train and validate; "
            "raise prompts.num_prompts, or keep more of them"
        )
    return kept


def _write_split(folder: Path, split: str, shards: list[ExampleShard], held_out: set[str]) -> pa.Table:
    """Write `<split>.safetensors`; returns the rows' table."""
    import numpy as np
    import pyarrow as pa
    import torch

    from dspark_model.dataset import write_joined_examples

    parts = [shard.select(split == "validation", held_out) for shard in shards]
    rows = pa.concat_tables([part.rows for part in parts])
    write_joined_examples(
        folder / f"{split}.safetensors",
        rows.column("id").to_pylist(),
        torch.from_numpy(np.concatenate([part.input_ids for part in parts])),
        torch.from_numpy(np.concatenate([part.loss_mask for part in parts])),
        torch.from_numpy(rows.column("tokens").to_numpy().astype(np.int64)),
    )
    return rows.append_column("split", pa.array([split] * len(rows)))


def _split_counts(tables: list[pa.Table]) -> dict[str, int | float | str]:
    counts: dict[str, int | float | str] = {}
    for split, table in zip(SPLITS, tables, strict=True):
        counts[f"{split}_documents"] = len(table)
        counts[f"{split}_conversations"] = len(set(table.column("conversation").to_pylist()))
        counts[f"{split}_supervised_tokens"] = int(table.column("supervised_tokens").to_numpy().sum())
    return counts


def held_out_ids(conversation_ids: list[str], share: float, seed: int) -> set[str]:
    """The conversations held out: those with the smallest keyed hashes, so that adding data moves few.

    At least one, and never all.
    """
    ranked = sorted(set(conversation_ids), key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).hexdigest())
    count = min(max(1, round(share * len(ranked))), len(ranked) - 1) if ranked else 0
    return set(ranked[:count])


def read_rows(folder: Path) -> pa.Table:
    """The rows of an examples artifact, train then validation, in the order of their safetensors."""
    from pyarrow import parquet

    return parquet.read_table(folder / ROWS)


STAGE = Stage("examples", 2, ("verifier", "responses"), identity, build)
