"""`sennit generate`: text from a trained model."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sennit.errors import ConfigError


class GenerateDtype(StrEnum):
    """Number formats of the computation."""

    AUTO = "auto"
    BF16 = "bf16"
    FP32 = "fp32"


def generate(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT_OR_HF_DIR",
            help="A run directory (its newest checkpoint), checkpoints/step-N, or a Hugging Face model folder.",
        ),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="Text to continue; may be given several times [default: stdin]."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Longest continuation, tokens.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="0 always takes the most probable token.")] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", help="Draw from this many most probable tokens; 0 = all.")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw from the most probable tokens that reach this probability together.")
    ] = 0.95,
    seed: Annotated[int, typer.Option("--seed", help="Equal seeds give equal text.")] = 0,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Ranks on this machine that share the model.")] = 1,
    dtype: Annotated[
        GenerateDtype, typer.Option("--dtype", help="Number format; auto is bf16 where the device is fast at it.")
    ] = GenerateDtype.AUTO,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Continue texts with a trained model, written token by token.

    A prompt may be empty: the model then begins a text of its own.
    """
    from sennit.generate.job import GenerateSettings

    prompts = tuple(prompt) if prompt else (_from_stdin(),)
    settings = GenerateSettings(
        source=source.expanduser(),
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        dtype=str(dtype),
        json_output=json_output,
    )
    _start(settings, nproc)


def _from_stdin() -> str:
    if sys.stdin.isatty():
        print("prompt (end with Ctrl-D):", file=sys.stderr)
    return sys.stdin.read().removesuffix("\n")


def _start(settings: Any, nproc: int) -> None:
    """Generate in this process, as a rank of a job that an engine started, or on `nproc` local ranks."""
    from sennit.launch import find_ranks

    ranks = find_ranks()
    if ranks is not None and nproc > 1:
        raise ConfigError(
            f"--nproc {nproc} starts ranks, but this process already is one of {ranks.world_size} that {ranks.engine} "
            f"started: leave --nproc out."
        )
    from sennit.device import get_device

    device = get_device()
    world_size = nproc if ranks is None else ranks.world_size
    if world_size > 1 and (why := device.backend_missing()) is not None:
        raise ConfigError(f"{world_size} ranks on {device.name} need the backend {device.comm_backend}, but {why}.")
    if ranks is None and nproc > 1:
        from sennit.generate.launch import launch_generate

        launch_generate(settings, nproc, device=device)
        return
    from sennit.generate.job import run_generate

    if ranks is not None:
        os.environ.update(ranks.environment())
    run_generate(settings)


__all__ = ["GenerateDtype", "generate"]
