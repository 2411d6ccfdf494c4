"""Servers by URL are used only if they serve the recipe's verifier with its tokenizer; what differs is named."""

from __future__ import annotations

import pytest

from tasks import external_server
from tasks.external_server import PROBE, attach
from tasks.recipe import RecipeError
from tasks.recipe_file import parse_recipe
from tasks.server_spec import ServingError
from tests.tiny_verifier import make_tiny_verifier
from tests.toy_openai_server import ToyServer, prompt_ids


@pytest.fixture(autouse=True)
def honest_tokenizer(monkeypatch):
    """The toy's tokenizer is the verifier's."""
    monkeypatch.setattr(external_server, "_render_probe", lambda verifier: prompt_ids(PROBE))


@pytest.fixture
def server():
    with ToyServer(model="verifier", root="/models/verifier") as running:
        yield running


def recipe_for(tmp_path, *urls, **serving):
    folder = tmp_path / "verifier"
    return parse_recipe(
        {
            "name": "t",
            "verifier": {"source": "path", "path": str(folder)},
            "serving": {"urls": list(urls), **serving},
        }
    )


def test_a_fitting_server_is_taken_with_the_users_key(server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "second")
    monkeypatch.setenv("DSPARK_API_KEY", "secret")
    found = attach(recipe_for(tmp_path, server.url, f"{server.url}/v1/", request_timeout_seconds=7), tmp_path)
    assert [(one.url, one.model_name, one.request_timeout_seconds) for one in found] == [
        (server.url, "verifier", 7)
    ] * 2
    assert found[0].headers == {"authorization": "Bearer secret"}
    assert "secret" not in repr(found)


@pytest.mark.parametrize(
    ("verifier", "root", "fits"),
    [
        ({"source": "hub", "repo_id": "org/Model-7B", "revision": "0" * 40}, "org/Model-7B", True),
        ({"source": "hub", "repo_id": "org/Model-7B", "revision": "0" * 40}, "/cache/Model-7B", True),
        ({"source": "hub", "repo_id": "org/Model-7B", "revision": "0" * 40}, "org/Model-1B", False),
        ({"source": "path", "path": "/a/Model"}, "/b/Model", True),
        ({"source": "path", "path": "/a/Model"}, "/b/Other", False),
    ],
)
def test_another_model_is_refused_unless_the_recipe_confirms_it(tmp_path, verifier, root, fits):
    def recipe(**serving):
        return parse_recipe({"name": "t", "verifier": verifier, "serving": {"urls": [server.url], **serving}})

    with ToyServer(model="served", root=root) as server:
        if fits:
            assert attach(recipe(), tmp_path)[0].model_name == "served"
        else:
            with pytest.raises(RecipeError, match=r"serves 'served' .*another model.*serving\.served_model='served'"):
                attach(recipe(), tmp_path)
        assert attach(recipe(served_model="served"), tmp_path)[0].model_name == "served"
        with pytest.raises(RecipeError, match=r"serving\.served_model='mine': .* serves served"):
            attach(recipe(served_model="mine"), tmp_path)


def test_another_tokenizer_or_template_is_refused_with_the_first_difference(server, tmp_path, monkeypatch):
    own = prompt_ids(PROBE)
    other = [*own[:9], own[9] + 1, *own[10:]]
    monkeypatch.setattr(external_server, "_render_probe", lambda verifier: other)
    with pytest.raises(RecipeError, match=rf"token 9 is {own[9]}, not {own[9] + 1}.*tokenizer or chat template"):
        attach(recipe_for(tmp_path, server.url), tmp_path)
    monkeypatch.setattr(external_server, "_render_probe", lambda verifier: own[:-1])
    with pytest.raises(RecipeError, match="one ends sooner"):
        attach(recipe_for(tmp_path, server.url), tmp_path)


def test_a_context_that_is_too_short_is_refused(server, tmp_path):
    server.max_model_len = 383
    with pytest.raises(RecipeError, match=r"takes 383 tokens, .* need 384: shorten them, or serve with a larger"):
        attach(recipe_for(tmp_path, server.url), tmp_path)
    server.max_model_len = 384
    assert attach(recipe_for(tmp_path, server.url), tmp_path)


def test_a_server_that_is_not_there_is_named(tmp_path):
    with ToyServer() as gone:
        url = gone.url
    with pytest.raises(ServingError, match=rf"serving\.urls: {url}.* does not answer.*start it, or correct the URL"):
        attach(recipe_for(tmp_path, url), tmp_path)


def test_the_probe_is_rendered_as_the_verifier_would(tmp_path, monkeypatch):
    monkeypatch.undo()
    from transformers import AutoTokenizer

    folder = make_tiny_verifier(tmp_path / "tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in PROBE)
    expected = tokenizer.encode(f"{text}<|im_start|>assistant\n", add_special_tokens=False)
    assert external_server._render_probe(folder) == expected
