"""manifest.json: what a checkpoint consists of, so that a damaged one is noticed before anything is loaded.

torch.distributed.checkpoint reads a flipped bit in a data file without an error, so every file is listed with its
size and its xxh3-128 hash. The manifest guards itself: it holds the hash of its own content and must be written in
one exact form, so any changed byte is refused.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from sennit.errors import CheckpointError

FILE_NAME = "manifest.json"
FORMAT = "sennit-checkpoint"
VERSION = 1
READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint: `name` in its folder, `size` in bytes, `xxh3_128` as hexadecimal digits."""

    name: str
    size: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a checkpoint. `sequence` counts the saves of a run: the highest one is the newest."""

    step: int
    sequence: int
    files: tuple[FileRecord, ...]
    meta: dict[str, Any]

    @property
    def total_bytes(self) -> int:
        """Bytes of all listed files."""
        return sum(record.size for record in self.files)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of manifest.json. Raises CheckpointError if the meta data is not JSON."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "sequence": manifest.sequence,
        "meta": manifest.meta,
        "files": [asdict(record) for record in manifest.files],
    }
    try:
        return _canonical(body)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"The meta data of the checkpoint of step {manifest.step} is not JSON ({error}). Pass only str, int, "
            f"finite float, bool, None, list and dict as meta."
        ) from error


def _canonical(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, sort_keys=True, allow_nan=False)
    checksum = xxhash.xxh3_128_hexdigest(text.encode())
    return (json.dumps({**body, "checksum": checksum}, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint folder. Raises CheckpointError that names the file and what is wrong."""
    path = folder / FILE_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        what = "is missing, so this is not a complete checkpoint" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"{path} {what}. Give the path of a folder checkpoints/step-N.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        body = json.loads(data)
        checked = dict(body)
        del checked["checksum"]
        intact = body["format"] == FORMAT and _canonical(checked) == data
    except (ValueError, TypeError, KeyError):
        intact = False
        body = None
    if not intact or body is None:
        raise CheckpointError(f"{path} is damaged: its content does not match its own hash.")
    if body["version"] > VERSION:
        raise CheckpointError(
            f"{path} has format version {body['version']}; this Sennit reads versions up to {VERSION}. Upgrade Sennit."
        )
    files = tuple(FileRecord(**record) for record in body["files"])
    return Manifest(body["step"], body["sequence"], files, body["meta"])


def check_sizes(folder: Path, files: tuple[FileRecord, ...]) -> str | None:
    """Return what is wrong with the presence or size of one of `files`, or None. Reads no content."""
    for record in files:
        path = folder / record.name
        try:
            size = path.stat().st_size
        except OSError as error:
            return f"{path} is missing" if isinstance(error, FileNotFoundError) else f"{path}: {error.strerror}"
        if size != record.size:
            return f"{path} has {size} bytes instead of {record.size}"
    return None


def check_hash(folder: Path, record: FileRecord) -> str | None:
    """Return what is wrong with the content of one file, or None."""
    path = folder / record.name
    try:
        digest = hash_file(path)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None if digest == record.xxh3_128 else f"{path} has the right size but its content has changed"


def hash_file(path: Path) -> str:
    """Return the xxh3-128 of a file as hexadecimal digits."""
    state = xxhash.xxh3_128()
    buffer = bytearray(READ_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            state.update(view[:count])
    return state.hexdigest()


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = [
    "FILE_NAME",
    "FileRecord",
    "Manifest",
    "check_hash",
    "check_sizes",
    "encode_manifest",
    "hash_file",
    "read_manifest",
    "sync_folder",
    "write_durably",
]
