"""Train the drafter in a child process and keep its best weights as a checkpoint that vLLM loads."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_model.families import derive_config
from tasks.mask_token import choose_mask_token
from tasks.process import run_logged
from tasks.recipe import Recipe
from tasks.server_specs import aux_layer_ids, verifier_config
from tasks.stage import Stage, StageContext
from tasks.verifier import verifier_folder

REPOSITORY = Path(__file__).resolve().parent.parent
# Intervals change when work becomes durable, not what is learnt.
INTERVALS = {"checkpoint_every_seconds"}


def identity(recipe: Recipe) -> dict[str, Any]:
    """Architecture, the optimiser's decisions, and how many proposals validation walks with."""
    return {
        "drafter": recipe.drafter.model_dump(),
        "training": recipe.training.model_dump(exclude=INTERVALS),
        "num_speculative_tokens": recipe.num_speculative_tokens,
    }


def build(context: StageContext) -> Mapping[str, int | float | str]:
    """Train the drafter; continues from the last checkpoint after a stop or a kill."""
    # Training needs the machine: a server that waits for a later stage would keep its memory.
    context.servers.close()
    config = write_train_config(context)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
    }
    run_logged(
        [sys.executable, "-u", "-m", "dspark_model.train", "--config", str(config)],
        log=context.log.info,
        env=environment,
        timeout_seconds=context.recipe.serving.train_timeout_seconds,
    )
    result: dict[str, int | float | str] = json.loads((context.output / "training.json").read_text())
    return result


def write_train_config(context: StageContext) -> Path:
    """Everything the trainer needs, as one file in the stage's scratch folder.

    Raises:
        ConfigError: an architecture that cannot be built or served.
        MaskTokenError: no token of the verifier can stand for "unknown".
    """
    from safetensors.torch import load_file

    from dspark_model.train_config import TrainConfig

    recipe, parents = context.recipe, context.parents
    folder = verifier_folder(parents["verifier"])
    choices, training = recipe.drafter, recipe.training
    vocab = parents["vocab"] / "vocab.safetensors"
    drafter = derive_config(
        verifier_config(folder),
        layer_kinds=choices.layer_kinds,
        block_size=choices.block_size,
        draft_vocab_size=int(load_file(vocab)["t2d"].sum()),
        mask_token_id=choose_mask_token(folder, choices.mask_token_id, parents["examples"] / "train.safetensors"),
        markov_rank=choices.markov_rank,
        confidence_head=choices.confidence_head,
        sample_from_anchor=choices.sample_from_anchor,
        sliding_window=choices.sliding_window,
        aux_hidden_state_layer_ids=aux_layer_ids(context),
        intermediate_size=choices.intermediate_size,
    )
    config = TrainConfig(
        drafter=drafter,
        verifier=folder.resolve(),
        examples=parents["examples"],
        hidden_states=parents["hidden_states"],
        vocab=vocab,
        output=context.output,
        scratch=context.scratch,
        num_speculative_tokens=recipe.num_speculative_tokens,
        **training.model_dump(),
    )
    path = context.scratch / "train.json"
    config.save(path)
    return path


STAGE = Stage("drafter", 1, ("verifier", "examples", "vocab", "hidden_states"), identity, build)
