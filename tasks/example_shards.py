"""One shard of answers as training rows: clipped, filtered, and laid end to end in numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tasks.recipe_data import ExamplesSection
from tasks.token_columns import ragged, spans

if TYPE_CHECKING:
    import pyarrow as pa

# Taken over from the answers as they are.
_TEXT_COLUMNS = ("id", "conversation", "turn", "subset", "source", "finish_reason")


@dataclass(frozen=True)
class ExampleShard:
    """Usable rows, and what was left out.

    Attributes:
        rows: a table with a row per example: the answer's columns and its lengths in tokens.
        input_ids: int32 [total], rows end to end.
        loss_mask: uint8 [total], 1 where a token is the verifier's.
        dropped: rows left out, by reason.
        clipped: rows that were longer than examples.max_length.
        clipped_supervised_tokens: answer tokens that this cost.
    """

    rows: pa.Table
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    dropped: dict[str, int]
    clipped: int
    clipped_supervised_tokens: int

    def select(self, inside: bool, conversations: set[str]) -> ExampleShard:
        """Only the rows whose conversation is (or is not) among `conversations`."""
        import pyarrow as pa

        names = self.rows.column("conversation").to_pylist()
        wanted = np.array([(name in conversations) == inside for name in names], dtype=bool)
        lengths = self.rows.column("tokens").to_numpy().astype(np.int64)
        places = spans((np.cumsum(lengths) - lengths)[wanted], lengths[wanted])
        return ExampleShard(
            self.rows.filter(pa.array(wanted)), self.input_ids[places], self.loss_mask[places], {}, 0, 0
        )


def make_shard(table: pa.Table, settings: ExamplesSection, vocab_size: int) -> ExampleShard:
    """Lay out a table of answers.

    Raises:
        ExamplesError: a token id that the verifier does not have.
    """
    import pyarrow as pa

    prompts, prompt_offsets = ragged(table, "prompt_token_ids")
    answers, answer_offsets = ragged(table, "token_ids")
    _check_ids(table, prompts, prompt_offsets, vocab_size)
    _check_ids(table, answers, answer_offsets, vocab_size)
    prompt_tokens, answer_tokens = np.diff(prompt_offsets), np.diff(answer_offsets)
    tokens = np.minimum(prompt_tokens + answer_tokens, settings.max_length)
    supervised = np.maximum(tokens - prompt_tokens, 0)
    cut_off = np.array([reason == "length" for reason in table.column("finish_reason").to_pylist()], dtype=bool)
    truncated = cut_off & (settings.truncated_answers == "drop")
    short = (supervised < settings.min_supervised_tokens) & ~truncated
    keep = ~(short | truncated)
    clipped = keep & (prompt_tokens + answer_tokens > settings.max_length)

    prompt_kept, kept = (tokens - supervised)[keep], tokens[keep]
    starts = np.cumsum(kept) - kept
    input_ids = np.empty(int(kept.sum()), dtype=np.int32)
    loss_mask = np.zeros(len(input_ids), dtype=np.uint8)
    answer_places = spans(starts + prompt_kept, supervised[keep])
    input_ids[spans(starts, prompt_kept)] = prompts[spans(prompt_offsets[:-1][keep], prompt_kept)]
    input_ids[answer_places] = answers[spans(answer_offsets[:-1][keep], supervised[keep])]
    loss_mask[answer_places] = 1
    rows = table.select(list(_TEXT_COLUMNS)).filter(pa.array(keep))
    columns = {"prompt_tokens": prompt_kept, "supervised_tokens": supervised[keep], "tokens": kept}
    for name, values in columns.items():
        rows = rows.append_column(name, pa.array(values.astype(np.int32)))
    rows = rows.append_column("clipped", pa.array(clipped[keep]))
    lost = int((answer_tokens - supervised)[clipped].sum())
    dropped = {"short": int(short.sum()), "truncated": int(truncated.sum())}
    return ExampleShard(rows, input_ids, loss_mask, dropped, int(clipped.sum()), lost)


def _check_ids(table: pa.Table, values: NDArray[np.int32], offsets: NDArray[np.int64], vocab_size: int) -> None:
    from tasks.examples import ExamplesError

    wrong = (values < 0) | (values >= vocab_size)
    if wrong.any():
        place = int(wrong.argmax())
        row = int(np.searchsorted(offsets, place, side="right")) - 1
        raise ExamplesError(
            f"answer {table.column('id')[row].as_py()!r} holds token {values[place]}, the verifier has "
            f"{vocab_size}: it was answered by a server with another tokenizer; delete the responses artifact, check "
            "serving.urls and run again"
        )
