"""An answer as a training row: where the loss is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.answer_rows import AnswerRow


def example_row(row: AnswerRow) -> tuple[str, list[int], list[int]]:
    """(id, input_ids, loss_mask) of an answer: the loss is on the verifier's own tokens, its stop token included."""
    prompt, answer = row.prompt_token_ids, row.token_ids
    return row.id, [*prompt, *answer], [0] * len(prompt) + [1] * len(answer)
