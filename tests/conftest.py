"""Settings of every test: one thread, so that ranks can be forked, and one cache directory for the whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Before the first operator: a process that has used several OpenMP threads cannot be forked (see tests/ranks.py).
torch.set_num_threads(1)

# Programs that tests start share the cores with other tests: several threads each would wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `apart` in a forked process: torch remembers device meshes for the life of a process, and a fake
    one must not be mistaken for one of real ranks that has the same numbers."""
    if pyfuncitem.get_closest_marker("apart") is None:
        return None
    import torch.distributed as dist

    from tests.ranks import run_ranks

    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    def body() -> None:
        dist.destroy_process_group()
        pyfuncitem.obj(**arguments)

    run_ranks(body, 1)
    return True


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache directory of this session (SENNIT_CACHE), shared by its tests so that a corpus is built once."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("SENNIT_CACHE")
    os.environ["SENNIT_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["SENNIT_CACHE"]
    else:
        os.environ["SENNIT_CACHE"] = before
