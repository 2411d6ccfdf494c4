"""The scalar metadata at the head of a GGUF file, read in milliseconds.

The `gguf` package maps the whole file and decodes every vocabulary entry (over a second); a preflight check
only needs the few numbers that stand before the vocabulary.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9

Value = int | float | bool | str


def read_gguf_header(path: Path) -> dict[str, Value]:
    """Scalar key-value pairs of a GGUF file (version 2 or 3, little-endian); arrays are passed over.

    Raises:
        ValueError: not a GGUF file, or of an unknown version.
    """
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
        version = _scalar(stream, 4)
        if version not in (2, 3):
            raise ValueError(f"{path} has GGUF version {version}; versions 2 and 3 are understood")
        _scalar(stream, 10)  # number of tensors
        pairs = int(_scalar(stream, 10))
        header: dict[str, Value] = {}
        for _ in range(pairs):
            key = _string(stream)
            value = _value(stream, int(_scalar(stream, 4)))
            if value is not None:
                header[key] = value
        return header


def _value(stream: BinaryIO, kind: int) -> Value | None:
    if kind == _STRING:
        return _string(stream)
    if kind != _ARRAY:
        return _scalar(stream, kind)
    item_kind, length = int(_scalar(stream, 4)), int(_scalar(stream, 10))
    if item_kind in _SCALARS:
        stream.seek(length * struct.calcsize(_SCALARS[item_kind]), 1)
    elif item_kind == _STRING:
        for _ in range(length):
            stream.seek(int(_scalar(stream, 10)), 1)
    else:
        for _ in range(length):
            _value(stream, item_kind)
    return None


def _scalar(stream: BinaryIO, kind: int) -> int | float | bool:
    layout = _SCALARS.get(kind)
    if layout is None:
        raise ValueError(f"GGUF value type {kind} is unknown: the file is damaged or newer than this reader")
    data = stream.read(struct.calcsize(layout))
    if len(data) != struct.calcsize(layout):
        raise ValueError("GGUF header ends early: the file is truncated")
    value: int | float | bool = struct.unpack(layout, data)[0]
    return value


def _string(stream: BinaryIO) -> str:
    return stream.read(int(_scalar(stream, 10))).decode("utf-8", "replace")
