"""Which verifier token fills the slots after the anchor: one that the verifier never reads or writes."""

from __future__ import annotations

import json
from pathlib import Path


class MaskTokenError(ValueError):
    """No token can serve as the mask."""


def choose_mask_token(verifier: Path, wanted: int | None, examples: Path) -> int:
    """The recipe's id, or the tokenizer's mask token, an unused embedding row, or a special token never used.

    Falling back to pad or eos silently ruins acceptance (https://github.com/NVIDIA-NeMo/Automodel/pull/2461), so a
    special token only counts if it is no control token, not in the chat template and absent from the data.

    Args:
        verifier: Hugging Face folder.
        wanted: `drafter.mask_token_id` of the recipe.
        examples: safetensors of the training examples.

    Raises:
        MaskTokenError: the wanted id is used or out of range, or no id is free.
    """
    from transformers import AutoTokenizer

    from dspark_model.dataset import Examples

    tokenizer = AutoTokenizer.from_pretrained(verifier)
    size = json.loads((verifier / "config.json").read_text())["vocab_size"]
    used = set(Examples(examples).input_ids.unique().tolist())
    control = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    if wanted is not None:
        if wanted >= size or wanted in used or wanted in control:
            raise MaskTokenError(
                f"drafter.mask_token_id={wanted} must lie below the verifier's vocab_size={size}, be no control token "
                "and never occur in the training data; leave it null to have one chosen"
            )
        return wanted
    if tokenizer.mask_token_id is not None and tokenizer.mask_token_id not in used:
        return int(tokenizer.mask_token_id)
    template = tokenizer.chat_template or ""
    # Not len(tokenizer): ids may have gaps.
    unused_rows = range(1 + max(tokenizer.get_vocab().values()), size)
    specials = (
        token_id
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and token_id < size and token_id not in control and token.content not in template
    )
    chosen = next((i for i in (*unused_rows[:1], *specials) if i not in used), None)
    if chosen is None:
        raise MaskTokenError(
            "the verifier's tokenizer has no mask token, no unused embedding row and no unused special token: name an "
            "id that never occurs in the data as drafter.mask_token_id"
        )
    return chosen
