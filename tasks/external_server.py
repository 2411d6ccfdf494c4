"""Servers by URL: used as they are, after checking that they serve the recipe's verifier with its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.recipe import HubVerifier, PathVerifier, Recipe, RecipeError
from tasks.server_spec import ServingError

if TYPE_CHECKING:
    import httpx

KEY_VARIABLES = ("DSPARK_API_KEY", "OPENAI_API_KEY")
CHECK_TIMEOUT_SECONDS = 30.0
# Chat template, letters of several scripts, digits and white space: where tokenizers differ.
PROBE = [
    {"role": "user", "content": "Tokenizers differ here: 12345 Straße, 東京,\n\tx_y=[0]*3  \u00bfs\u00ed?"},
    {"role": "assistant", "content": "Do they?"},
    {"role": "user", "content": "They do."},
]


@dataclass(frozen=True)
class ExternalServer:
    """A server that somebody else runs."""

    url: str
    model_name: str
    request_timeout_seconds: float
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold a key

    def check_alive(self) -> None:
        """Nothing is known of its process: requests tell."""


def attach(recipe: Recipe, verifier: Path) -> list[ExternalServer]:
    """Check every server of `serving.urls`, and return them ready to be asked.

    Args:
        recipe: whose verifier they must serve.
        verifier: its folder, for the tokenizer.

    Raises:
        ServingError: a server does not answer.
        RecipeError: it serves another model, another tokenizer or too short a context; names both sides.
    """
    import httpx

    key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    expected = _render_probe(verifier)
    servers = []
    for url in (given.rstrip("/").removesuffix("/v1") for given in recipe.serving.urls):
        with httpx.Client(base_url=url, headers=headers, timeout=CHECK_TIMEOUT_SECONDS, trust_env=False) as client:
            model = _choose_model(url, _ask(client, "GET", "/v1/models").get("data", []), recipe)
            _check_context(url, model, recipe)
            _check_tokenizer(client, url, model["id"], expected)
        servers.append(ExternalServer(url, model["id"], recipe.serving.request_timeout_seconds, headers))
    return servers


def _ask(client: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    import httpx

    try:
        response = client.request(method, path, json=body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
    except httpx.HTTPStatusError as error:
        reason = error.response.text[:300]
        raise ServingError(
            f"serving.urls: {client.base_url} answered {error.response.status_code} to {path}: {reason} "
            f"(a key is taken from ${' or $'.join(KEY_VARIABLES)})"
        ) from error
    except (httpx.TransportError, ValueError) as error:
        raise ServingError(
            f"serving.urls: {client.base_url} does not answer as an OpenAI-compatible server ({error!r}): "
            "start it, or correct the URL"
        ) from error
    return answer


def _choose_model(url: str, models: Sequence[Mapping[str, Any]], recipe: Recipe) -> Mapping[str, Any]:
    """The entry of /v1/models that is the verifier."""
    names = [str(model["id"]) for model in models]
    wanted = recipe.serving.served_model
    if wanted is not None:
        if wanted not in names:
            raise RecipeError(f"serving.served_model={wanted!r}: {url} serves {', '.join(names) or 'nothing'}")
        return models[names.index(wanted)]
    if len(models) != 1:
        raise RecipeError(
            f"serving.urls: {url} serves {', '.join(names) or 'nothing'}: name one in serving.served_model"
        )
    model = models[0]
    known = {Path(str(model[name])).name for name in ("id", "root") if model.get(name)}
    own = _own_name(recipe)
    if own not in known:
        raise RecipeError(
            f"serving.urls: {url} serves {names[0]!r} (from {model.get('root')!r}), the recipe's verifier is {own!r}: "
            f"another model. If they are the same, say so: serving.served_model={names[0]!r}"
        )
    return model


def _own_name(recipe: Recipe) -> str:
    verifier = recipe.verifier
    if isinstance(verifier, HubVerifier):
        return verifier.repo_id.rsplit("/", 1)[-1]
    return verifier.path.name if isinstance(verifier, PathVerifier) else Path(verifier.file).stem


def _check_context(url: str, model: Mapping[str, Any], recipe: Recipe) -> None:
    length = model.get("max_model_len")
    needed = recipe.prompts.max_prompt_tokens + recipe.responses.max_new_tokens
    if length is not None and length < needed:
        raise RecipeError(
            f"serving.urls: {url} takes {length} tokens, prompts.max_prompt_tokens plus responses.max_new_tokens need "
            f"{needed}: shorten them, or serve with a larger --max-model-len"
        )


def _render_probe(verifier: Path) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(verifier)
    ids: list[int] = tokenizer.apply_chat_template(PROBE, add_generation_prompt=True, return_dict=False)
    return ids


def _check_tokenizer(client: httpx.Client, url: str, model: str, expected: list[int]) -> None:
    """Compare a conversation's token ids with the verifier's own; the answer of one token carries them."""
    body = {"model": model, "messages": PROBE, "max_tokens": 1, "temperature": 0.0, "return_token_ids": True}
    answer = _ask(client, "POST", "/v1/chat/completions", body)
    choices = answer.get("choices") or [{}]
    found = answer.get("prompt_token_ids") or choices[0].get("prompt_token_ids")
    if not found:
        raise ServingError(
            f"serving.urls: {url} returns no token ids; answers need vLLM 0.32 or newer, which knows `return_token_ids`"
        )
    if found != expected:
        first = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
        where = f"token {first} is {found[first]}, not {expected[first]}" if first is not None else "one ends sooner"
        raise RecipeError(
            f"serving.urls: {url} tokenises a conversation into {len(found)} tokens, the verifier's own tokenizer and "
            f"chat template into {len(expected)} ({where}): another model, tokenizer or chat template is served there"
        )
