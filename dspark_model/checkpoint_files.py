"""A checkpoint folder: its config, and its tensors by name; weights are read one at a time and only when asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# safetensors' names of the dtypes that hold plain numbers.
FLOAT_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class StoredTensor:
    """What a header says about a tensor."""

    file: Path
    dtype: str
    """safetensors' name, such as BF16."""
    shape: tuple[int, ...]


class CheckpointFiles:
    """Config and headers of a checkpoint folder.

    As in vLLM, an index names the files that count; without one every `*.safetensors` of the folder does.

    Raises:
        FileNotFoundError: no such folder, no config.json, no weights, or a file that the index names is missing.
        ValueError: a file cannot be parsed, or a tensor is stored twice.
    """

    def __init__(self, folder: Path) -> None:
        """Read config and headers, no weights."""
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is no folder: name the one that holds the drafter's {CONFIG}")
        self.folder = folder
        self.config = _read_json(folder / CONFIG)
        self.tensors: dict[str, StoredTensor] = {}
        for file in _weight_files(folder):
            for name, tensor in _read_header(file):
                if name in self.tensors:
                    raise ValueError(
                        f"{folder}: {name} is stored in both {self.tensors[name].file.name} and {file.name}: "
                        "keep one checkpoint per folder"
                    )
                self.tensors[name] = tensor

    def read(self, name: str) -> Tensor:
        """The whole tensor, as stored."""
        with safe_open(self.tensors[name].file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def read_rows(self, name: str, numbers: int = 1 << 24) -> Iterator[Tensor]:
        """The tensor in runs of its first dimension of at most about `numbers` numbers each."""
        shape = self.tensors[name].shape
        if len(shape) < 2:
            yield self.read(name)
            return
        width = 1
        for size in shape[1:]:
            width *= size
        step = max(1, numbers // max(1, width))
        with safe_open(self.tensors[name].file, framework="pt") as file:
            view = file.get_slice(name)
            for start in range(0, shape[0], step):
                yield view[start : start + step]


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{folder / INDEX} has no weight_map: it is not the index of a sharded checkpoint")
        files = sorted({folder / str(name) for name in weight_map.values()})
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise FileNotFoundError(f"{folder}: {INDEX} names {', '.join(absent)}, which is missing: download it again")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no safetensors weights ({SINGLE}): it is not a whole checkpoint")
    return files


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"{file} not found: name the folder of a drafter's checkpoint")
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}): download or write it again") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds a {type(raw).__name__}, not a JSON object")
    return raw


def _read_header(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                view = tensors.get_slice(name)
                yield name, StoredTensor(file, view.get_dtype(), tuple(view.get_shape()))
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or cut short ({error}): download or write it again") from error
