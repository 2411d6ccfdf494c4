"""Progress: what it says about rows, rates and time left; a bar that cannot be drawn costs nothing."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest

from tasks import progress as progress_module
from tasks.jsonl import read_jsonl, write_jsonl
from tasks.progress import Progress
from tasks.progress_bar import ProgressBar


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now.seconds)
    return now


def context(published):
    return SimpleNamespace(log=logging.getLogger("t"), progress=lambda text, share: published.append((text, share)))


def test_rates_and_time_left_follow_the_clock(clock):
    published = []
    progress = Progress(context(published), 2000, "answers", every_seconds=10.0)
    for _ in range(50):
        clock.seconds += 0.25
        progress.add(tokens=40)
    # 40 rows in the first 10 s; the next line is not due before 20 s.
    assert published == [("40 of 2,000 answers, 4 answers/s, 160 tokens/s, 0:08:10 left", 0.02)]


def test_rows_of_earlier_attempts_count_as_done_and_not_as_fast(clock):
    published = []
    progress = Progress(context(published), 100, "documents with states", done=90)
    clock.seconds += 20
    progress.add(rows=5)
    assert published == [("95 of 100 documents with states, 0.25 documents/s, 0:00:20 left", 0.95)]
    progress.add(rows=5)
    assert published[-1][0].startswith("100 of 100")


def test_a_bar_is_made_once_then_moved(monkeypatch):
    calls = []
    monkeypatch.setattr("prefect.artifacts.create_progress_artifact", lambda *a, **k: calls.append((a, k)) or "id")
    monkeypatch.setattr("prefect.artifacts.update_progress_artifact", lambda *a, **k: calls.append((a, k)))
    bar = ProgressBar("smollm2.v1-hidden_states")
    bar("half", 0.5)
    bar("more", 1.7)
    assert calls == [
        ((50.0,), {"key": "smollm2-v1-hidden-states-progress", "description": "half"}),
        (("id", 100.0), {"description": "more"}),
    ]


def test_a_bar_that_cannot_be_drawn_is_told_once_and_stops_nothing(monkeypatch, caplog):
    def refuse(*_, **__):
        raise ConnectionError("no server")

    monkeypatch.setattr("prefect.artifacts.create_progress_artifact", refuse)
    bar = ProgressBar("r-s")
    with caplog.at_level(logging.WARNING):
        bar("a", 0.1)
        bar("b", 0.2)
    assert [record.getMessage() for record in caplog.records] == [
        "no progress bar in Prefect from here on: ConnectionError: no server"
    ]


def test_json_lines_keep_every_character_and_appear_whole(tmp_path):
    rows = [{"text": "a\u2028b\r\nc\x85d\ud83d"}, {"text": "ä"}, {"n": [1, 2.5, None]}]
    path = tmp_path / "rows.jsonl"

    def broken():
        yield rows[0]
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        write_jsonl(path, broken())
    assert not path.exists()
    assert write_jsonl(path, iter(rows)) == 3
    assert list(read_jsonl(path)) == rows
    assert len(path.read_bytes().split(b"\n")) == 4, "one line each"
    assert write_jsonl(path, []) == 0
    path.write_text(json.dumps({"raw": "x"}) + '\n{"text": "a\u2028b"}\n', encoding="utf-8")
    assert [list(row.values()) for row in read_jsonl(path)] == [["x"], ["a\u2028b"]]
