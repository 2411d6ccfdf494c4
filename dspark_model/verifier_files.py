"""Single tensors out of a verifier's safetensors, in a local folder or on the hub, without loading the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
# safetensors' names of the dtypes that a matrix product can use as they are.
PLAIN_DTYPES = ("BF16", "F16", "F32")
UNQUANTISED = "Name the unquantised verifier, or one whose quantisation leaves embedding and lm_head as they are"


class VerifierFiles:
    """A verifier's config and named weights.

    Raises:
        FileNotFoundError: no such folder, no config.json, or no safetensors in it.
        OSError: transformers cannot get a file from the hub; its message says why.
    """

    def __init__(self, source: str | Path, revision: str | None = None) -> None:
        """Find the config and where each tensor is; reads no weights.

        Args:
            source: a local folder, or a hub id "owner/name", of which only the needed files are fetched.
            revision: of the hub id: branch, tag or commit.
        """
        self.source = source
        self._folder = Path(source) if Path(source).is_dir() else None
        if self._folder is None and (isinstance(source, Path) or not _may_be_hub_id(source)):
            raise FileNotFoundError(f"{source} is no folder: name a verifier's local folder, or a hub id 'owner/name'")
        self._revision = revision
        config = self._fetch(CONFIG)
        self._revision = revision if self._folder else _commit_of(config) or revision
        self.config: dict[str, Any] = json.loads(config.read_text())
        self._file_of: Mapping[str, str] = self._tensor_files()

    def tensor_names(self, stem: str) -> list[str]:
        """Tensors of the module `stem`: `["lm_head.weight"]` for a plain head, more or others for a quantised one."""
        return sorted(name for name in self._file_of if name.startswith(f"{stem}."))

    def find(self, stems: Sequence[str]) -> str | None:
        """The one of `stems` that is stored, None if none is.

        Raises:
            ValueError: more than one is.
        """
        stored = [stem for stem in stems if self.tensor_names(stem)]
        if len(stored) > 1:
            raise ValueError(
                f"{self.source}: both {' and '.join(stored)} are stored, so which of them the verifier uses is "
                "unclear: this verifier's layout is not supported"
            )
        return stored[0] if stored else None

    def read(self, stem: str, shape: tuple[int, ...]) -> Tensor:
        """The weight of module `stem`, as stored, cut to `shape` in its first dimension.

        Args:
            stem: a stored module.
            shape: expected; further rows are padding.

        Raises:
            ValueError: stored quantised or with a bias, too few rows, or another width.
        """
        name, stored = f"{stem}.weight", self.tensor_names(stem)
        if stored != [name]:
            raise ValueError(
                f"{self.source}: {stem} is stored as {', '.join(stored)}, not as one plain tensor {name!r}: a "
                f"quantised module (or one with a bias) cannot be shared with a drafter. {UNQUANTISED}"
            )
        file = self._fetch(self._file_of[name])
        with safe_open(file, framework="pt") as tensors:
            if name not in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                raise ValueError(f"{file}: no tensor {name!r}, though {INDEX} says so: download the folder again")
            view = tensors.get_slice(name)
            dtype, found = view.get_dtype(), tuple(view.get_shape())
            if dtype not in PLAIN_DTYPES:
                raise ValueError(
                    f"{self.source}: {name} is stored as {dtype}, not as one of {', '.join(PLAIN_DTYPES)}: a quantised "
                    f"tensor cannot be shared with a drafter. {UNQUANTISED}"
                )
            if len(found) != len(shape) or found[1:] != shape[1:] or found[0] < shape[0]:
                raise ValueError(
                    f"{self.source}: {name} has shape {found}, but config.json says {shape} (more rows would be "
                    "padding): config.json and weights are of different models; download the folder again"
                )
            weight: Tensor = view[: shape[0]]
            return weight

    def _tensor_files(self) -> dict[str, str]:
        """File name of each tensor."""
        try:
            index = self._fetch(INDEX)
        except OSError:  # not sharded; with no connection the next file says so
            with safe_open(self._fetch(SINGLE), framework="pt") as tensors:
                return dict.fromkeys(tensors.keys(), SINGLE)
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return weight_map

    def _fetch(self, name: str) -> Path:
        if self._folder is not None:
            file = self._folder / name
            if not file.is_file():
                needs = "config.json" if name == CONFIG else "safetensors weights (model.save_pretrained(folder))"
                raise FileNotFoundError(f"{file} not found: the verifier folder needs {needs}")
            return file
        from transformers.utils import cached_file

        found = cached_file(self.source, name, revision=self._revision)
        if found is None:
            raise FileNotFoundError(f"{self.source} has no {name}: name a hub id of a whole model")
        return Path(found)


def _may_be_hub_id(source: str) -> bool:
    parts = source.split("/")
    return len(parts) <= 2 and all(parts) and not source.startswith((".", "~"))


def _commit_of(file: Path) -> str | None:
    """Commit of a file in the hub's cache: all files shall be of one, even if a branch moves meanwhile."""
    from transformers.utils import extract_commit_hash

    commit: str | None = extract_commit_hash(str(file), None)
    return commit
