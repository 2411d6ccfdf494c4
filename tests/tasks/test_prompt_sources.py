"""Prompts from files and from the hub."""

from __future__ import annotations

import gzip
import json
import random
from types import SimpleNamespace

import pytest

from tasks import hub_prompts
from tasks.prompt_files import shuffled_records
from tasks.prompt_rows import PromptRow, PromptsError, Unusable
from tasks.prompt_sources import open_stream, source_identity, source_names
from tasks.recipe_data import PromptsSection


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def stream_of(scratch, source, seed=0):
    section = PromptsSection(sources=[source], seed=seed)
    (one,) = section.sources
    return open_stream(one, source_names(section.sources)[0], section, scratch, lambda wanted: iter(()))


def rows_of(scratch, source, seed=0):
    return list(stream_of(scratch, source, seed).candidates)


QUESTIONS = [{"prompt": f"Question number {i}?"} for i in range(20)]


# --- files


@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "json", "parquet", "jsonl.gz", "s3 jsonl", "s3 parquet", "s3 gz"])
def test_every_kind_of_file_gives_the_same_rows_in_the_same_order(tmp_path, request, kind):
    from pyarrow import Table, parquet

    plain = write_lines(tmp_path / "plain.jsonl", QUESTIONS)
    expected = [row.id for row in rows_of(tmp_path, str(plain), seed=3)]
    random_order = list(range(20))
    random.Random(3).shuffle(random_order)
    texts = [row.messages[0]["content"] for row in rows_of(tmp_path, str(plain), seed=3)]
    assert texts == [f"Question number {i}?" for i in random_order]
    suffix = {"s3 jsonl": "jsonl", "s3 parquet": "parquet", "s3 gz": "jsonl.gz"}.get(kind, kind)
    path = tmp_path / f"other.{suffix}"
    if suffix == "parquet":
        parquet.write_table(Table.from_pylist(QUESTIONS), path)
    elif suffix == "json":
        path.write_text(json.dumps(QUESTIONS))
    elif suffix.endswith("gz"):
        path.write_bytes(gzip.compress(plain.read_bytes()))
    else:
        path.write_bytes(plain.read_bytes())
    source = str(path)
    if kind.startswith("s3"):
        import s3fs

        source = f"{request.getfixturevalue('s3_root')}/{path.name}"
        s3fs.S3FileSystem().put_file(str(path), source)
    found = rows_of(tmp_path / "scratch", source, seed=3)
    assert [row.id for row in found] == expected
    assert {row.source for row in found} == {path.name}, "no place on this machine"
    assert [row.id for row in rows_of(tmp_path / "scratch", source, seed=4)] != expected


def test_several_files_are_one_source(tmp_path):
    for number in range(3):
        write_lines(tmp_path / f"part-{number}.jsonl", QUESTIONS[number * 5 : number * 5 + 5])
    write_lines(tmp_path / "other.jsonl", QUESTIONS[15:])
    found = rows_of(tmp_path, str(tmp_path / "part-*.jsonl"))
    assert sorted(row.messages[0]["content"] for row in found) == sorted(q["prompt"] for q in QUESTIONS[:15])
    whole = write_lines(tmp_path / "whole.jsonl", QUESTIONS[:15])
    assert [row.id for row in found] == [row.id for row in rows_of(tmp_path, str(whole))]


def test_broken_lines_are_counted_by_number_and_the_others_survive(tmp_path):
    path = tmp_path / "poisoned.jsonl"
    good = [json.dumps({"prompt": f"Good {i} \u2028 yes?"}, ensure_ascii=False).encode() for i in range(5)]
    bad = {
        b'{"prompt": ': "invalid_json",
        b'{"prompt": "\xff\xfe"}': "invalid_utf8",
        b"[1, 2]": "no_object",
        b'{"prompt": null}': "no_conversation",
        b'{"prompt": "   "}': "empty_turn",
        b'{"prompt": "half a smiley \\ud83d"}': "invalid_unicode",
        b'{"messages": [{"role": "assistant", "content": "No question here."}]}': "no_user_turn",
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}': "not_text",
        b'{"messages": [{"role": "narrator", "content": "x"}]}': "unknown_role",
        b'{"messages": "x", "tools": 5}': "broken_tools",
        b"[" * 100000: "invalid_json",
    }
    lines = [*good[:2], b"", *bad, *good[2:]]
    path.write_bytes(b"\n".join(lines))
    found = rows_of(tmp_path, str(path))
    assert sorted(row.messages[0]["content"] for row in found if isinstance(row, PromptRow)) == [
        f"Good {i} \u2028 yes?" for i in range(5)
    ]
    reasons = {one.where: one.reason for one in found if isinstance(one, Unusable)}
    numbers = {f"poisoned.jsonl record {number}": reason for number, reason in enumerate(bad.values(), start=3)}
    assert reasons == numbers


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no records"),
        (b"\n\n", "holds no records"),
        (b'{"text": "x", "label": 1}\n', "has no column any of messages, conversations, prompt.*it has label, text"),
    ],
)
def test_files_without_conversations_are_refused(tmp_path, content, message):
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    with pytest.raises(PromptsError, match=message):
        rows_of(tmp_path, str(path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.json", b'{"prompt": "x"}', "holds dict, not an array"),
        ("d.json", b"[1,", "is not valid JSON .*one object per line ends in .jsonl"),
        ("d.parquet", b"PAR1 no", "cannot be read as Parquet"),
        ("d.jsonl.gz", b"no gzip", "is not a whole gzip file"),
        ("d.jsonl.gz", gzip.compress(b'{"prompt": "x"}' * 999)[:-9], "is not a whole gzip file"),
    ],
)
def test_files_that_are_not_what_their_name_says_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PromptsError, match=message):
        rows_of(tmp_path / "scratch", str(tmp_path / name))


def test_a_column_can_be_named(tmp_path):
    path = write_lines(tmp_path / "d.jsonl", [{"dialog": [{"from": "human", "value": "Who?"}], "prompt": "not this"}])
    (row,) = rows_of(tmp_path, {"source": str(path), "column": "dialog", "license": "mit"})
    assert (row.messages, row.license) == (({"role": "user", "content": "Who?"},), "mit")
    with pytest.raises(PromptsError, match=r"has no column 'dialogue'; it has dialog, prompt.*`column`"):
        rows_of(tmp_path, {"source": str(path), "column": "dialogue"})


def test_a_file_is_shuffled_without_being_held(tmp_path):
    """Only places of lines are kept: the records of a file come one by one."""
    path = write_lines(tmp_path / "d.jsonl", ({"prompt": f"{i} " + "x" * 1000} for i in range(3000)))
    import tracemalloc

    tracemalloc.start()
    count = sum(1 for _ in shuffled_records([str(path)], 0, tmp_path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 3000
    assert peak < 1_000_000 < path.stat().st_size


def test_requests_that_a_later_one_repeats_are_superseded(tmp_path):
    turns = [{"role": "system", "content": "s"}]
    log = []
    for number in range(3):
        turns = [*turns, {"role": "user", "content": f"turn {number}"}]
        log.append({"request": {"model": "m", "messages": turns}, "response": {}})
        turns = [*turns, {"role": "assistant", "content": f"answer {number}"}]
    log.append({"body": json.dumps({"messages": [{"role": "user", "content": "alone"}]}), "custom_id": "1"})
    log.append({"request": {"messages": [{"role": "system", "content": "t"}, {"role": "user", "content": "turn 0"}]}})
    found = rows_of(tmp_path, str(write_lines(tmp_path / "log.jsonl", log)))
    kept = sorted(row.messages[-1]["content"] for row in found if isinstance(row, PromptRow))
    assert kept == ["alone", "turn 0", "turn 2"], "the other turn 0 has another system prompt"
    assert [one.reason for one in found if isinstance(one, Unusable)] == ["superseded"] * 2


def test_identity_of_remote_files_follows_their_content(tmp_path, s3_root):
    import s3fs

    filesystem = s3fs.S3FileSystem()
    identities = []
    for name, content in (("a", b'{"prompt": "x"}'), ("b", b'{"prompt": "x"}'), ("a", b'{"prompt": "y"}')):
        filesystem.pipe_file(f"{s3_root}/{name}.jsonl", content)
        section = PromptsSection(sources=[f"{s3_root}/{name}.jsonl"])
        s3fs.S3FileSystem.clear_instance_cache()
        identities.append(source_identity(section.sources[0]))
    assert identities[0] == identities[1] != identities[2]
    with pytest.raises(PromptsError, match="no such file"):
        source_identity(PromptsSection(sources=[f"{s3_root}/none.jsonl"]).sources[0])
    with pytest.raises(PromptsError, match=r"cannot be reached|no such file"):
        source_identity(PromptsSection(sources=["s3://no-such-bucket-at-all/x.jsonl"]).sources[0])


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["/a/chats.jsonl", "/b/chats.jsonl", "self"], ["chats.jsonl", "chats.jsonl#2", "self"]),
        (["org/data", "s3://b/p/x.parquet"], ["data", "x.parquet"]),
    ],
)
def test_names_in_reports_hold_no_place(names, shown):
    assert source_names(PromptsSection(sources=names).sources) == shown


# --- the hub, at the boundary of its libraries


@pytest.fixture
def hub(monkeypatch):
    import datasets
    import huggingface_hub

    asked = SimpleNamespace(loads=[], infos=[])
    hub_prompts.hub_facts.cache_clear()

    def load(name, config, *, split, revision, streaming):
        asked.loads.append((name, config, split, revision, streaming))
        data = datasets.Dataset.from_list(QUESTIONS)
        return data.to_iterable_dataset() if streaming else data

    def info(self, name, revision=None):
        asked.infos.append((name, revision))
        if "unreachable" in name:
            raise ConnectionError("no route")
        return SimpleNamespace(sha="5" * 40, card_data={"license": ["mit", "cc0"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    yield asked
    hub_prompts.hub_facts.cache_clear()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_dataset_is_read_at_one_commit_in_seeded_order(hub, tmp_path, streaming):
    source = {"source": "owner/chats", "config": "big", "split": "test", "streaming": streaming}
    first, again = (rows_of(tmp_path, source, seed=1) for _ in range(2))
    other = rows_of(tmp_path, source, seed=2)
    assert set(hub.loads) == {("owner/chats", "big", "test", "5" * 40, streaming)}
    assert [r.id for r in first] == [r.id for r in again] != [r.id for r in other]
    assert {r.id for r in first} == {r.id for r in other}
    assert len(first) == 20
    assert {(r.source, r.license) for r in first} == {(f"owner/chats@{'5' * 40}", "mit, cc0")}


@pytest.mark.parametrize(
    ("name", "repo_id", "split"),
    [
        ("open-perfectblend", "mlabonne/open-perfectblend", "train"),
        ("ultrachat", "HuggingFaceH4/ultrachat_200k", "train_sft"),
        ("magpie", "Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered", "train"),
        ("sharegpt", "Aeala/ShareGPT_Vicuna_unfiltered", "train"),
    ],
)
def test_presets_name_their_repository_and_split(hub, tmp_path, name, repo_id, split):
    rows_of(tmp_path, name)
    assert hub.loads[0][::2] == (repo_id, split, False)
    assert hub.loads[0][3] == "5" * 40


def test_the_commit_decides_the_fingerprint_and_a_pinned_one_needs_no_connection(hub):
    def identity(**fields):
        return source_identity(PromptsSection(sources=[{"source": "owner/chats", **fields}]).sources[0])

    assert identity()["revision"] == "5" * 40
    assert identity(revision="5" * 40) == identity()
    assert identity(revision="6" * 40) != identity()
    asked = len(hub.infos)
    unreachable = {"source": "owner/unreachable", "revision": "7" * 40}
    assert source_identity(PromptsSection(sources=[unreachable]).sources[0])["revision"] == "7" * 40
    assert len(hub.infos) == asked
    with pytest.raises(
        PromptsError, match=r"'owner/unreachable' at its newest revision and said: no route.*`revision`"
    ):
        identity(source="owner/unreachable")


def test_an_unknown_split_is_named(hub, tmp_path, monkeypatch):
    import datasets

    def load(*_, **__):
        raise ValueError("Unknown split 'tset'")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(PromptsError, match=r"'owner/chats', split 'tset': Unknown split"):
        rows_of(tmp_path, {"source": "owner/chats", "split": "tset"})
