"""Checkpoints: written in the speculators format that vLLM loads, read in that format and in DeepSpec's.

Tensors have the same names in both formats and here. The embedding, and the head when the vocabulary is full, stay with
the verifier; files that store them all the same (older speculators, DeepSpec) must agree with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dspark_model import deepspec, foreign_config
from dspark_model.checkpoint_files import CONFIG, FLOAT_DTYPES, SINGLE, CheckpointFiles
from dspark_model.config import ConfigError, DrafterConfig
from dspark_model.drafter import DSparkDrafter
from dspark_model.verifier import VerifierParts

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
VERIFIER_OR_MAP_TENSORS = (EMBEDDING, HEAD, "d2t", "t2d")
"""Stored or not, as the vocabulary and the trainer's version have it."""


def save_checkpoint(
    folder: Path, drafter: DSparkDrafter, *, verifier_name_or_path: str, verifier_architectures: list[str]
) -> None:
    """Write bfloat16 `model.safetensors`, then `config.json`: a folder with a config is whole.

    Args:
        folder: created if missing; must hold no other weights, as vLLM loads all that it finds.
        drafter: trained weights.
        verifier_name_or_path: hub id or absolute path; `vllm serve <folder>` swaps to it.
        verifier_architectures: from the verifier's config.

    Raises:
        ConfigError: what vLLM would load wrongly or not at all; nothing is written.
        ValueError: a weight is NaN or infinite, or the folder holds other weights; nothing is written.
    """
    foreign_config.refuse_unservable(drafter.config)
    if is_relative_path(verifier_name_or_path):
        raise ConfigError(
            f"verifier_name_or_path={verifier_name_or_path!r}: vLLM resolves it from the folder that the server starts "
            "in, or takes it for a hub id; give a hub id 'owner/name' or an absolute path"
        )
    tensors = _servable_tensors(drafter)
    broken = sorted(name for name, value in tensors.items() if not value.isfinite().all())
    if broken:
        raise ValueError(
            f"{', '.join(broken)}: NaN or infinite values, with which vLLM would draft garbage; export an earlier step "
            "(and load the verifier's parts before exporting)"
        )
    others = sorted(file.name for file in folder.glob("*.safetensors*") if file.name != SINGLE)
    if others:
        raise ValueError(f"{folder} already holds {', '.join(others)}, which vLLM would load too: use another folder")
    raw = foreign_config.write_config(drafter.config, verifier_name_or_path, verifier_architectures)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(raw, indent=2) + "\n")


def is_relative_path(name: str) -> bool:
    """Whether a verifier's name is neither a hub id ("name", "owner/name") nor an absolute path."""
    if Path(name).is_absolute():
        return False
    parts = name.split("/")
    return not 1 <= len(parts) <= 2 or not all(parts) or name.startswith((".", "~"))


def _servable_tensors(drafter: DSparkDrafter) -> dict[str, Tensor]:
    weights = dict(drafter.trainable_state())
    if drafter.config.reduced_vocab:
        weights[HEAD] = drafter.lm_head
    tensors = {name: value.detach().to(torch.bfloat16).cpu().contiguous() for name, value in weights.items()}
    if drafter.config.reduced_vocab:
        tensors |= {"d2t": drafter.d2t.cpu().contiguous(), "t2d": drafter.t2d.cpu().contiguous()}
    return tensors


def read_drafter_config(raw: Mapping[str, Any]) -> DrafterConfig:
    """The drafter that a config.json describes, in the speculators format or DeepSpec's.

    Raises:
        ConfigError: neither format, a required field is missing, or a drafter that our forward is not.
    """
    if foreign_config.is_speculators(raw):
        return foreign_config.read_config(raw)
    if deepspec.is_deepspec(raw):
        return deepspec.read_config(raw)
    raise ConfigError(
        f"architectures={raw.get('architectures')}, model_type={raw.get('model_type')!r}: no DSpark drafter. Expected "
        f"the speculators format (speculators_model_type={foreign_config.FORMAT!r}) or DeepSpec's "
        f"(architectures=[{deepspec.ARCHITECTURE!r}])"
    )


def load_checkpoint(folder: Path, verifier: VerifierParts) -> DSparkDrafter:
    """Read a drafter that was written here, by speculators or by DeepSpec, whole or sharded.

    Args:
        folder: `config.json` and safetensors weights.
        verifier: parts of the verifier that it drafts for.

    Raises:
        FileNotFoundError: a file is missing.
        ConfigError: the config lacks a required field or describes an unsupported drafter.
        ValueError: tensors are missing, unknown, damaged or of another shape, or belong to another verifier.
    """
    files = CheckpointFiles(folder)
    try:
        config = read_drafter_config(files.config)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from error
    drafter = DSparkDrafter(config, _read_t2d(files, config.verifier_vocab_size) if config.reduced_vocab else None)
    drafter.load_verifier(verifier)
    expected: dict[str, Tensor] = dict(drafter.trainable_state())
    if config.reduced_vocab:
        expected[HEAD] = drafter.lm_head
    _check_names_and_shapes(files, expected)
    _check_frozen(files, drafter)
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(files.read(name))
    return drafter


def _read_t2d(files: CheckpointFiles, vocab_size: int) -> Tensor:
    """Bool [V] of a reduced vocabulary, from d2t, which is what vLLM goes by; t2d, if stored, must say the same."""
    absent = sorted({"d2t", HEAD} - set(files.tensors))
    if absent:
        raise ValueError(f"{files.folder}: missing tensors {absent}, which a reduced vocabulary needs")
    d2t = files.read("d2t")
    ids = torch.arange(d2t.numel()) + d2t.flatten()
    if not (ids.diff() > 0).all() or not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ValueError(
            f"{files.folder}: d2t gives verifier ids {_shortened(ids)}; draft id + d2t[draft id] must ascend inside "
            f"0..{vocab_size - 1}: d2t holds offsets, not ids"
        )
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    if "t2d" in files.tensors and not torch.equal(files.read("t2d").bool(), t2d):
        raise ValueError(f"{files.folder}: d2t and t2d describe different vocabularies; the checkpoint is damaged")
    return t2d


def _shortened(ids: Tensor) -> str:
    shown = ", ".join(str(i) for i in ids[:4].tolist())
    return f"{shown}, ..., {int(ids[-1])}" if len(ids) > 5 else ", ".join(str(i) for i in ids.tolist())


def _check_names_and_shapes(files: CheckpointFiles, expected: Mapping[str, Tensor]) -> None:
    stored = set(files.tensors) - (set(VERIFIER_OR_MAP_TENSORS) - set(expected))
    missing, unknown = set(expected) - stored, stored - set(expected)
    if missing or unknown:
        raise ValueError(f"{files.folder}: missing tensors {sorted(missing)}, unknown tensors {sorted(unknown)}")
    for name, parameter in expected.items():
        found = files.tensors[name]
        if found.shape != tuple(parameter.shape):
            raise ValueError(f"{files.folder}: {name} has shape {found.shape}, expected {tuple(parameter.shape)}")
        if found.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{files.folder}: {name} is stored as {found.dtype}, not as one of {', '.join(FLOAT_DTYPES)}: a "
                "quantised drafter cannot be read; use the unquantised one"
            )


def _check_frozen(files: CheckpointFiles, drafter: DSparkDrafter) -> None:
    """Refuse a checkpoint whose stored copies of the verifier's weights are not this verifier's.

    vLLM drafts with the stored ones where they differ; here the verifier's are used, so the drafts would differ.
    """
    frozen = {EMBEDDING: drafter.embed_tokens}
    if not drafter.config.reduced_vocab:
        frozen[HEAD] = drafter.lm_head
    for name, ours in frozen.items():
        if name not in files.tensors:
            continue
        stored = files.read(name)
        if stored.shape == ours.shape:
            differs = (stored != ours.detach().to(stored.dtype)).any(1)
            if not differs.any():
                continue
            how = f"{int(differs.sum())} of {len(differs)} rows differ, the first is {int(differs.nonzero()[0])}"
        else:
            how = f"shape {tuple(stored.shape)} there, {tuple(ours.shape)} here"
        raise ValueError(
            f"{files.folder}: the stored {name} is not this verifier's ({how}), so the drafter was made for another: "
            "load with that one, or delete the tensor from the file to draft with this verifier's own"
        )
