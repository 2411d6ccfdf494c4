"""Artifacts to and from S3 over a spoiled network, after kills, and by several machines at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import s3fs

from tasks import lease as lease_module
from tasks.files import Files
from tasks.lease import leased
from tasks.manifest import ManifestFields
from tasks.store import ArtifactStore
from tasks.transfer import STAGING_NAME
from tests.fault_proxy import fault_proxy

REPOSITORY = Path(__file__).resolve().parents[2]
FINGERPRINT = "0123456789abcdef" * 4
FIELDS = ManifestFields(
    format_version=1, identity={}, parents={}, fingerprints={"vocab": FINGERPRINT}, recipe="toy", counts={}, seconds=1.0
)
FILES = 24


def finished_folder(at: Path, version: int = 0) -> Path:
    (at / "deep").mkdir(parents=True)
    for number in range(FILES):
        name = f"deep/{number}.bin" if number % 2 else f"{number}.bin"
        (at / name).write_bytes(bytes([number, version]) * 2000)
    return at


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.bin")}


@pytest.fixture
def behind_proxy(s3_root, s3_endpoint, monkeypatch):
    """Reach the S3 server through a proxy: (root, proxy factory)."""

    def through(proxy):
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        s3fs.S3FileSystem.clear_instance_cache()

    return s3_root, s3_endpoint, through


@pytest.mark.parametrize("fault", ["429", "500", "503", "reset", "reset_after", "slow", "truncated"])
def test_every_fault_is_survived_both_ways(behind_proxy, tmp_path, fault):
    root, endpoint, through = behind_proxy
    with fault_proxy(endpoint, faults=[fault], every=9, seed=1) as proxy:
        through(proxy)
        expected = contents(finished_folder(tmp_path / "copy"))
        ref = ArtifactStore(root, work=tmp_path / "one").commit(
            "vocab", FINGERPRINT, finished_folder(tmp_path / "o"), FIELDS
        )
        other = ArtifactStore(root, work=tmp_path / "two")
        assert contents(other.localise(ref)) == expected
        other.verify(ref, deep=True)
        assert proxy.injected[fault] >= 5


UPLOADER = """
import sys
from pathlib import Path
from tasks.store import ArtifactStore
from tests.tasks.test_store_transfer import FIELDS, FINGERPRINT
store = ArtifactStore(sys.argv[1], work=Path(sys.argv[2]))
print("ready", flush=True)
store.commit("vocab", FINGERPRINT, Path(sys.argv[3]), FIELDS)
"""


def upload(root: str, work: Path, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", UPLOADER, root, str(work), str(folder)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def remote() -> s3fs.S3FileSystem:
    """Without remembered listings: other processes write."""
    return s3fs.S3FileSystem(use_listings_cache=False)


def puts(proxy) -> list[str]:
    return [path for method, path in proxy.requests if method == "PUT" and path.split("?")[0].endswith(".bin")]


@pytest.mark.parametrize("number", [1, 9, 20])
def test_a_killed_upload_is_no_artifact_and_continues_with_the_rest(behind_proxy, tmp_path, number):
    root, endpoint, through = behind_proxy
    folder = finished_folder(tmp_path / "output")
    expected = contents(folder)
    with fault_proxy(endpoint, faults=["slow"], every=1) as proxy:
        through(proxy)
        process = upload(root, tmp_path / "one", folder)
        while len(puts(proxy)) < number:
            assert process.poll() is None
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    store = ArtifactStore(root, work=tmp_path / "two")
    with fault_proxy(endpoint, faults=[]) as proxy:
        through(proxy)
        ref = store.ref("vocab", FINGERPRINT)
        assert not store.exists(ref)
        there = {path.rsplit("/", 1)[-1] for path in remote().find(ref.uri) if path.endswith(".bin")}
        assert len(there) >= number - 8, "up to eight were under way"
        proxy.requests.clear()
        assert upload(root, tmp_path / "one", folder).wait() == 0
        sent = {path.rsplit("/", 1)[-1].split("?")[0] for path in puts(proxy)}
        assert sent == {path.rsplit("/", 1)[-1] for path in expected} - there
        assert contents(store.localise(ref)) == expected
        store.verify(ref, deep=True)
        assert not remote().exists(f"{ref.uri}/{STAGING_NAME}")


def test_leftovers_of_other_content_are_not_taken_for_ours(s3_root, tmp_path):
    """Same names and sizes, other bytes: an upload of an earlier version that was killed."""
    store = ArtifactStore(s3_root, work=tmp_path / "work")
    old, new = finished_folder(tmp_path / "old", 1), finished_folder(tmp_path / "new", 2)
    expected = contents(new)
    ref = store.commit("vocab", FINGERPRINT, old, FIELDS)
    filesystem = remote()
    filesystem.rm_file(f"{ref.uri}/manifest.json")
    filesystem.pipe_file(f"{ref.uri}/stray", b"x")
    store.commit("vocab", FINGERPRINT, new, FIELDS)
    store.verify(ref, deep=True)
    assert contents(ArtifactStore(s3_root, work=tmp_path / "other").localise(ref)) == expected
    assert not filesystem.exists(f"{ref.uri}/stray")


# --- leases


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(lease_module, "EXPIRES_SECONDS", 0.8)
    monkeypatch.setattr(lease_module, "POLL_SECONDS", 0.05)


class Log:
    def __init__(self):
        self.lines = []

    def info(self, message, *arguments):
        self.lines.append(message % arguments)

    warning = info


def test_one_holds_a_lease_and_the_other_waits_until_it_ends(s3_root, quick):
    files, order, log = Files(s3_root), [], Log()

    def second():
        with leased(files, "x.lease", "/b", log, "another machine builds x"):
            order.append("second")

    with leased(files, "x.lease", "/a", log, "w") as held:
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(1.2)  # longer than an unrenewed lease lives
        order.append("first")
        assert not held.lost
    thread.join(timeout=20)
    assert order == ["first", "second"]
    assert files.tag("x.lease") is None
    assert log.lines[0].startswith("waiting: another machine builds x (held by ")


HOLDER = """
import logging, sys, time
from tasks import lease
from tasks.files import Files
lease.RENEW_SECONDS = 0.1
with lease.leased(Files(sys.argv[1]), "x.lease", "/killed", logging.getLogger(), "w"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lease_of_a_killed_holder_is_taken_over(s3_root, quick):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, s3_root], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    process.kill()
    process.wait()
    log = Log()
    with leased(Files(s3_root), "x.lease", "/other", log, "w") as lease:
        assert not lease.lost
    assert "took over the lease" in log.lines[-1]


def test_the_same_place_goes_on_at_once_after_a_kill(s3_root, monkeypatch):
    monkeypatch.setattr(lease_module, "EXPIRES_SECONDS", 3600.0)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, s3_root], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    process.kill()
    process.wait()
    log = Log()
    with leased(Files(s3_root), "x.lease", "/killed", log, "w") as lease:
        assert not lease.lost
    assert log.lines == []


def test_a_holder_learns_that_its_lease_was_taken(s3_root, quick):
    files = Files(s3_root)
    with leased(files, "x.lease", "/a", Log(), "w") as lease:
        files.write("x.lease", b"somebody else")
        deadline = time.monotonic() + 10
        while not lease.lost and time.monotonic() < deadline:
            time.sleep(0.02)
        assert lease.lost
    assert files.read("x.lease") == b"somebody else", "what is not ours is left alone"


def test_only_one_of_many_takers_wins(s3_root, quick):
    files, holders, most = Files(s3_root), [], []
    files.write("x.lease", b"dead")

    def take(number):
        with leased(Files(s3_root), "x.lease", f"/{number}", Log(), "w"):
            holders.append(1)
            most.append(len(holders))
            time.sleep(0.1)
            holders.pop()

    threads = [threading.Thread(target=take, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert most == [1, 1, 1, 1]


def test_a_folder_needs_no_lease(tmp_path):
    with leased(Files(str(tmp_path)), "x.lease", "/a", Log(), "w") as lease:
        assert lease is None
    assert not list(tmp_path.iterdir())


MACHINE = """
import sys, time
from pathlib import Path
from tasks import lease
from tasks.build import build_artifact
from tasks.pipeline import resolve
from tasks.store import ArtifactStore
from tests.toy_stages import RECIPE, Toy, ToyServers
lease.POLL_SECONDS = 0.05
toy = Toy()
toy.before["verifier"] = lambda context: (print("building", flush=True), time.sleep(1.0))
step = resolve(RECIPE, toy.stages)["verifier"]
print("ready", flush=True)
store = ArtifactStore(sys.argv[1], work=Path(sys.argv[2]))
_, made = build_artifact(step, RECIPE, store, lambda: ToyServers(Path("x")))
print("made" if made else "reused", flush=True)
"""


def test_two_machines_on_one_store_do_the_work_once(s3_root, tmp_path):
    machines = [
        subprocess.Popen(
            [sys.executable, "-c", MACHINE, s3_root, str(tmp_path / f"work{number}")],
            cwd=REPOSITORY, stdout=subprocess.PIPE, text=True,
        )
        for number in range(3)
    ]  # fmt: skip
    outputs = [machine.communicate(timeout=60)[0].split() for machine in machines]
    assert sorted(outputs) == [["ready", "building", "made"], ["ready", "reused"], ["ready", "reused"]]
