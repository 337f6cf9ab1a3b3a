"""`sennit generate`: from runs, checkpoints and Hugging Face folders, on one rank and on several."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sennit.cli.main import run
from tests.models.runs import make_run

SETTINGS = ["--max-new-tokens", "12", "--seed", "3", "--dtype", "fp32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    make_run(folder / "run")
    assert run(["export", str(folder / "run"), "--out", str(folder / "hf"), "--dtype", "fp32"]) == 0
    return folder


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert run(["generate", *arguments, *SETTINGS, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_every_source_writes_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["--prompt", "caf\u00e9", "--prompt", "", "--prompt", "def f("]
    sources = [folder / "run", folder / "run" / "checkpoints" / "step-0", folder / "hf"]
    documents = [as_json(capsys, str(source), *prompts) for source in sources]
    results = [document["results"] for document in documents]
    assert results[0] == results[1] == results[2]
    assert [result["prompt"] for result in results[0]] == ["caf\u00e9", "", "def f("]
    assert max(result["tokens"] for result in results[0]) == 12

    assert run(["generate", str(folder / "run"), *prompts, *SETTINGS]) == 0
    texts = [result["prompt"] + result["text"] for result in results[0]]
    assert capsys.readouterr().out == "\n\n".join(texts) + "\n"


def test_a_prompt_comes_from_stdin(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert as_json(capsys, str(folder / "hf"))["results"][0]["prompt"] == "two\nlines"


def test_several_ranks_write_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = as_json(capsys, str(folder / "run"), "--prompt", "ab")["results"]
    command = [sys.executable, "-m", "sennit", "generate", str(folder / "run"), "--prompt", "ab", *SETTINGS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--nproc", "2", "--json"], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"] == expected
    failed = subprocess.run([*command, "--nproc", "3"], capture_output=True, text=True, env=environment, timeout=120)
    assert failed.returncode == 2 and "num_heads=4 is not a multiple" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["absent", "--prompt", "x"], "no folder"),
        (["{run}", "--prompt", "x", "--top-p", "0"], "top_p=0"),
        (["{run}", "--prompt", "x", "--nproc", "0"], "--nproc"),
    ],
)
def test_mistakes_are_one_paragraph(
    arguments: list[str], named: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", *(word.format(run=folder / "run") for word in arguments)]) == 2
    captured = capsys.readouterr()
    assert named in captured.err and captured.err.count("\n") == 1
