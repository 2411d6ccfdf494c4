"""Which servers a recipe needs: every number comes from the recipe or the verifier, none is typed twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from dspark_model.config import check_layer_ids, default_layer_ids
from tasks.server_spec import ServerSpec, serving_python
from tasks.stage import StageContext
from tasks.verifier import verifier_folder


def verifier_config(folder: Path) -> dict[str, Any]:
    """The verifier's `config.json`."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def aux_layer_ids(context: StageContext) -> tuple[int, ...]:
    """The recipe's layer ids, or the default for the verifier's depth.

    Raises:
        ConfigError: ids outside the verifier.
    """
    layers = text_config(verifier_folder(context.parents["verifier"]))["num_hidden_layers"]
    layer_ids = context.recipe.drafter.aux_hidden_state_layer_ids or default_layer_ids(layers)
    check_layer_ids(layer_ids, layers)
    return layer_ids


def state_layer_ids(context: StageContext) -> tuple[int, ...]:
    """The auxiliary layers, then the verifier's depth: the last state, before the final norm."""
    last = text_config(verifier_folder(context.parents["verifier"]))["num_hidden_layers"]
    return (*aux_layer_ids(context), last)


def text_config(folder: Path) -> dict[str, Any]:
    """The language model's part of `config.json`; verifiers with vision keep it apart."""
    config = verifier_config(folder)
    inner: dict[str, Any] = config.get("text_config", config)
    return inner


def extract_spec(context: StageContext) -> ServerSpec:
    """A server that returns answers with hidden states."""
    folder = verifier_folder(context.parents["verifier"])
    states_dir = context.work / "states"
    states_dir.mkdir(parents=True, exist_ok=True)
    return ServerSpec(
        mode="extract",
        layer_ids=state_layer_ids(context),
        states_dir=states_dir,
        **_parsers(context),
        **_common(context, folder),
    )


def plain_spec(context: StageContext) -> ServerSpec:
    """The verifier alone."""
    return ServerSpec(mode="plain", **_common(context, verifier_folder(context.parents["verifier"])))


def answer_spec(context: StageContext) -> ServerSpec:
    """The verifier alone, for answers: the turns of a conversation share a prefix, which is computed once."""
    return replace(plain_spec(context), prefix_caching=True, **_parsers(context))


def _parsers(context: StageContext) -> dict[str, Any]:
    responses = context.recipe.responses
    return {"tool_call_parser": responses.tool_call_parser, "reasoning_parser": responses.reasoning_parser}


def dspark_spec(context: StageContext, drafter: Path) -> ServerSpec:
    """The verifier with a drafter."""
    return ServerSpec(
        mode="dspark",
        drafter=drafter,
        num_speculative_tokens=context.recipe.num_speculative_tokens,
        **_common(context, verifier_folder(context.parents["verifier"])),
    )


def _common(context: StageContext, folder: Path) -> dict[str, Any]:
    serving = context.recipe.serving
    return {
        "python": serving_python(serving.python),
        "model": folder,
        "dtype": context.recipe.verifier.dtype,
        "max_model_len": serving.max_model_len,
        "max_num_seqs": serving.max_num_seqs,
        "kv_cache_gib": serving.kv_cache_gib,
        "extra_args": serving.extra_args,
        "start_timeout_seconds": serving.start_timeout_seconds,
        "request_timeout_seconds": serving.request_timeout_seconds,
    }
