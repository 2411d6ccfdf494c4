"""The artifact store: whole, verified, addressed by fingerprint, in a folder or in S3."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tasks.files import Files
from tasks.fingerprint import DigestCache, file_sha256
from tasks.folders import discard_folder, inventory, replace_folder, write_durably
from tasks.lease import SUFFIX, Lease, leased
from tasks.lock import exclusive
from tasks.manifest import MANIFEST_NAME, ArtifactRef, FileEntry, Manifest, ManifestFields
from tasks.provenance import git_sha, software_versions, utc_now
from tasks.store_places import default_root, default_work
from tasks.transfer import DamagedFileError, check_sums, end_staging, fetch, send

_FINGERPRINT = re.compile(r"^[0-9a-f]{64}$")
_STAGE = re.compile(r"[a-z][a-z0-9_]*")
_LOG = logging.getLogger("dspark.store")


class StoreError(RuntimeError):
    """The store cannot be used as asked; the message names the remedy."""


class ArtifactMissingError(StoreError):
    """No manifest: the artifact was never committed, or was deleted."""


class ArtifactDamagedError(StoreError):
    """A file of a committed artifact is missing or differs from the manifest."""


class ArtifactStore:
    """Artifacts at `<root>/<stage>/<fingerprint>/`, each with a manifest that is written last.

    Args:
        root: a folder or `s3://bucket/prefix` (credentials and AWS_ENDPOINT_URL from the environment).
        work: local working folder; by default beside a local root, else `.dspark/remote/<bucket-prefix>`.

    Raises:
        StoreError: a root that is neither.
    """

    def __init__(self, root: str | Path | None = None, work: Path | None = None) -> None:
        text = str(root or default_root()).removeprefix("file://")
        self.is_local = "://" not in text
        self.root = os.path.abspath(os.path.expanduser(text)) if self.is_local else text.rstrip("/")
        self.work = work or default_work(self.root, self.is_local)
        self._digests: DigestCache | None = None
        try:
            self._files = Files(self.root)
        except (ValueError, ImportError) as error:
            raise StoreError(f"store={self.root!r}: expected a folder or s3://bucket/prefix ({error})") from error

    def check(self) -> None:
        """Fail now, not after hours of work, when the root cannot be written.

        Raises:
            StoreError: the bucket does not exist, or access is denied.
        """
        try:
            if self.is_local:
                Path(self.root).mkdir(parents=True, exist_ok=True)
                if not os.access(self.root, os.W_OK):
                    raise PermissionError("not writable")
            elif not self._files.bucket_exists():
                raise FileNotFoundError("no such bucket, or it may not be seen")
        except Exception as error:
            raise StoreError(
                f"store={self.root!r} cannot be used ({error}): create it, "
                "or check its permissions (for S3: credentials and AWS_ENDPOINT_URL)"
            ) from error

    @property
    def digests(self) -> DigestCache:
        """Remembered sha256 sums of local files."""
        if self._digests is None:
            self._digests = DigestCache(self.work / "digests.sqlite")
        return self._digests

    def ref(self, stage: str, fingerprint: str) -> ArtifactRef:
        """The reference that a stage and fingerprint have in this store, committed or not."""
        return ArtifactRef(stage=stage, fingerprint=fingerprint, uri=f"{self.root}/{stage}/{fingerprint}")

    def exists(self, ref: ArtifactRef) -> bool:
        """Whether a manifest is there; says nothing about the files (see `verify`)."""
        return self._files.exists(f"{_place(ref)}/{MANIFEST_NAME}")

    def manifest(self, ref: ArtifactRef) -> Manifest:
        """Read an artifact's manifest.

        Raises:
            ArtifactMissingError: no manifest.
            ArtifactDamagedError: it cannot be read.
        """
        try:
            return Manifest.model_validate_json(self._files.read(f"{_place(ref)}/{MANIFEST_NAME}"))
        except FileNotFoundError:
            raise ArtifactMissingError(f"{ref.uri} does not exist: run the pipeline to make it") from None
        except ValidationError as error:
            raise _damaged(ref, MANIFEST_NAME, f"not a manifest ({error.error_count()} faults)") from error

    def read_json(self, ref: ArtifactRef, file: str) -> Any:
        """A small JSON file of an artifact, None if it has no such file."""
        text = self.read_text(ref, file)
        return None if text is None else json.loads(text)

    def read_text(self, ref: ArtifactRef, file: str) -> str | None:
        """A small text file of an artifact, None if it has no such file."""
        try:
            return self._files.read(f"{_place(ref)}/{file}").decode()
        except FileNotFoundError:
            return None

    def verify(self, ref: ArtifactRef, deep: bool = False) -> Manifest:
        """Check every file against the manifest.

        Sizes are always compared. A local file is read unless its sum is remembered for its present size and
        time; `deep` reads all files, remote ones too.

        Raises:
            ArtifactMissingError: no such artifact.
            ArtifactDamagedError: names the file, what differs and the remedy.
        """
        manifest = self.manifest(ref)
        sizes = self._files.sizes(_place(ref))
        for entry in manifest.files:
            if entry.path not in sizes:
                raise _damaged(ref, entry.path, "missing")
            if sizes[entry.path] != entry.size:
                raise _damaged(ref, entry.path, f"{sizes[entry.path]} bytes, expected {entry.size}")
        if self.is_local or deep:
            with _naming(ref):
                check_sums(manifest.files, lambda entry: self._sum(ref, entry, deep))
        return manifest

    def _sum(self, ref: ArtifactRef, entry: FileEntry, deep: bool) -> str:
        if self.is_local:
            path = self._folder(ref) / entry.path
            return file_sha256(path) if deep else self.digests.sha256(path)
        return self._files.sha256(f"{_place(ref)}/{entry.path}")

    def commit(self, stage: str, fingerprint: str, folder: Path, fields: ManifestFields) -> ArtifactRef:
        """Turn a finished local folder into an artifact; `folder` is consumed.

        An artifact of the same fingerprint is replaced. Interrupted at any point, the store holds the whole
        artifact or none.

        Raises:
            StoreError: the folder is empty.
            ValueError: it holds a symbolic link.
        """
        ref = self.ref(stage, fingerprint)
        (folder / MANIFEST_NAME).unlink(missing_ok=True)  # of a commit that was killed
        entries = tuple(inventory(folder))
        if not entries:
            raise StoreError(f"stage {stage!r} wrote no files to {folder}: there is nothing to commit")
        manifest = Manifest(
            stage=stage,
            fingerprint=fingerprint,
            files=entries,
            versions=software_versions(),
            git_sha=git_sha(),
            created=utc_now(),
            **fields.model_dump(),
        )
        write_durably(folder / MANIFEST_NAME, manifest.model_dump_json(indent=2) + "\n")
        if not self.is_local:
            self._upload(ref, folder, manifest)
        self._adopt(ref, folder, manifest)
        return ref

    def _upload(self, ref: ArtifactRef, folder: Path, manifest: Manifest) -> None:
        place = _place(ref)
        self._files.remove(f"{place}/{MANIFEST_NAME}")
        send(self._files, folder, place, manifest.files)
        self._files.upload(folder / MANIFEST_NAME, f"{place}/{MANIFEST_NAME}")
        end_staging(self._files, place)

    def _adopt(self, ref: ArtifactRef, folder: Path, manifest: Manifest) -> None:
        """Move a complete folder to where `localise` looks, and remember its sums."""
        target = self._folder(ref)
        replace_folder(folder, target)
        self.digests.remember({target / entry.path: entry.sha256 for entry in manifest.files})

    def localise(self, ref: ArtifactRef) -> Path:
        """A local folder with the verified artifact: the store's own, or a download made once.

        An interrupted download continues with the next file.

        Raises:
            ArtifactMissingError: no such artifact.
            ArtifactDamagedError: a file differs from the manifest.
        """
        target = self._folder(ref)
        if self.is_local:
            self.verify(ref)
            return target
        manifest = self.manifest(ref)
        with exclusive(target.with_suffix(".lock"), _LOG, f"another process downloads {ref.uri}"):
            if not self._is_copy(target, manifest):
                partial = target.with_name(f"{target.name}.partial")
                with _naming(ref):
                    fetch(self._files, _place(ref), manifest.files, partial)
                write_durably(partial / MANIFEST_NAME, manifest.model_dump_json(indent=2) + "\n")
                self._adopt(ref, partial, manifest)
        return target

    def lease(self, ref: ArtifactRef, log: logging.Logger) -> AbstractContextManager[Lease | None]:
        """Be the only builder of an artifact among the machines that share a remote store."""
        waiting = f"another machine builds {ref.stage} {ref.short}"
        return leased(self._files, f"{_place(ref)}{SUFFIX}", str(self.work / _place(ref)), log, waiting)

    def _is_copy(self, folder: Path, manifest: Manifest) -> bool:
        paths = {folder / entry.path: entry for entry in manifest.files}
        return all(
            path.is_file() and path.stat().st_size == entry.size and self.digests.sha256(path) == entry.sha256
            for path, entry in paths.items()
        )

    def delete(self, ref: ArtifactRef) -> None:
        """Remove an artifact, at once as far as readers can tell."""
        if not self.is_local:
            self._files.remove(f"{_place(ref)}/{MANIFEST_NAME}")
            self._files.remove_below(_place(ref))
        discard_folder(self._folder(ref))

    def latest(self, stage: str, accept: Callable[[Manifest], bool] = lambda _: True) -> Manifest | None:
        """The newest manifest of a stage that `accept` takes, to explain what changed since."""
        return next(filter(accept, self.manifests(stage)), None)

    def manifests(self, stage: str) -> list[Manifest]:
        """All readable manifests of a stage, newest first."""
        names = [name for name in self._files.names(stage) if _FINGERPRINT.match(name)]
        found = []
        for text in self._files.read_all([f"{stage}/{name}/{MANIFEST_NAME}" for name in names]):
            try:
                found.append(Manifest.model_validate_json(text))
            except ValidationError:
                continue  # damaged, or of another version: no use for explaining a change
        return sorted(found, key=lambda manifest: manifest.created, reverse=True)

    def is_there(self) -> bool:
        """Whether the root exists (for S3: the bucket).

        Raises:
            StoreError: it cannot be asked.
        """
        try:
            return Path(self.root).is_dir() if self.is_local else self._files.bucket_exists()
        except Exception as error:
            raise StoreError(
                f"store={self.root!r} cannot be reached ({error}): check address and credentials"
            ) from error

    def refs(self, stage: str) -> list[ArtifactRef]:
        """Every artifact of a stage whose manifest is there, readable or not."""
        names = [name for name in self._files.names(stage) if _FINGERPRINT.match(name)]
        return [ref for name in sorted(names) if self.exists(ref := self.ref(stage, name))]

    def stages(self) -> list[str]:
        """Stages that have artifacts, or the beginnings of some."""
        return sorted(name for name in self._files.names("") if _STAGE.fullmatch(name))

    def entries(self, stage: str) -> list[tuple[str, int, float]]:
        """Everything below a stage: name, bytes, and when it was written last (seconds since 1970)."""
        found: dict[str, tuple[int, float]] = {}
        for path, size, changed in self._files.details(stage):
            name = path.split("/", 1)[0]
            before = found.get(name, (0, 0.0))
            found[name] = (before[0] + size, max(before[1], changed))
        return [(name, size, changed) for name, (size, changed) in sorted(found.items())]

    def remove_file(self, path: str) -> None:
        """Remove a single file of the store that belongs to no artifact."""
        self._files.remove(path)

    def _folder(self, ref: ArtifactRef) -> Path:
        return (Path(self.root) if self.is_local else self.work / "downloads") / _place(ref)


@contextlib.contextmanager
def _naming(ref: ArtifactRef) -> Iterator[None]:
    """Say of which artifact a damaged file is."""
    try:
        yield
    except DamagedFileError as error:
        raise _damaged(ref, error.path, error.fault) from None


def _place(ref: ArtifactRef) -> str:
    return f"{ref.stage}/{ref.fingerprint}"


def _damaged(ref: ArtifactRef, file: str, fault: str) -> ArtifactDamagedError:
    return ArtifactDamagedError(
        f"artifact damaged: file {file} of {ref.uri}: {fault}; the next run of the pipeline rebuilds it"
    )


if __name__ == "__main__":  # for people: `python -m tasks.store --help`
    from tasks.store_cli import run

    run()
