"""Checks of a run's data before anything is spent on it."""

from __future__ import annotations

from dspark_model.config import DrafterConfig
from dspark_model.dataset import Documents


def check_data(train: Documents, validation: Documents, config: DrafterConfig) -> None:
    """Refuse data that would train wrongly, or fail only at the end of the run.

    Raises:
        ValueError: nothing to train on or to choose the best weights by, blocks longer than all documents, states of
            another width than the drafter reads, or a mask token that occurs in the data.
    """
    for split, documents in (("train", train), ("validation", validation)):
        if not any(_drafts(documents, index) for index in range(len(documents))):
            raise ValueError(
                f"the {split} split ({len(documents)} documents) has no answer of two tokens or more: nothing to "
                "draft; use more prompts or raise the share of that split"
            )
        longest = max(documents.lengths)
        if longest <= config.block_size:
            raise ValueError(
                f"block_size={config.block_size} is longer than every {split} document allows: the longest has "
                f"{longest} tokens, and a block needs its anchor and block_size tokens after it; use a smaller "
                "drafter.block_size or longer answers"
            )
        width = documents[0].aux_hidden_TF.shape[1]
        if width != config.aux_width:
            raise ValueError(
                f"{split} hidden states are {width} wide, the drafter reads {config.aux_width} "
                f"(aux_hidden_state_layer_ids={list(config.aux_hidden_state_layer_ids)} of hidden_size="
                f"{config.hidden_size}): they were extracted at other layers; run the hidden_states stage again"
            )
    # It would teach the drafter that a real token means nothing.
    used = int((train.examples.input_ids == config.mask_token_id).sum())
    if used:
        raise ValueError(
            f"mask_token_id={config.mask_token_id} occurs {used} times in the training tokens: choose an id that the "
            "verifier never reads or writes (drafter.mask_token_id)"
        )


def _drafts(documents: Documents, index: int) -> bool:
    return int(documents.examples.row(index)[1].sum()) > 1
