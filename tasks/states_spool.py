"""Hidden states of answers on their way from the server to the stage that keeps them.

A file per row under the run's work folder, named after the artifact whose rows they belong to and the layers they hold.
The spool is a shortcut, never a source: a stage that misses a row extracts it again (states are bit-equal).
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.server_specs import state_layer_ids
from tasks.stage import StageContext
from tasks.states_file import delete_states, read_states

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StatesSpool:
    """States of one answers artifact at one choice of layers."""

    folder: Path
    num_states: int

    @classmethod
    def of(cls, context: StageContext, stage: str) -> StatesSpool:
        """The spool of the answers that `stage` holds, at the recipe's layers."""
        layer_ids = state_layer_ids(context)
        key = f"{stage}-{context.fingerprints[stage]}-{'-'.join(map(str, layer_ids))}"
        folder = context.work / "spool" / hashlib.sha256(key.encode()).hexdigest()[:24]
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, len(layer_ids))

    def adopt(self, row_id: str, states_file: Path, token_ids: Sequence[int]) -> None:
        """Check a server's file and take it over.

        Raises:
            StatesError: the file is not what was asked for.
        """
        read_states(states_file, token_ids, num_states=self.num_states)
        os.replace(states_file, self._path(row_id))
        delete_states(states_file)

    def read(self, row_id: str, token_ids: Sequence[int]) -> torch.Tensor | None:
        """States [tokens, layers, hidden] of a row; None if they are not here, damaged or of other tokens."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self._path(row_id)
        if not path.is_file():
            return None
        try:
            tensors = load_file(path)
        except SafetensorError:
            return None  # cut short by a power loss: they are extracted again
        if tensors["token_ids"][: len(token_ids)].tolist() != list(token_ids):
            return None
        return tensors["hidden_states"][: len(token_ids)]

    def discard(self) -> None:
        """Free the disk: the rows are kept elsewhere now."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, row_id: str) -> Path:
        return self.folder / f"{hashlib.sha256(row_id.encode()).hexdigest()[:32]}.safetensors"
