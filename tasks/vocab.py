"""The draft vocabulary: which tokens the drafter may propose, and how much of held-out text that covers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.recipe import Recipe, RecipeError
from tasks.server_specs import text_config, verifier_config
from tasks.stage import Stage, StageContext
from tasks.verifier import verifier_folder

if TYPE_CHECKING:
    import torch

    from dspark_model.dataset import Examples

LADDER = (8192, 16384, 24576, 32768, 49152, 65536, 98304, 131072)


def identity(recipe: Recipe) -> dict[str, Any]:
    """The whole section."""
    return recipe.vocab.model_dump()


def build(context: StageContext) -> Mapping[str, int | float | str]:
    """Choose the draft vocabulary from the training answers and measure its coverage."""
    import torch
    from safetensors.torch import save_file

    from dspark_model.dataset import Examples
    from dspark_model.vocab import choose_draft_vocab, coverage, draft_to_verifier_ids

    folder = verifier_folder(context.parents["verifier"])
    vocab_size = int(text_config(folder)["vocab_size"])
    always = always_kept(folder, vocab_size)
    counts_V = token_counts(Examples(context.parents["examples"] / "train.safetensors"), vocab_size)
    held_out_V = token_counts(Examples(context.parents["examples"] / "validation.safetensors"), vocab_size)
    size, reason, table = _choose_size(context.recipe, counts_V, held_out_V, always)
    for line in (*table, reason):
        context.log.info("%s", line)
    t2d = choose_draft_vocab(counts_V, size, always)
    d2t = draft_to_verifier_ids(t2d) - torch.arange(size)
    save_file({"t2d": t2d, "d2t": d2t}, context.output / "vocab.safetensors")
    report: dict[str, int | float | str] = {
        "draft_vocab_size": size,
        "verifier_vocab_size": vocab_size,
        "always_kept": len(always),
        "train_coverage": coverage(counts_V, t2d),
        "validation_coverage": coverage(held_out_V, t2d),
        "distinct_train_tokens": int((counts_V > 0).sum()),
        "reason": reason,
    }
    (context.output / "vocab.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def _choose_size(
    recipe: Recipe, counts_V: torch.Tensor, held_out_V: torch.Tensor, always: tuple[int, ...]
) -> tuple[int, str, list[str]]:
    """(size, why, table of sizes and what they cover of held-out answers).

    Raises:
        RecipeError: a size that the verifier does not have, or that has no room for what is always kept.
    """
    from dspark_model.vocab import choose_draft_vocab, coverage

    wanted, vocab_size = recipe.vocab.draft_vocab_size, counts_V.shape[0]
    if isinstance(wanted, int) and not len(always) <= wanted <= vocab_size:
        raise RecipeError(
            f"vocab.draft_vocab_size={wanted} must lie between {len(always)}, the special tokens that are always kept, "
            f"and {vocab_size}, the verifier's vocabulary: change it, or say `full` or `auto`"
        )
    losses = {
        size: 1 - coverage(held_out_V, choose_draft_vocab(counts_V, size, always))
        for size in ladder(vocab_size, len(always), wanted if isinstance(wanted, int) else None)
    }
    table = ["draft vocabulary   held-out answer tokens that cannot be proposed"]
    table += [f"{size:>16,}   {100 * loss:.3f} %" for size, loss in losses.items()]
    if wanted == "full":
        return vocab_size, f"draft vocabulary: the verifier's whole {vocab_size:,} tokens, as the recipe says", table
    if wanted != "auto":
        return wanted, f"draft vocabulary: {wanted:,} of {vocab_size:,} tokens, as the recipe says", table
    bound = recipe.vocab.max_coverage_loss
    size = next(size for size, loss in losses.items() if loss <= bound)
    if size == vocab_size:
        what = f"the verifier's whole {size:,} tokens, because no smaller size stays within"
    else:
        what = f"{size:,} of {vocab_size:,} tokens, the smallest size whose {100 * losses[size]:.3f} % stay within"
    return size, f"draft vocabulary: {what} vocab.max_coverage_loss={bound:g} of held-out answer tokens", table


def ladder(vocab_size: int, smallest: int, chosen: int | None = None) -> list[int]:
    """Sizes to compare, ascending: the usual ones that fit, the chosen one, and the whole vocabulary."""
    sizes = {size for size in LADDER if smallest <= size < vocab_size}
    return sorted(sizes | {vocab_size} | ({chosen} if chosen is not None else set()))


def always_kept(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Special tokens, tokens added to the tokenizer, and end-of-turn ids, ascending.

    A drafter that cannot propose an end of turn loses the last step of every answer; markers of thinking and of tool
    calls are rare in data and certain in use.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder, *end_tokens(folder)}
    return tuple(sorted(token for token in ids if 0 <= token < vocab_size))


def end_tokens(folder: Path) -> tuple[int, ...]:
    """End-of-turn ids, of generation_config.json or else config.json."""
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text()) if path.is_file() else {}
    ids = generation.get("eos_token_id")
    if ids is None:
        ids = text_config(folder).get("eos_token_id", verifier_config(folder).get("eos_token_id"))
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def token_counts(examples: Examples, vocab_size: int) -> torch.Tensor:
    """Occurrences [V] of each id among supervised tokens."""
    import torch

    return torch.bincount(examples.input_ids[examples.loss_mask.bool()].long(), minlength=vocab_size)


STAGE = Stage("vocab", 2, ("verifier", "examples"), identity, build)
