"""Columns of token ids as numpy arrays: a million rows without a Python object per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa


def ragged(table: pa.Table, column: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """A list column end to end: values [total], and the offsets [rows + 1] of its rows in them."""
    combined = table.column(column).combine_chunks()
    values = combined.flatten().to_numpy(zero_copy_only=False).astype(np.int32, copy=False)
    lengths = combined.value_lengths().to_numpy(zero_copy_only=False)
    return values, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def spans(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions of several ranges, one after the other: starts[0], starts[0] + 1, ..., starts[1], ..."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
