"""Where answers come from: servers that the recipe names, or one that is started here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.server_specs import answer_spec, extract_spec
from tasks.stage import StageContext
from tasks.verifier import verifier_folder

if TYPE_CHECKING:
    from tasks.vllm_protocol import Server

__all__ = ["AnswerServers", "answer_servers", "answer_spec"]


@dataclass(frozen=True)
class AnswerServers:
    """Servers for answers; `with_states` says whether hidden states come in the same request."""

    servers: tuple[Server, ...]
    with_states: bool


def answer_servers(context: StageContext, *, want_states: bool) -> AnswerServers:
    """Attach to the recipe's servers, or start one; only one of ours can return states.

    Raises:
        ServingError: a server cannot be reached or started.
        RecipeError: a server by URL serves another model or tokenizer.
    """
    serving = context.recipe.serving
    if serving.urls:
        from tasks.external_server import attach

        return AnswerServers(tuple(attach(context.recipe, verifier_folder(context.parents["verifier"]))), False)
    spec = extract_spec(context) if want_states else answer_spec(context)
    return AnswerServers((context.servers.acquire(spec),), want_states)
