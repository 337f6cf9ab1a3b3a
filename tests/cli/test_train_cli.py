"""`sennit train`: what the command line makes of its arguments, and one real run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sennit.cli.arguments import RecipeArguments, read_recipe_arguments
from sennit.cli.train import local_ranks
from sennit.errors import ConfigError
from tests.cli.program import SMALL, sennit


@pytest.mark.parametrize(
    ("args", "recipe", "overrides"),
    [
        ([], None, {}),
        (["tiny", "--lr.peak", "3e-4"], "tiny", {"lr.peak": "3e-4"}),
        (["--lr.peak=3e-4", "my.toml"], "my.toml", {"lr.peak": "3e-4"}),
        (["--model.sliding_window", "-1"], None, {"model.sliding_window": "-1"}),
        (["--log.tensorboard", "--lr.peak", "1"], None, {"log.tensorboard": "true", "lr.peak": "1"}),
        (["--log.tensorboard", "false"], None, {"log.tensorboard": "false"}),
        (["--log.sample_prompt", "-- x = "], None, {"log.sample_prompt": "-- x = "}),
        (["--run.name=", "--run.dir=a=b"], None, {"run.name": "", "run.dir": "a=b"}),
        (["--run.seed", "1", "--run.seed", "2"], None, {"run.seed": "2"}),
        (["--train.micro-batch-size", "2"], None, {"train.micro_batch_size": "2"}),
    ],
)
def test_arguments(args: list[str], recipe: str | None, overrides: dict[str, str]) -> None:
    assert read_recipe_arguments(args) == RecipeArguments(recipe, overrides)


def test_own_option_misspelt() -> None:
    with pytest.raises(ConfigError, match="nearest is --nproc"):
        read_recipe_arguments(["--nprocs", "2"], ("nproc", "json"))


@pytest.mark.parametrize(("argv", "count"), [(["--nproc", "4"], 4), (["--nproc=3"], 3), (["--nproc", "x"], 1), ([], 1)])
def test_local_ranks_before_anything_is_parsed(argv: list[str], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert local_ranks(["train", *argv]) == count


def test_one_process_starts_with_the_settings_in_force(tmp_path: Path) -> None:
    done = sennit("train", "--json", f"--run.dir={tmp_path}", *SMALL, probe="ok", MALLOC_MMAP_MAX_="7")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["malloc"] == "7", "a value that the user has set wins"


@pytest.mark.heavy
@pytest.mark.parametrize("nproc", [1, 2])
def test_run_gives_one_json_document_and_a_run_directory(nproc: int, tmp_path: Path) -> None:
    done = sennit("train", "--json", f"--nproc={nproc}", f"--run.dir={tmp_path}/x", *SMALL)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["steps"] == 3 and summary["loss_last"] > 0 and summary["tokens_per_second"] > 0
    assert {"run_dir", "loss_first", "bits_per_byte", "mfu", "peak_memory_bytes"} <= summary.keys()
    names = {path.name for path in Path(summary["run_dir"]).iterdir()}
    assert {"recipe.toml", "environment.json", "metrics.jsonl", "summary.json", "checkpoints", "report.html"} <= names
    logs = sorted(path.name for path in (tmp_path / "x" / "logs").iterdir())
    assert logs == [f"rank-{rank}.log" for rank in range(nproc)]
    text = (tmp_path / "x" / "recipe.toml").read_text()
    assert 'dtype = "auto"' not in text and f"dp_shard = {nproc}" in text
