"""The artifact store, in a folder and against a real S3-protocol server."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import s3fs

from tasks.manifest import MANIFEST_NAME, ArtifactRef, ManifestFields
from tasks.store import ArtifactDamagedError, ArtifactMissingError, ArtifactStore, StoreError

FINGERPRINT = "0123456789abcdef" * 4
FIELDS = ManifestFields(
    format_version=1,
    identity={"a": {"b": 1}},
    parents={"prompts": "f" * 64},
    fingerprints={"prompts": "f" * 64, "vocab": FINGERPRINT},
    recipe="toy",
    counts={"rows": 3, "share": 0.5, "mode": "full"},
    seconds=1.5,
)


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    root = str(tmp_path / "store") if request.param == "folder" else request.getfixturevalue("s3_root")
    return ArtifactStore(root, work=tmp_path / "work")


def finished_folder(at: Path) -> Path:
    (at / "deep").mkdir(parents=True)
    (at / "rows.jsonl").write_text('{"id": 1}\n')
    (at / "deep" / "data.bin").write_bytes(bytes(range(256)) * 100)
    return at


def commit(store: ArtifactStore, tmp_path: Path, fingerprint: str = FINGERPRINT) -> ArtifactRef:
    return store.commit("vocab", fingerprint, finished_folder(tmp_path / "output"), FIELDS)


def overwrite(store: ArtifactStore, ref: ArtifactRef, file: str, content: bytes) -> None:
    if store.is_local:
        Path(ref.uri, file).write_bytes(content)
    else:
        s3fs.S3FileSystem().pipe_file(f"{ref.uri}/{file}", content)


def forget_downloads(store: ArtifactStore) -> None:
    if not store.is_local:
        shutil.rmtree(store.work)
        store._digests = None


def test_round_trip(store: ArtifactStore, tmp_path: Path) -> None:
    store.check()
    ref = commit(store, tmp_path)
    assert store.exists(ref)
    assert ref == store.ref("vocab", FINGERPRINT)
    manifest = store.verify(ref, deep=True)
    assert {entry.path: entry.size for entry in manifest.files} == {"rows.jsonl": 10, "deep/data.bin": 25600}
    assert manifest.counts == FIELDS.counts
    assert manifest.parents == FIELDS.parents
    assert manifest.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    forget_downloads(store)
    folder = store.localise(ref)
    assert (folder / "deep" / "data.bin").read_bytes() == bytes(range(256)) * 100
    assert not (tmp_path / "output").exists()


def test_absent_artifact(store: ArtifactStore) -> None:
    ref = store.ref("vocab", FINGERPRINT)
    assert not store.exists(ref)
    assert store.latest("vocab") is None
    with pytest.raises(ArtifactMissingError, match="run the pipeline"):
        store.verify(ref)
    with pytest.raises(ArtifactMissingError):
        store.localise(ref)


def test_changed_size_is_seen_without_reading(store: ArtifactStore, tmp_path: Path) -> None:
    ref = commit(store, tmp_path)
    overwrite(store, ref, "rows.jsonl", b"short")
    with pytest.raises(ArtifactDamagedError, match=r"file rows\.jsonl .* 5 bytes, expected 10; the next run"):
        store.verify(ref)


def test_flipped_byte_is_seen(store: ArtifactStore, tmp_path: Path) -> None:
    ref = commit(store, tmp_path)
    overwrite(store, ref, "rows.jsonl", b'{"id": 2}\n')
    with pytest.raises(ArtifactDamagedError, match=r"file rows\.jsonl .* sha256"):
        store.verify(ref, deep=True)
    forget_downloads(store)
    with pytest.raises(ArtifactDamagedError, match=r"file rows\.jsonl .* sha256"):
        store.localise(ref)


def test_local_flipped_byte_is_seen_without_deep(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "store")
    ref = commit(store, tmp_path)
    overwrite(store, ref, "rows.jsonl", b'{"id": 2}\n')
    with pytest.raises(ArtifactDamagedError, match="sha256"):
        store.verify(ref)


def test_missing_file_is_seen(store: ArtifactStore, tmp_path: Path) -> None:
    ref = commit(store, tmp_path)
    if store.is_local:
        Path(ref.uri, "rows.jsonl").unlink()
    else:
        s3fs.S3FileSystem().rm_file(f"{ref.uri}/rows.jsonl")
    with pytest.raises(ArtifactDamagedError, match=r"rows\.jsonl .* missing"):
        store.verify(ref)


def test_unreadable_manifest_is_damage(store: ArtifactStore, tmp_path: Path) -> None:
    ref = commit(store, tmp_path)
    overwrite(store, ref, MANIFEST_NAME, b'{"stage"')
    with pytest.raises(ArtifactDamagedError, match=r"manifest\.json"):
        store.verify(ref)
    assert store.manifests("vocab") == []


def test_commit_replaces_a_damaged_artifact(store: ArtifactStore, tmp_path: Path) -> None:
    ref = commit(store, tmp_path)
    overwrite(store, ref, "rows.jsonl", b"short")
    overwrite(store, ref, "stray", b"of an older attempt")
    assert commit(store, tmp_path) == ref
    store.verify(ref, deep=True)
    assert not (store.localise(ref) / "stray").exists()


def test_delete(store: ArtifactStore, tmp_path: Path) -> None:
    ref = commit(store, tmp_path)
    store.delete(ref)
    store.delete(ref)
    assert not store.exists(ref)
    with pytest.raises(ArtifactMissingError):
        store.localise(ref)


def test_latest_prefers_the_newest_that_is_accepted(store: ArtifactStore, tmp_path: Path) -> None:
    for digit in "abc":
        commit(store, tmp_path, digit * 64)
    newest = store.latest("vocab")
    assert newest is not None
    assert newest.fingerprint == "c" * 64
    older = store.latest("vocab", lambda manifest: manifest.fingerprint < "c" * 64)
    assert older is not None
    assert older.fingerprint == "b" * 64


def test_empty_folder_and_links_are_refused(store: ArtifactStore, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="wrote no files"):
        store.commit("vocab", FINGERPRINT, tmp_path / "empty", FIELDS)
    linked = finished_folder(tmp_path / "linked")
    (linked / "link").symlink_to("/etc/hosts")
    with pytest.raises(ValueError, match="symbolic link"):
        store.commit("vocab", FINGERPRINT, linked, FIELDS)
    assert not store.exists(store.ref("vocab", FINGERPRINT))


def test_interrupted_download_continues(s3_root: str, tmp_path: Path) -> None:
    store = ArtifactStore(s3_root, work=tmp_path / "work")
    ref = commit(store, tmp_path)
    forget_downloads(store)
    partial = tmp_path / "work" / "downloads" / "vocab" / f"{FINGERPRINT}.partial"
    (partial / "deep").mkdir(parents=True)
    (partial / "deep" / "data.bin").write_bytes(bytes(range(256)) * 100)
    (partial / "rows.jsonl").write_bytes(b"half a fi")
    before = (partial / "deep" / "data.bin").stat().st_ino
    folder = store.localise(ref)
    assert (folder / "rows.jsonl").read_text() == '{"id": 1}\n'
    assert (folder / "deep" / "data.bin").stat().st_ino == before
    assert not partial.exists()


def test_unusable_roots_are_refused_with_a_remedy(s3_root: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="AWS_ENDPOINT_URL"):
        ArtifactStore("s3://no-such-bucket/x", work=tmp_path).check()
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        ArtifactStore(tmp_path / "file" / "store").check()
    with pytest.raises(StoreError, match="expected a folder or s3"):
        ArtifactStore("nonsense://x")


COMMITTER = """
import sys, itertools, shutil
from pathlib import Path
from tests.tasks.test_store import FIELDS, finished_folder
from tasks.store import ArtifactStore
store, output = ArtifactStore(sys.argv[1], work=Path(sys.argv[2])), Path(sys.argv[2]) / "output"
for turn in itertools.count():
    shutil.rmtree(output, ignore_errors=True)
    store.commit("vocab", f"{turn % 4:064x}", finished_folder(output), FIELDS)
    print(turn, flush=True)
"""


def test_kill_during_commit_leaves_whole_artifacts_or_none(store: ArtifactStore, tmp_path: Path) -> None:
    for turn in range(8):
        work = tmp_path / f"victim{turn}"
        command = [sys.executable, "-c", COMMITTER, store.root, str(work)]
        repo = Path(__file__).resolve().parents[2]
        environment = {**os.environ, "PYTHONPATH": str(repo)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as victim:
            assert victim.stdout is not None
            for _ in range(1 + turn % 4):  # from the fifth commit on, artifacts are replaced
                victim.stdout.readline()
            time.sleep(0.003 * turn)  # chance decides where in a commit the kill lands
            victim.send_signal(signal.SIGKILL)
        for manifest in store.manifests("vocab"):
            store.verify(store.ref("vocab", manifest.fingerprint), deep=True)
    assert store.manifests("vocab")
