"""`python -m tasks.store` on a folder and on S3: what people see, and what goes and stays."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import s3fs
from typer.testing import CliRunner

from tasks.manifest import Manifest, ManifestFields
from tasks.store import ArtifactStore
from tasks.store_cli import app

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["folder", "s3"])
def root(request, tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("DSPARK_WORK", str(tmp_path / "machine"))
    return str(tmp_path / "store") if request.param == "folder" else request.getfixturevalue("s3_root")


def digest(number: int) -> str:
    return f"{number:x}" * 64


class Room:
    """A store with artifacts of two recipes: examples made from responses made from prompts."""

    def __init__(self, root: str, tmp_path: Path) -> None:
        self.store, self.tmp_path = ArtifactStore(root), tmp_path

    def commit(self, stage: str, number: int, recipe: str = "r", **ancestors: int) -> str:
        output = self.tmp_path / "output"
        output.mkdir()
        (output / "data.bin").write_bytes(bytes([number]) * 1000)
        fields = ManifestFields(
            format_version=1, identity={"size": number}, parents={}, recipe=recipe,
            counts={"rows": number}, seconds=1.0,
            fingerprints={stage: digest(number), **{name: digest(other) for name, other in ancestors.items()}},
        )  # fmt: skip
        self.store.commit(stage, digest(number), output, fields)
        time.sleep(0.01)  # newest first is by time
        return f"{stage}/{digest(number)}"

    def there(self) -> set[str]:
        return {
            f"{made.stage}/{made.fingerprint[0]}"
            for stage in self.store.stages()
            for made in self.store.manifests(stage)
        }


@pytest.fixture
def room(root, tmp_path) -> Room:
    return Room(root, tmp_path)


def run(*arguments: str, root: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*arguments, "--root", root])
    return result.exit_code, result.output


def test_ls_lists_newest_first_and_filters(room, root):
    room.commit("prompts", 1)
    room.commit("responses", 2, prompts=1)
    room.commit("prompts", 3, recipe="other")
    code, text = run("ls", root=root)
    assert code == 0
    assert [line.split()[:3] for line in text.splitlines()[1:4]] == [
        ["prompts", "33333333", "other"], ["responses", "22222222", "r"], ["prompts", "11111111", "r"],
    ]  # fmt: skip
    assert text.splitlines()[-1].startswith("3 artifacts, 0.0 MiB in ")
    assert [one["fingerprint"] for one in json.loads(run("ls", "--json", "--recipe", "r", root=root)[1])] == [
        digest(2), digest(1),
    ]  # fmt: skip
    assert [one["stage"] for one in json.loads(run("ls", "--json", "--stage", "prompts", root=root)[1])] == [
        "prompts"
    ] * 2
    code, text = run("ls", "--stage", "promts", root=root)
    assert code == 1
    assert "no artifacts of stage 'promts'; it has prompts, responses" in text


def test_show_tells_what_an_artifact_is(room, root):
    room.commit("responses", 2, prompts=1)
    code, text = run("show", "responses/22", root=root)
    assert code == 0
    for part in (digest(2), "recipe r", "rows", "data.bin", "1,000 bytes", '"size": 2'):
        assert part in text
    assert Manifest.model_validate_json(run("show", "responses/2", "--json", root=root)[1]).counts == {"rows": 2}
    assert run("show", "responses/9", root=root)[0] == 1


def test_an_ambiguous_prefix_lists_what_it_could_mean(room, root):
    for number in (2, 3):
        room.commit("responses", number)
    code, text = run("show", "responses/", root=root)
    assert code == 2
    assert "responses/22222222, responses/33333333: give more digits" in text


def test_verify_names_the_damaged_file(room, root):
    place = room.commit("prompts", 1)
    room.commit("responses", 2)
    assert run("verify", "--deep", root=root)[0] == 0
    if room.store.is_local:
        Path(root, place, "data.bin").write_bytes(b"y" * 1000)
    else:
        s3fs.S3FileSystem().pipe_file(f"{root}/{place}/data.bin", b"y" * 1000)
    code, text = run("verify", "--deep", root=root)
    assert code == 1
    assert "prompts        11111111  artifact damaged: file data.bin" in text
    assert "responses      22222222  whole" in text
    assert text.splitlines()[-1] == "2 artifacts, 1 damaged"
    assert run("verify", "responses", root=root)[0] == 0
    assert run("verify", "prompts/1", "--deep", root=root)[0] == 1
    verdicts = json.loads(run("verify", "--deep", "--json", root=root)[1])
    assert [one["verdict"] == "whole" for one in verdicts] == [False, True]


def test_gc_keeps_the_newest_of_each_recipe_with_all_ancestors(room, root):
    room.commit("prompts", 1)
    room.commit("prompts", 2)
    room.commit("responses", 3, prompts=1)  # the newest responses are made from the older prompts
    room.commit("prompts", 4)
    room.commit("responses", 5, recipe="other", prompts=2)
    everything = room.there()
    code, text = run("gc", root=root)
    assert code == 0
    assert "run again with --yes" not in text, "each is the newest, or an ancestor of one"
    room.commit("responses", 6, prompts=4)
    code, text = run("gc", root=root)
    assert room.there() == everything | {"responses/6"}, "nothing goes without --yes"
    assert "would go" in text
    assert "artifact responses 33333333 of r" in text
    assert "artifact prompts 11111111 of r" in text
    assert run("gc", "--older-than", "1", "--yes", root=root)[1].startswith("0 finds")
    assert run("gc", "--keep", "2", root=root)[1].startswith("0 finds")
    assert run("gc", "--yes", root=root)[0] == 0
    assert room.there() == {"prompts/2", "prompts/4", "responses/5", "responses/6"}
    assert run("gc", "--yes", root=root)[1].startswith("0 finds")


def age(path: Path, days: float) -> None:
    then = time.time() - days * 86400
    for inner in (*path.rglob("*"), path):
        os.utime(inner, (then, then))


def test_gc_clears_abandoned_work_and_leaves_what_is_going_on(room, root):
    room.commit("prompts", 1)
    work = room.store.work
    rooms = {name: work / "responses" / digest(number) for name, number in (("old", 2), ("new", 3), ("held", 4))}
    rooms["finished"] = work / "prompts" / digest(1)
    shared = {"spool": work / "spool" / "abc", "state": work / "states" / "r.safetensors"}
    for path in (*rooms.values(), shared["spool"]):
        path.mkdir(parents=True)
        (path / "half").write_bytes(b"x" * 100)
    shared["state"].parent.mkdir(parents=True)
    shared["state"].write_bytes(b"x")
    other = work / "logs" / "server.log"
    other.parent.mkdir(parents=True)
    other.write_text("x")
    for path in (rooms["old"], rooms["held"], *shared.values()):
        age(path, 8)
    with rooms["held"].with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, text = run("gc", "--yes", root=root)
    assert code == 0
    assert "nobody touched it for 8 days" in text
    kept = {name for name, path in {**rooms, **shared}.items() if path.exists()}
    assert kept == {"new", "held"}
    assert other.exists()
    assert room.there() == {"prompts/1"}


def test_gc_clears_uploads_that_nobody_finished(room, root, monkeypatch):
    from tasks import store_gc

    place = room.commit("prompts", 1)
    if room.store.is_local:
        Path(root, place, "manifest.json").unlink()
    else:
        s3fs.S3FileSystem().rm_file(f"{root}/{place}/manifest.json")
        s3fs.S3FileSystem().pipe_file(f"{root}/prompts/{digest(2)}.lease", b"{}")
    text = run("gc", root=root)[1]
    assert "unfinished" not in text, "somebody may be at it"
    assert "lease" not in text
    monkeypatch.setattr(store_gc, "STALE_UPLOAD_SECONDS", 0.0)
    code, text = run("gc", "--yes", root=root)
    assert code == 0
    assert "unfinished prompts 11111111" in text
    assert ("lease prompts 22222222" in text) == (not room.store.is_local)
    assert not room.store.entries("prompts")


def test_a_root_that_is_no_store_is_refused(tmp_path, root, monkeypatch):
    code, text = run("ls", root=str(tmp_path / "nothing"))
    assert code == 2
    assert "does not exist" in text
    assert not (tmp_path / "nothing").exists(), "looking makes nothing"
    if root.startswith("s3"):
        assert run("ls", root="s3://no-such-bucket-here/x")[0] == 2


def test_it_runs_as_a_module(tmp_path):
    Room(str(tmp_path / "store"), tmp_path).commit("prompts", 1)
    command = [sys.executable, "-m", "tasks.store"]
    shown = subprocess.run([*command, "--help"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for word in ("ls", "show", "verify", "gc", "Exit codes"):
        assert word in shown
    done = subprocess.run(
        [*command, "verify", "--root", str(tmp_path / "store")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.endswith("1 artifacts, 0 damaged\n")
    assert done.stderr == ""
