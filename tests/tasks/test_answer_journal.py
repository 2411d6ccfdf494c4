"""The journal of answers: nothing but a cut last line is ever lost, whatever segment it is in."""

from __future__ import annotations

import pytest

from tasks.answer_journal import Journal
from tasks.answer_rows import AnswerRow


def row(conversation, turn=0):
    return AnswerRow(f"{conversation}/{turn}", conversation, turn, "s", "x", "", [1], [2, turn], "stop", "{}")


def test_a_journal_cut_at_any_byte_holds_the_rows_before(tmp_path):
    journal = Journal(tmp_path / "whole")
    for one in (row("a"), row("a", 1), row("b")):
        journal.append(one)
    journal.close()
    content = (tmp_path / "whole" / "00000.jsonl").read_bytes()
    second = content.index(b"\n", content.index(b"\n") + 1) + 1
    for length in range(second, len(content) + 1):
        folder = tmp_path / "cut"
        folder.mkdir(exist_ok=True)
        (folder / "00000.jsonl").write_bytes(content[:length])
        cut = Journal(folder)
        assert cut.turns("a") == [row("a"), row("a", 1)]
        # Without its newline nobody knows whether the line ended there.
        assert ("b" in cut) == (length == len(content))
        if "b" not in cut:
            cut.append(row("b"))
        cut.close()
        assert (folder / "00000.jsonl").read_bytes() == content


def test_a_journal_goes_on_in_new_segments_and_refuses_gaps(tmp_path):
    for _ in range(3):  # opened again and again
        journal = Journal(tmp_path, rows_per_segment=2)
        first = journal.rows
        for number in range(first, first + 3):
            journal.append(row(f"c{number}"))
        journal.close()
    assert [path.read_text().count("\n") for path in sorted(tmp_path.iterdir())] == [2, 2, 2, 2, 1]
    journal = Journal(tmp_path, rows_per_segment=2)
    assert [journal.turns(f"c{number}") for number in range(10)] == [[row(f"c{n}")] for n in range(9)] + [[]]
    with pytest.raises(ValueError, match="c1/0 is not the next turn"):
        journal.append(row("c1"))
    with pytest.raises(ValueError, match="new/1 is not the next turn"):
        journal.append(row("new", 1))
