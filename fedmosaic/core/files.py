"""Files that are whole or absent: temporary name, fsync, rename, fsync of the folder; tensors carry their digest.

Tensors are stored as safetensors, tables as Parquet, everything else as JSON or TOML. Nothing is pickled.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save, save_file

from fedmosaic.core.errors import RunError

Tensors = Mapping[str, npt.NDArray[Any]]
LARGEST_HEADER = 1 << 18  # bytes, of what comes over a network; JSON takes some twenty times as much memory
UNREADABLE = (SafetensorError, ValueError, AttributeError, TypeError, KeyError, RecursionError, OverflowError)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A new file to be written, which takes the place of the old one at once when it is whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    except OSError as error:
        raise _unwritten(path, error) from None
    scratch = Path(name)
    try:
        yield scratch
        os.fsync(handle)
        scratch.replace(path)
        _sync_folder(path.parent)
    except BaseException as error:
        scratch.unlink(missing_ok=True)
        if isinstance(error, OSError | SafetensorError):
            raise _unwritten(path, error) from None
        raise
    finally:
        os.close(handle)


def _unwritten(path: Path, error: Exception) -> RunError:
    """A full disk, a folder that is somebody else's ...: what was there before is still there."""
    return RunError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}")


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """One more line of a JSON-lines file."""
    try:
        with path.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
    except OSError as error:
        raise _unwritten(path, error) from None


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace a file at once: a reader, or a crash, sees the old content or the new."""
    with _replacing(path) as scratch:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON; a reader sees the old file or the new."""
    write_atomic(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """JSON of a file that must exist and be whole."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except ValueError as error:  # no JSON, or no text at all
        raise RunError(f"{path} is damaged: {error}") from None


def read_lines(path: Path) -> list[Any]:
    """The whole lines of a JSON-lines file, none if it is absent; a line that a crash cut short is not one."""
    try:
        whole = path.read_text().rpartition("\n")[0] if path.is_file() else ""
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from None


def save_tensors(path: Path, tensors: Tensors, meta: Mapping[str, Any] | None = None) -> None:
    """Write tensors with JSON metadata and a digest over both."""
    whole, header = _described(tensors, meta)
    with _replacing(path) as scratch:
        save_file(whole, scratch, header)  # straight from where the tensors lie: they may fill half of the memory


def pack(tensors: Tensors, meta: Mapping[str, Any] | None = None) -> bytes:
    """The same as bytes."""
    return bytes(save(*_described(tensors, meta)))


def _described(tensors: Tensors, meta: Mapping[str, Any] | None) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    whole = {name: np.ascontiguousarray(t) for name, t in tensors.items()}
    described = json.dumps(dict(meta or {}), sort_keys=True)
    # One key only: the order of several is not fixed by the format, and equal content must be equal bytes.
    return whole, {"fedmosaic": json.dumps({"meta": described, "sha256": digest_of(whole, described)})}


def load_tensors(path: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Read tensors back; truncated, altered or foreign files are refused."""
    try:
        with safe_open(path, framework="numpy") as stream:
            header = json.loads((stream.metadata() or {}).get("fedmosaic", "{}"))
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118  (not a dict)
        return _checked(tensors, header, str(path))
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except (SafetensorError, OSError, ValueError, AttributeError, TypeError) as error:
        raise RunError(f"{path} is damaged: {error}") from None


def unpack(content: bytes, what: str) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Read `pack` back; truncated, altered or foreign bytes are refused."""
    try:
        header = _declared(content)
        return _checked(load(content), header, what)
    except UNREADABLE as error:
        raise RunError(f"{what} is damaged: {error}") from None


def header_of(content: bytes) -> dict[str, Any]:
    """What `pack` was told beside the tensors, unchecked."""
    try:
        meta = json.loads(_declared(content).get("meta", ""))
        return dict(meta)
    except UNREADABLE as error:
        raise RunError(f"a message is damaged: {error}") from None


def _declared(content: bytes) -> Any:
    """The part of a header that is ours; one that is far longer than any of ours is not parsed."""
    size = int.from_bytes(content[:8], "little")
    if size > LARGEST_HEADER:
        raise ValueError(f"its header has {size} bytes; {LARGEST_HEADER} at most")
    metadata = json.loads(content[8 : 8 + size]).get("__metadata__") or {}
    return json.loads(metadata.get("fedmosaic", "{}"))


def _checked(tensors: dict[str, npt.NDArray[Any]], header: Any, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    described = header.get("meta", "")
    if header.get("sha256") != digest_of(tensors, described):
        raise RunError(f"{what} is damaged or foreign: its content does not have the digest it declares")
    meta = json.loads(described)
    if not isinstance(meta, dict):
        raise ValueError("its header is not an object")
    return tensors, meta


def digest_of(tensors: Tensors, described: str = "") -> str:
    """SHA-256 of tensors, their names, types and shapes, and a text."""
    h = hashlib.sha256(described.encode())
    for name in sorted(tensors):
        value = tensors[name]
        h.update(f"{name}|{value.dtype.str}|{value.shape}|".encode())
        h.update(np.ascontiguousarray(value).data)
    return h.hexdigest()


@contextmanager
def locked(place: Path, who: str, patience: float = 0.0) -> Iterator[None]:
    """One process at a time in a folder."""
    with (place / ".lock").open("w") as stream:
        until = time.monotonic() + patience
        while not _take(stream):
            if time.monotonic() >= until:
                raise RunError(f"another {who} is at work in {place}; wait for it, or choose another folder")
            time.sleep(0.2)
        yield


def is_locked(place: Path) -> bool:
    """Whether somebody is at work in a folder."""
    with (place / ".lock").open("a") as stream:
        return not _take(stream)


def _take(stream: TextIO) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
