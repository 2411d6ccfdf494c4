"""Fingerprints: stable over processes, sensitive to what counts, refusing what has no stable text."""

import enum
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from tasks.fingerprint import (
    DigestCache,
    FingerprintError,
    canonical_json,
    changed_fields,
    file_sha256,
    fingerprint,
)

IDENTITY = {
    "training": {"learning_rate": 0.001, "loss": {"ce": 0.1, "tv": 0.9}},
    "layers": (2, 14),
    "title": None,
}


def test_pinned() -> None:
    # A change here makes every artifact in every store stale: it must be a decision.
    made = fingerprint(stage="drafter", format_version=3, identity=IDENTITY, parents={"examples": "ab" * 32})
    assert made == "906a5ae71161ca04d8bf143d363330ad3606b5b5af25837121e7e5d7f70d2df6"


def test_is_the_sha256_of_sorted_compact_json() -> None:
    payload = {
        "format_version": 3,
        "identity": {**IDENTITY, "layers": [2, 14]},
        "parents": {"examples": "cd"},
        "stage": "drafter",
    }
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"))
    made = fingerprint(stage="drafter", format_version=3, identity=IDENTITY, parents={"examples": "cd"})
    assert made == hashlib.sha256(text.encode()).hexdigest()


def test_order_of_keys_and_kind_of_sequence_do_not_count() -> None:
    assert canonical_json({"b": (1, 2), "a": 0.5}) == canonical_json({"a": 0.5, "b": [1, 2]})


@pytest.mark.parametrize(
    "change",
    [
        {"stage": "vocab"},
        {"format_version": 4},
        {"identity": {"layers": [2]}},
        {"parents": {"examples": "ff"}},
    ],
)
def test_every_part_counts(change: dict) -> None:
    base = {"stage": "drafter", "format_version": 3, "identity": IDENTITY, "parents": {"examples": "ab"}}
    assert fingerprint(**base) != fingerprint(**{**base, **change})


class Colour(str, enum.Enum):  # noqa: UP042
    RED = "red"


@pytest.mark.parametrize(
    "value",
    [{1, 2}, Path("a"), Colour.RED, float("nan"), float("inf"), np.float64(1.0), b"x", object(), {1: 2}],
)
def test_values_without_stable_text_are_refused_by_name(value: object) -> None:
    with pytest.raises(FingerprintError, match=r"identity\.training\.x"):
        canonical_json({"training": {"x": value}})


def test_changed_fields_names_field_and_both_values() -> None:
    old = {"training": {"learning_rate": 0.001, "steps": 5, "loss": {"ce": 0.1}}}
    new = {"training": {"learning_rate": 0.0003, "seed": 1, "loss": {"ce": 0.1}}}
    assert changed_fields(old, new) == [
        "field training.learning_rate changed: 0.001 -> 0.0003",
        "field training.seed added: 1",
        "field training.steps removed: was 5",
    ]


def test_digest_cache_rereads_only_what_was_touched(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    cache = DigestCache(tmp_path / "work" / "digests.sqlite")
    assert cache.known(file) is None
    assert cache.sha256(file) == hashlib.sha256(b"one").hexdigest() == cache.known(file)
    file.write_bytes(b"two")
    assert cache.sha256(file) == file_sha256(file) == hashlib.sha256(b"two").hexdigest()
    assert DigestCache(tmp_path / "work" / "digests.sqlite").known(file) == hashlib.sha256(b"two").hexdigest()
