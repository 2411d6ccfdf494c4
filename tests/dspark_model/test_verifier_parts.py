"""The verifier's frozen parts: logits against transformers' own forward, every layout, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_model.verifier import VerifierParts, load_verifier_parts, transformers_state
from tests.dspark_model.tiny_verifiers import HIDDEN, MAKERS, VOCAB, forward, make_verifier, text_model

IDS = torch.arange(9)[None]
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
INDEX = "model.safetensors.index.json"


def logits_of(parts: VerifierParts, model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and the model's."""
    expected, _, prenorm, _ = forward(model, IDS)
    return parts.logits(prenorm), expected


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", list(MAKERS))
def test_logits_from_the_state_before_the_norm_equal_transformers(family, tied, tmp_path):
    """Untied ones sharded, so that embedding, norm and head come from several files."""
    model = make_verifier(family, tied=tied)
    model.save_pretrained(tmp_path, **({} if tied else {"max_shard_size": "4KB"}))
    assert (tmp_path / INDEX).exists() != tied
    parts = load_verifier_parts(str(tmp_path))
    ours, expected = logits_of(parts, model)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(parts.embed_VD, model.get_input_embeddings().weight)
    assert torch.equal(parts.lm_head_VD, model.get_output_embeddings().weight)
    assert (parts.lm_head_VD is parts.embed_VD) == tied
    # The test can fail: logits differ by more than the tolerance when a family's rule is left out.
    plain = VerifierParts(parts.embed_VD, parts.lm_head_VD, text_model(model).norm.weight, parts.norm_eps)
    special = family.startswith(("gemma", "granite", "qwen3_next", "qwen3_5"))
    assert torch.allclose(logits_of(plain, model)[0], expected, atol=0.1) != special


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5"])
def test_weights_are_kept_as_stored_and_the_norm_in_full(family, dtype, tmp_path):
    model = make_verifier(family).to(dtype)
    model.save_pretrained(tmp_path)
    parts = load_verifier_parts(tmp_path)
    assert (parts.embed_VD.dtype, parts.lm_head_VD.dtype, parts.norm_D.dtype) == (dtype, dtype, torch.float32)
    assert torch.equal(parts.embed_VD, model.get_input_embeddings().weight)
    stored_D = text_model(model).norm.weight.float()
    # 1 + w is not representable in 16 bits.
    assert torch.equal(parts.norm_D, stored_D if family == "qwen3" else 1 + stored_D)
    ours, expected = logits_of(parts, model)
    torch.testing.assert_close(
        ours, expected.float(), **({} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02})
    )


def test_the_last_state_of_transformers_is_on_the_wrong_side_of_the_norm(tmp_path):
    """https://github.com/vllm-project/speculators/pull/313: targets without, or with twice, the final norm."""
    model = make_verifier("qwen3")
    model.save_pretrained(tmp_path)
    parts = load_verifier_parts(tmp_path)
    logits, hidden_states, prenorm, _ = forward(model, IDS)
    assert not torch.allclose(parts.logits(hidden_states[-1]), logits, atol=1e-2)
    torch.testing.assert_close(parts.logits(transformers_state(hidden_states, 4, prenorm)), logits)


@pytest.mark.parametrize("layer_id", [-1, 5])
def test_layer_ids_count_layers_passed(layer_id):
    """DeepSpec's -1 is the embedding; as an index it would be the last state."""
    states = tuple(torch.zeros(1, 1, HIDDEN) for _ in range(5))
    with pytest.raises(ValueError, match=rf"layer_id={layer_id} must lie in 0\.\.4"):
        transformers_state(states, layer_id, states[0])


def test_moving_keeps_dtypes_and_tied_parts_one_tensor(tmp_path):
    for name, tied in (("untied", False), ("tied", True)):
        make_verifier("qwen3", tied=tied).bfloat16().save_pretrained(tmp_path / name)
        parts = load_verifier_parts(tmp_path / name).to(torch.device("meta"))
        assert (parts.embed_VD.dtype, parts.lm_head_VD.dtype) == (torch.bfloat16, torch.bfloat16)
        assert parts.norm_D.dtype == torch.float32
        assert {parts.embed_VD.device.type, parts.lm_head_VD.device.type, parts.norm_D.device.type} == {"meta"}
        assert (parts.embed_VD is parts.lm_head_VD) == tied


# Layouts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_verifier("qwen3").save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, tensors: dict[str, torch.Tensor | None] | None = None, **config: Any) -> None:
    """Replace or drop (None) tensors, and set fields of config.json."""
    path = folder / "model.safetensors"
    kept = {**load_file(path), **(tensors or {})}
    save_file({name: value.clone() for name, value in kept.items() if value is not None}, path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **config}))


def test_rows_past_the_vocabulary_are_padding(folder):
    whole = load_verifier_parts(folder)
    rewrite(folder, {
        EMBEDDING: torch.cat([whole.embed_VD, torch.full((24, HIDDEN), 9.0)]),
        HEAD: torch.cat([whole.lm_head_VD, torch.full((8, HIDDEN), 9.0)]),
    })  # fmt: skip
    parts = load_verifier_parts(folder)
    assert torch.equal(parts.embed_VD, whole.embed_VD)
    assert torch.equal(parts.lm_head_VD, whole.lm_head_VD)


def test_a_bare_text_model_whose_head_is_the_embedding(tmp_path):
    model = make_verifier("gemma", tied=True)
    model.model.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    ours, expected = logits_of(load_verifier_parts(tmp_path), model)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("level", ["top", "text_config"])
def test_the_tie_may_be_said_at_either_level(level, tmp_path):
    model = make_verifier("qwen3_5", tied=True)
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    text = {**raw["text_config"], "tie_word_embeddings": level == "text_config"}
    rewrite(tmp_path, tie_word_embeddings=level == "top", text_config=text)
    ours, expected = logits_of(load_verifier_parts(tmp_path), model)
    torch.testing.assert_close(ours, expected)
    rewrite(tmp_path, tie_word_embeddings=False, text_config={**text, "tie_word_embeddings": False})
    with pytest.raises(
        ValueError, match=r"no tensor 'lm_head\.weight', and config.json says tie_word_embeddings=false"
    ):
        load_verifier_parts(tmp_path)


def test_a_stored_head_wins_over_the_flag_as_in_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    make_verifier("llama").save_pretrained(tmp_path)
    rewrite(tmp_path, tie_word_embeddings=True)
    ours, expected = logits_of(load_verifier_parts(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("name", [EMBEDDING, HEAD, NORM])
def test_a_missing_tensor_is_named(folder, name):
    rewrite(folder, {name: None})
    with pytest.raises(ValueError, match=f"no tensor '{name}'"):
        load_verifier_parts(folder)


def test_two_candidates_are_not_chosen_between(folder):
    rewrite(folder, {"norm.weight": torch.ones(HIDDEN)})
    with pytest.raises(ValueError, match=r"both model.norm and norm are stored"):
        load_verifier_parts(folder)


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_rows_that_the_weights_lack_are_refused(folder, name):
    rewrite(folder, {name: torch.zeros(VOCAB - 1, HIDDEN)})
    with pytest.raises(ValueError, match=rf"{name} has shape \(39, 16\), but config.json says \(40, 16\)"):
        load_verifier_parts(folder)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [(EMBEDDING, (VOCAB, 12), r"\(40, 16\)"), (HEAD, (VOCAB, 20), r"\(40, 16\)"), (NORM, (12,), r"\(16,\)")],
)
def test_another_hidden_size_is_refused_with_both_values(folder, name, shape, said):
    rewrite(folder, {name: torch.zeros(shape)})
    with pytest.raises(ValueError, match=f"{name} has shape .*{shape[-1]},?\\), but config.json says {said}"):
        load_verifier_parts(folder)


def test_an_index_that_promises_too_much(tmp_path):
    make_verifier("llama").save_pretrained(tmp_path, max_shard_size="4KB")
    index = json.loads((tmp_path / INDEX).read_text())
    files = index["weight_map"]
    files[HEAD] = next(file for name, file in files.items() if file != files[HEAD])
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"no tensor 'lm_head.weight', though model.safetensors.index.json says so"):
        load_verifier_parts(tmp_path)
    (tmp_path / files[EMBEDDING]).unlink()
    with pytest.raises(FileNotFoundError, match=f"{files[EMBEDDING]} not found: .* needs safetensors weights"):
        load_verifier_parts(tmp_path)


def test_a_folder_without_weights_or_config_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="needs safetensors weights"):
        load_verifier_parts(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"needs config\.json"):
        load_verifier_parts(folder)


@pytest.mark.parametrize("source", [Path("no/such"), "/no/such/folder", "./folder", "a/b/c"])
def test_a_folder_that_does_not_exist_is_not_taken_for_a_hub_id(source):
    with pytest.raises(FileNotFoundError, match="is no folder: name a verifier's local folder, or a hub id"):
        load_verifier_parts(source)


# Quantised verifiers

INT = torch.zeros(VOCAB, HIDDEN, dtype=torch.int8)
SCALE = torch.ones(VOCAB, 1)
QUANTISED_HEADS = {
    "int8 (bitsandbytes)": {HEAD: INT, "lm_head.SCB": SCALE},
    "bare int8": {HEAD: INT},
    "float8": {HEAD: INT.to(torch.float8_e4m3fn)},
    "float8 with scales": {HEAD: INT.to(torch.float8_e4m3fn), "lm_head.weight_scale": SCALE},
    "fake-quantised": {"lm_head.weight_scale": SCALE},
    "gptq": {HEAD: None, "lm_head.qweight": INT, "lm_head.qzeros": INT, "lm_head.scales": SCALE},
    "compressed-tensors": {HEAD: None, "lm_head.weight_packed": INT, "lm_head.weight_scale": SCALE},
    "a bias": {"lm_head.bias": torch.zeros(VOCAB)},
}


@pytest.mark.parametrize("layout", QUANTISED_HEADS)
def test_quantised_heads_are_refused(folder, layout):
    rewrite(folder, QUANTISED_HEADS[layout])
    with pytest.raises(
        ValueError, match=r"lm_head.* is stored as .*quantised .*cannot be shared.*Name the unquantised"
    ):
        load_verifier_parts(folder)


def test_quantised_embeddings_are_refused(folder):
    rewrite(folder, {"model.embed_tokens.scales": SCALE, "model.embed_tokens.biases": SCALE})
    with pytest.raises(ValueError, match=r"model.embed_tokens is stored as .*biases, .*scales, .*weight"):
        load_verifier_parts(folder)


@pytest.mark.parametrize(
    "quantisation",
    [
        {"quant_method": "gptq", "bits": 4, "lm_head": True},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["re:.*lm_head"]}}},
    ],
    ids=["gptq", "compressed-tensors"],
)
@pytest.mark.parametrize("level", ["top", "text_config"])
def test_a_config_that_has_the_engine_quantise_the_head_is_refused(quantisation, level, tmp_path):
    make_verifier("qwen3_5").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    text = {**raw["text_config"], "quantization_config": quantisation}
    rewrite(tmp_path, **({"quantization_config": quantisation} if level == "top" else {"text_config": text}))
    with pytest.raises(ValueError, match=f"quant_method='{quantisation['quant_method']}'.* covers lm_head"):
        load_verifier_parts(tmp_path)


@pytest.mark.parametrize(
    "quantisation",
    [
        {"quant_method": "gptq", "bits": 4, "lm_head": False},
        {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"targets": ["Linear"]}},
            "ignore": ["lm_head"],
        },
    ],
    ids=["gptq", "fp8", "compressed-tensors"],
)
def test_a_quantised_verifier_with_plain_head_and_embedding_works(quantisation, folder):
    whole = load_verifier_parts(folder)
    projection = "model.layers.0.self_attn.q_proj"
    packed = {f"{projection}.weight": None, f"{projection}.qweight": INT, f"{projection}.weight_scale": SCALE}
    rewrite(folder, packed, quantization_config=quantisation)
    parts = load_verifier_parts(folder)
    assert torch.equal(parts.lm_head_VD, whole.lm_head_VD)
    assert torch.equal(parts.norm_D, whole.norm_D)


# The hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Stands for transformers' cached_file: files of one folder appear in a cache, one by one."""

    def __init__(self, remote: Path, cache: Path) -> None:
        self.remote, self.cache = remote, cache
        self.asked: list[tuple[str, str, str | None]] = []

    def cached_file(self, repo_id: str, name: str, *, revision: str | None = None) -> str | None:
        self.asked.append((repo_id, name, revision))
        if not (self.remote / name).is_file():
            if name == "config.json":
                return None  # as transformers does
            raise OSError(f"{repo_id} does not appear to have a file named {name}")
        target = self.cache / "snapshots" / COMMIT / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.remote / name, target)
        return str(target)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Hub:
    fake = Hub(tmp_path / "remote", tmp_path / "cache")
    monkeypatch.setattr("transformers.utils.cached_file", fake.cached_file)
    return fake


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_of_a_hub_id_only_the_needed_shards_are_fetched_all_of_one_commit(hub, revision):
    model = make_verifier("qwen3_5")
    model.save_pretrained(hub.remote, max_shard_size="4KB")
    files = json.loads((hub.remote / INDEX).read_text())["weight_map"]
    parts = load_verifier_parts("org/model", revision=revision)
    ours, expected = logits_of(parts, model)
    torch.testing.assert_close(ours, expected)
    language = "model.language_model"
    shards = {files[name] for name in (f"{language}.embed_tokens.weight", f"{language}.norm.weight", HEAD)}
    assert {name for _, name, _ in hub.asked} == {"config.json", INDEX, *shards}
    assert len(shards) < len(set(files.values()))
    # A branch may move between two requests.
    assert hub.asked[0] == ("org/model", "config.json", revision)
    assert {asked for _, _, asked in hub.asked[1:]} == {COMMIT}


def test_a_hub_id_with_one_file(hub):
    model = make_verifier("llama", tied=True)
    model.save_pretrained(hub.remote)
    ours, expected = logits_of(load_verifier_parts("llama"), model)
    torch.testing.assert_close(ours, expected)


def test_what_the_hub_lacks_is_said(hub):
    hub.remote.mkdir()
    with pytest.raises(FileNotFoundError, match=r"org/model has no config.json"):
        load_verifier_parts("org/model")
    make_verifier("llama").save_pretrained(hub.remote)
    (hub.remote / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"does not appear to have a file named model.safetensors$"):
        load_verifier_parts("org/model")
