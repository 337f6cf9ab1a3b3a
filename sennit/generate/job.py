"""`sennit generate` on one rank: join the job, load the model, write text."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sennit.device import Device, get_device
from sennit.generate.generate import generate
from sennit.generate.load import LoadedModel, load_model
from sennit.generate.text import TextStream, decode_after
from sennit.mesh import Mesh, build_mesh

COLLECTIVE_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateSettings:
    """What to generate: see `generate` for the sampling fields. `dtype`: auto, bf16, fp32 or fp64."""

    source: Path
    prompts: tuple[str, ...]
    max_new_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    seed: int = 0
    dtype: str = "auto"
    json_output: bool = False


def run_generate(settings: GenerateSettings) -> dict[str, Any]:
    """Generate on this rank of the job described by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; one process without.

    All ranks together form one tensor-parallel model. Rank 0 writes the text to stdout as it appears, or one JSON
    document. Returns that document. Raises what `load_model` and `generate` raise.
    """
    with _job() as (device, mesh):
        loaded = load_model(
            settings.source,
            mesh=mesh,
            device=torch.device(device.torch_type),
            dtype=device.resolve_dtype(settings.dtype),
        )
        return _generate(loaded, settings, is_main=mesh.world.rank == 0)


@contextmanager
def _job() -> Iterator[tuple[Device, Mesh]]:
    device = get_device()
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device.prepare_rank(local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    if world_size > 1:
        dist.init_process_group(device.comm_backend, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    try:
        yield device, build_mesh(device_type=device.torch_type, tp=world_size)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _generate(loaded: LoadedModel, settings: GenerateSettings, *, is_main: bool) -> dict[str, Any]:
    prompts = [loaded.encode(prompt) for prompt in settings.prompts]
    streaming = is_main and not settings.json_output
    printer = _Printer(loaded, settings.prompts, prompts, sys.stdout.write) if streaming else None
    begin = time.perf_counter()
    new = generate(
        loaded.model,
        prompts,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=settings.seed,
        eos_id=loaded.eos_ids,
        on_token=None if printer is None else printer.put,
    )
    seconds = time.perf_counter() - begin
    if printer is not None:
        printer.finish()
    texts = [decode_after(loaded.tokenizer, ids, tokens) for ids, tokens in zip(prompts, new, strict=True)]
    document = {
        "source": str(loaded.source),
        "results": [
            {"prompt": prompt, "text": text, "tokens": len(tokens)}
            for prompt, text, tokens in zip(settings.prompts, texts, new, strict=True)
        ],
        "seed": settings.seed,
        "seconds": seconds,
        "tokens_per_second": sum(map(len, new)) / seconds if seconds > 0 else None,
    }
    if is_main and settings.json_output:
        json.dump(document, sys.stdout, indent=1)
        sys.stdout.write("\n")
        sys.stdout.flush()
    return document


class _Printer:
    """Writes texts to a terminal as they grow. The first prompt's appears at once; the others' are kept and follow."""

    def __init__(
        self, loaded: LoadedModel, prompts: tuple[str, ...], ids: list[list[int]], write: Callable[[str], object]
    ) -> None:
        self._write = write
        self._streams = [TextStream(loaded.tokenizer, row) for row in ids]
        self._later = list(prompts)
        self._show(prompts[0])

    def _show(self, text: str) -> None:
        if text:
            self._write(text)
            sys.stdout.flush()

    def put(self, row: int, token: int) -> None:
        text = self._streams[row].put(token)
        if row == 0:
            self._show(text)
        else:
            self._later[row] += text

    def finish(self) -> None:
        self._show(self._streams[0].flush() + "\n")
        for row in range(1, len(self._streams)):
            self._show(f"\n{self._later[row]}{self._streams[row].flush()}\n")


__all__ = ["GenerateSettings", "run_generate"]
