"""Examples and hidden states on disk: plain safetensors, ragged rows joined end to end with offsets.

`<split>.safetensors` (examples): input_ids int32 [total], loss_mask uint8 [total], offsets int64 [N + 1].
`<split>-<first>.safetensors` (states): aux_hidden [total, F], last_hidden [total, D], token_ids int32 [total],
offsets int64 [n + 1] for documents first..first+n-1; a document of T tokens has T - 1 or T states.
Shape letters: T tokens of one document, F fused aux width, D hidden.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark_model.batch import Document

SPLITS = ("train", "validation")


def write_atomically(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write safetensors so that `path` either is whole or does not exist."""
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata=metadata)
    os.replace(partial, path)


def write_examples(path: Path, rows: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Write (id, input_ids, loss_mask) rows."""
    write_joined_examples(
        path,
        [name for name, _, _ in rows],
        torch.tensor([i for _, ids, _ in rows for i in ids], dtype=torch.int32),
        torch.tensor([m for _, _, mask in rows for m in mask], dtype=torch.uint8),
        torch.tensor([len(ids) for _, ids, _ in rows], dtype=torch.int64),
    )


def write_joined_examples(
    path: Path, ids: Sequence[str], input_ids_T: Tensor, loss_mask_T: Tensor, lengths_N: Tensor
) -> None:
    """Write rows that lie end to end: int32 [total], uint8 [total] and the tokens of each row, int64 [N].

    Raises:
        ValueError: the parts do not fit together.
    """
    total = int(lengths_N.sum())
    if not (len(ids) == lengths_N.shape[0] and input_ids_T.shape == loss_mask_T.shape == (total,)):
        raise ValueError(
            f"{len(ids)} ids, {lengths_N.shape[0]} lengths of {total} tokens, {input_ids_T.shape[0]} input_ids and "
            f"{loss_mask_T.shape[0]} loss_mask do not describe the same rows"
        )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_N.cumsum(0)])
    tensors = {"input_ids": input_ids_T, "loss_mask": loss_mask_T, "offsets": offsets}
    write_atomically(tensors, path, {"ids": json.dumps(list(ids))})


class Examples:
    """Rows of one split, in memory."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            self.input_ids: Tensor = file.get_tensor("input_ids")
            self.loss_mask: Tensor = file.get_tensor("loss_mask")
            self.offsets: list[int] = file.get_tensor("offsets").tolist()
            self.ids: list[str] = json.loads(file.metadata()["ids"])

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [stop - start for start, stop in zip(self.offsets, self.offsets[1:], strict=False)]

    def row(self, index: int) -> tuple[Tensor, Tensor]:
        """input_ids int64 [T] and loss_mask bool [T]."""
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self.input_ids[part].long(), self.loss_mask[part].bool()


class StatesWriter:
    """Appends documents' states in order; each full shard is durable, so a killed run continues at `next_document`."""

    def __init__(self, folder: Path, split: str, documents_per_shard: int = 128) -> None:
        self.folder, self.split, self.documents_per_shard = folder, split, documents_per_shard
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []
        shards = _shards(folder, split)
        self.next_document = shards[-1][0] + shards[-1][1] if shards else 0

    def add(self, aux_hidden_TF: Tensor, last_hidden_TD: Tensor, token_ids_T: Tensor) -> None:
        """Append the next document."""
        self._pending.append((aux_hidden_TF, last_hidden_TD, token_ids_T.int()))
        if len(self._pending) == self.documents_per_shard:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as a shard."""
        if not self._pending:
            return
        offsets = [0]
        for aux, _, _ in self._pending:
            offsets.append(offsets[-1] + aux.shape[0])
        tensors = {
            "aux_hidden": torch.cat([aux for aux, _, _ in self._pending]),
            "last_hidden": torch.cat([last for _, last, _ in self._pending]),
            "token_ids": torch.cat([ids for _, _, ids in self._pending]),
            "offsets": torch.tensor(offsets),
        }
        write_atomically(tensors, self.folder / f"{self.split}-{self.next_document:08d}.safetensors")
        self.next_document += len(self._pending)
        self._pending = []


def _shards(folder: Path, split: str) -> list[tuple[int, int, Path]]:
    """(first document, documents, path) of each shard, in order."""
    found = []
    for path in sorted(folder.glob(f"{split}-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found.append((int(path.stem.rsplit("-", 1)[1]), file.get_slice("offsets").get_shape()[0] - 1, path))
    return found


class Documents(Sequence[Document]):
    """Examples joined with their stored states, read on access (safetensors maps the files)."""

    def __init__(self, examples: Path, states_folder: Path, split: str) -> None:
        """Open a split.

        Raises:
            ValueError: the states do not cover the examples.
        """
        self.examples = Examples(examples / f"{split}.safetensors")
        self._shards = _shards(states_folder, split)
        self._firsts = [first for first, _, _ in self._shards]
        covered = sum(count for _, count, _ in self._shards)
        if covered != len(self.examples):
            raise ValueError(
                f"{states_folder} holds states of {covered} {split} documents, examples has {len(self.examples)}: "
                "run the hidden_states stage again"
            )
        self._checked: set[int] = set()
        self._open: dict[int, Any] = {}
        self._offsets: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return self.examples.lengths

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = bisect_right(self._firsts, index) - 1
        if shard not in self._open:
            self._open[shard] = safe_open(self._shards[shard][2], framework="pt")
            self._offsets[shard] = self._open[shard].get_tensor("offsets").tolist()
        file, offsets = self._open[shard], self._offsets[shard]
        local = index - self._firsts[shard]
        part = slice(offsets[local], offsets[local + 1])
        input_ids_T, loss_mask_T = self.examples.row(index)
        token_ids_T = file.get_slice("token_ids")[part].long()
        if not torch.equal(token_ids_T, input_ids_T[: token_ids_T.shape[0]]):
            raise ValueError(f"document {index}: stored states are of other tokens; run the hidden_states stage again")
        document = Document(
            input_ids_T, loss_mask_T, file.get_slice("aux_hidden")[part], file.get_slice("last_hidden")[part]
        )
        if index not in self._checked:
            _check_finite(index, document)
            self._checked.add(index)
        return document


def _check_finite(index: int, document: Document) -> None:
    """Raise for NaN and infinite states (https://github.com/vllm-project/speculators/pull/994)."""
    for name in ("aux_hidden_TF", "last_hidden_TD"):
        states = getattr(document, name)
        broken_T = ~states.isfinite().all(-1)
        if broken_T.any():
            token = int(broken_T.nonzero()[0])
            value = float(states[token][~states[token].isfinite()][0])
            raise ValueError(
                f"document {index}: {name} is not finite at {int(broken_T.sum())} of {broken_T.shape[0]} tokens, first "
                f"{value} at token {token}, and one such state would spoil every weight: run the "
                "hidden_states stage again, in another verifier.dtype if they overflowed"
            )
