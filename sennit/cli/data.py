"""`sennit data`: from text to token files."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sennit.cli.output import print_json
from sennit.errors import ConfigError

if TYPE_CHECKING:
    from sennit.data.build import Report
    from sennit.data.tokenizer import Tokenizer


def data(
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT...", help="Text, JSONL or parquet files, or folders of them.")
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="PREFIX", help="Write PREFIX.bin, PREFIX.idx and PREFIX.tokenizer/.")
    ],
    tokenizer: Annotated[
        str,
        typer.Option("--tokenizer", help="A tokenizer.json or its folder, bytes, or bpe:N (trained on the inputs)."),
    ] = "bytes",
    json_key: Annotated[
        str, typer.Option("--json-key", metavar="NAME", help="Field of JSONL records, column of parquet files.")
    ] = "text",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Tokenize text into PREFIX.bin and PREFIX.idx, the format of Megatron-LM, and inspect the result.

    A text file is one document; a line of JSONL and a row of parquet are one each. Every document ends with the
    tokenizer's end of text. An interrupted build goes on where it was when the same command runs again.
    """
    summary = build(inputs, out, tokenizer, json_key)
    if json_output:
        print_json(summary)
        return
    print(
        f"{summary['prefix']}.bin: {summary['documents']:,} documents, {summary['tokens']:,} tokens, "
        f"{summary['bytes']:,} bytes of text ({summary['bytes'] / summary['tokens']:.2f} a token), "
        f"{summary['seconds']:.1f} s"
    )
    print(f"tokenizer: {summary['tokenizer']}  ({summary['vocab_size']:,} tokens)")
    print(f"train on it: sennit train --data.source {summary['prefix']} --data.tokenizer {summary['tokenizer']}")


def build(inputs: list[str], out: Path, spec: str, key: str) -> dict[str, Any]:
    """Build the token file `out` from `inputs` and return the facts about it; progress goes to stderr.

    Raises ConfigError for an impossible tokenizer size, DataError for whatever cannot be read or written.
    """
    from sennit.data import IndexedDataset
    from sennit.data.build import build_dataset

    started = time.perf_counter()
    folder = Path(f"{out}.tokenizer")
    tokenizer = _tokenizer(spec, inputs, key)
    with _shown() as report:
        progress = build_dataset(inputs, out, tokenizer, key=key, report=report)
    tokenizer.save(folder)
    dataset = IndexedDataset(out)  # reads the index back and checks it
    return {
        "prefix": str(out),
        "documents": len(dataset),
        "tokens": dataset.num_tokens,
        "bytes": progress.text_bytes,
        "seconds": time.perf_counter() - started,
        "tokenizer": str(folder),
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "dtype": str(dataset.dtype),
        "fingerprint": dataset.fingerprint,
    }


def _tokenizer(spec: str, inputs: list[str], key: str) -> Tokenizer:
    """Return the tokenizer of a build; bpe:N comes out the same when an interrupted build goes on."""
    from sennit.data.sources import training_texts
    from sennit.data.tokenizer import load_tokenizer, train_bpe

    if not spec.startswith("bpe:"):
        return load_tokenizer(spec)
    size = spec.removeprefix("bpe:")
    if not size.isdecimal() or int(size) < 260:
        raise ConfigError(
            f"--tokenizer {spec}: bpe:N trains N tokens. Give at least 260 (256 bytes and a few special tokens)."
        )
    return train_bpe(training_texts(inputs, key), int(size))


@contextmanager
def _shown() -> Iterator[Report]:
    """Give a report that draws a progress bar on stderr, or nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
    )
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokenizing", total=None, tokens="0")

        def report(progress: Any, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, tokens=f"{progress.tokens:,}")

        yield report


__all__ = ["build", "data"]
