"""What a draft vocabulary leaves out, by source and evaluation subset, for the chosen size and others.

A stage of its own, so that a changed evaluation setting does not make a drafter be trained again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.recipe import Recipe
from tasks.server_specs import text_config
from tasks.stage import Stage, StageContext
from tasks.verifier import verifier_folder
from tasks.vocab import always_kept, ladder, token_counts

if TYPE_CHECKING:
    import torch

RESULT = "coverage.json"
WEIGHT_BYTES = 2


def identity(recipe: Recipe) -> dict[str, Any]:
    """What the ceiling and the cost are computed for."""
    return {
        "num_speculative_tokens": recipe.num_speculative_tokens,
        "block_size": recipe.drafter.block_size,
    }


def build(context: StageContext) -> Mapping[str, int | float | str]:
    """Measure coverage, the acceptance that it allows, and the cost of the output layer, for several sizes."""
    from dspark_model.vocab import choose_draft_vocab
    from tasks.coverage_report import log_lines, markdown, plot_coverage

    folder = verifier_folder(context.parents["verifier"])
    config = text_config(folder)
    vocab_size = int(config["vocab_size"])
    always = always_kept(folder, vocab_size)
    train, groups = _answers(context)
    counts_V = token_counts(train, vocab_size)
    chosen = json.loads((context.parents["vocab"] / "vocab.json").read_text())
    rows = []
    for size in ladder(vocab_size, len(always), chosen["draft_vocab_size"]):
        t2d = choose_draft_vocab(counts_V, size, always)
        rows.append(
            {
                "draft_vocab_size": size,
                "chosen": size == chosen["draft_vocab_size"],
                "coverage": {name: group.coverage(t2d) for name, group in groups.items()},
                "acceptance_length_ceiling": {
                    name: group.ceiling(t2d, context.recipe.num_speculative_tokens) for name, group in groups.items()
                },
                **lm_head_cost(size, int(config["hidden_size"]), context.recipe.drafter.block_size),
            }
        )
    report = {
        "verifier_vocab_size": vocab_size,
        "num_speculative_tokens": context.recipe.num_speculative_tokens,
        "reason": chosen["reason"],
        "tokens": {name: int(group.tokens_T.shape[0]) for name, group in groups.items()},
        "sizes": rows,
    }
    (context.output / RESULT).write_text(json.dumps(report, indent=2) + "\n")
    (context.output / "coverage.md").write_text(markdown(report))
    plot_coverage(report, context.output / "coverage.png")
    for line in log_lines(report):
        context.log.info("%s", line)
    own = next(row for row in rows if row["chosen"])
    return {
        "draft_vocab_size": own["draft_vocab_size"],
        "validation_coverage": own["coverage"]["validation"],
        "acceptance_length_ceiling": own["acceptance_length_ceiling"]["validation"],
        "lm_head_mib": own["lm_head_mib"],
    }


@dataclass(frozen=True)
class AnswerGroup:
    """Answers that are measured together: their tokens [T] end to end, and their places."""

    tokens_T: torch.Tensor
    offsets: list[int]

    def coverage(self, t2d: torch.Tensor) -> float:
        """Share of the tokens that can be proposed."""
        return round(float(t2d[self.tokens_T].double().mean()), 6)

    def ceiling(self, t2d: torch.Tensor, num_speculative_tokens: int) -> float:
        """acceptance_length of a drafter whose only fault is its vocabulary."""
        from dspark_model.metrics import perfect_acceptance

        return round(perfect_acceptance(self.tokens_T, self.offsets, t2d, num_speculative_tokens).acceptance_length, 4)


def lm_head_cost(draft_vocab_size: int, hidden_size: int, block_size: int) -> dict[str, float]:
    """Weights read (bfloat16) and arithmetic of the output layer for one block."""
    weights = draft_vocab_size * hidden_size
    return {
        "lm_head_mib": round(weights * WEIGHT_BYTES / 2**20, 2),
        "lm_head_gflop_per_block": round(2 * weights * block_size / 1e9, 4),
    }


def _answers(context: StageContext) -> tuple[Any, dict[str, AnswerGroup]]:
    """Training examples, and held-out answers by group: all, each source, each subset, each evaluation subset."""
    from dspark_model.dataset import Examples
    from tasks.answer_rows import read_answers
    from tasks.examples import read_rows

    folder = context.parents["examples"]
    train = Examples(folder / "train.safetensors")
    validation = Examples(folder / "validation.safetensors")
    rows = [row for row in read_rows(folder).to_pylist() if row["split"] == "validation"]
    answers = [validation.row(index) for index in range(len(validation))]
    tokens = [ids_T[mask_T] for ids_T, mask_T in answers]
    groups = {"train": _group_of(train), "validation": _group(tokens)}
    for column in ("source", "subset"):
        for value in sorted({row[column] for row in rows}):
            chosen = [own for own, row in zip(tokens, rows, strict=True) if row[column] == value]
            groups[f"{column} {value}"] = _group(chosen)
    return train, groups | _evaluation_groups(read_answers(context.parents["references"]))


def _evaluation_groups(rows: Any) -> dict[str, AnswerGroup]:
    import torch

    found: dict[str, list[torch.Tensor]] = {}
    for row in rows:
        for name in ("evaluation", f"evaluation {row.subset}"):
            found.setdefault(name, []).append(torch.tensor(row.token_ids))
    return {name: _group(found[name]) for name in sorted(found)}


def _group(answers: list[torch.Tensor]) -> AnswerGroup:
    import torch

    lengths = torch.tensor([0, *(answer.shape[0] for answer in answers)])
    return AnswerGroup(torch.cat(answers).long(), lengths.cumsum(0).tolist())


def _group_of(examples: Any) -> AnswerGroup:
    """All answers of a split, without a Python object per row."""
    import torch

    mask_T = examples.loss_mask.bool()
    before_T = torch.cat([torch.zeros(1, dtype=torch.int64), mask_T.long().cumsum(0)])
    return AnswerGroup(examples.input_ids[mask_T].long(), before_T[torch.tensor(examples.offsets)].tolist())


STAGE = Stage("coverage", 1, ("verifier", "references", "examples", "vocab"), identity, build)
