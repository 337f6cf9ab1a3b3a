"""torch.distributed.checkpoint's file storage, with three additions.

Files are hashed as they are written (not read back: what is hashed is what was meant), they are on the disk when
their stream closes, and the first OSError is kept, because torch.save hides a full disk behind an unrelated
RuntimeError. One writing thread only: errors of DCP's further threads are lost.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata

from sennit.checkpoint.manifest import FileRecord, hash_file
from sennit.errors import CheckpointError

METADATA_FILE = ".metadata"

_DCP = "torch.distributed.checkpoint"
_SAFE_CLASSES = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((f"{_DCP}.metadata", name) for name in ("TensorStorageMetadata", "BytesStorageMetadata")),
    *((f"{_DCP}.metadata", name) for name in ("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING")),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
}


class _HashedFile(io.FileIO):
    """A file for writing that hashes what it is given. `sequential` turns false if someone seeks back."""

    def __init__(self, path: Path, fs: HashingFileSystem) -> None:
        self._fs = fs
        self.state = xxhash.xxh3_128()
        self.length = 0
        self.sequential = True
        super().__init__(path, "wb")

    def write(self, data: Any, /) -> int:
        try:
            if self.tell() != self.length:
                self.sequential = False
            count = super().write(data)
        except OSError as error:
            self._fs.error = self._fs.error or error
            raise
        self.state.update(memoryview(data)[:count])
        self.length += count
        self._fs.written_bytes += count
        return count


class HashingFileSystem(FileSystem):
    """The file operations of one rank's save. `records` by file name, `error` the first failure of the system."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}
        self.written_bytes = 0
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        """Yield a stream for writing. On leaving the context the file is on the disk and in `records`."""
        assert mode == "wb", mode
        path = Path(path)
        try:
            raw = _HashedFile(path, self)
            with io.BufferedWriter(raw, buffer_size=1 << 20) as stream:
                yield _KeptOpen(stream)
                stream.flush()
                os.fsync(raw.fileno())
            digest = raw.state.hexdigest() if raw.sequential else hash_file(path)
            self.records[path.name] = FileRecord(path.name, path.stat().st_size, digest)
        except OSError as error:
            self.error = self.error or error
            raise

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        """Rename a file that has been written."""
        super().rename(path, new_path)
        record = self.records.pop(Path(path).name)
        name = Path(new_path).name
        self.records[name] = FileRecord(name, record.size, record.xxh3_128)


class _KeptOpen(io.BufferedIOBase):
    """Passes on to a stream but leaves closing to its owner, which has to sync the file before."""

    def __init__(self, stream: io.BufferedWriter[Any]) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        return self._stream.write(data)

    def tell(self) -> int:
        return self._stream.tell()

    def flush(self) -> None:
        if not self._stream.closed:
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()


class StateWriter(dcp.FileSystemWriter):
    """Writes this rank's part of a state into `folder`; `fs` holds the records of its files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=False, thread_count=1, overwrite=False)
        self.fs: HashingFileSystem = HashingFileSystem()


class StateReader(dcp.FileSystemReader):
    """Reads a checkpoint; its metadata may hold nothing but the classes that a state of tensors needs."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's metadata: name, shape, dtype and place of every tensor."""
        path = Path(self.path) / METADATA_FILE
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except (OSError, pickle.UnpicklingError, EOFError, ImportError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Refuses everything but plain data and DCP's own records: a checkpoint must not be able to run code."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in _SAFE_CLASSES:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        raise pickle.UnpicklingError(f"it refers to {module_name}.{global_name}, which no checkpoint needs")


def write_state(state: dict[str, Tensor], folder: Path, group: Any, writer: StateWriter) -> None:
    """Write a flat state as DCP files into `folder`. Collective over `group`; alone if it is None.

    Raises OSError for a failure of this rank's system, else CheckpointError; if one rank raises, all do.
    """
    try:
        with _quiet():
            dcp.save(state, storage_writer=writer, process_group=group, no_dist=group is None)
    except (Exception, CheckpointException) as error:
        if writer.fs.error is not None:
            raise writer.fs.error from error
        raise CheckpointError(describe_error(error)) from error


def read_state(state: dict[str, Tensor], folder: Path, group: Any) -> None:
    """Read tensors of a flat state in place from the DCP files in `folder`. Collective over `group`."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _quiet():
            dcp.load(
                state,
                storage_reader=StateReader(folder),
                planner=planner,
                process_group=group,
                no_dist=group is None,
            )
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{folder} could not be read: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Return one line about an error, looking into those that DCP has collected from the ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {describe_error(inner)}"
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, CheckpointError) else f"{type(error).__name__}: {first}"


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """DCP warns about every save of a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


__all__ = ["HashingFileSystem", "StateReader", "StateWriter", "describe_error", "read_state", "write_state"]
