"""A recipe on its ranks: one process, local ranks that we start, or a rank that an engine started."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from sennit.launch.logs import log_folder
from sennit.launch.rank import run_alone, run_engine_rank, run_logged

if TYPE_CHECKING:
    from sennit.device import Device
    from sennit.launch import Ranks
    from sennit.recipe import Recipe


def train_alone(recipe: Recipe, *, json_output: bool) -> None:
    """Train as one process. Raises the run's SennitError, or RankError for any other error."""
    run_alone(partial(_train, recipe, json_output), recipe.run_dir)


def train_as_rank(recipe: Recipe, ranks: Ranks, *, json_output: bool) -> None:
    """Train as a rank that an engine started. Raises RankError for whatever ends it."""
    run_engine_rank(partial(_train, recipe, json_output), recipe.run_dir, ranks)


def train_on_local_ranks(recipe: Recipe, nproc: int, device: Device, *, json_output: bool) -> None:
    """Train with `nproc` ranks that are started here; `recipe` is resolved for them. Raises as `launch`."""
    from sennit.launch.local import launch

    with log_folder(recipe.run_dir):
        launch(train_local_rank, recipe.to_toml(), json_output, nproc=nproc, device=device)


def train_local_rank(recipe_toml: str, json_output: bool) -> None:
    """Train as one of the local ranks; rank 0 is the one that shows its progress."""
    from sennit.recipe import parse_recipe

    recipe, rank = parse_recipe(recipe_toml), int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    function = partial(_train, recipe, json_output)
    run_logged(function, recipe.run_dir, rank=rank, world_size=world_size, visible=rank == 0)


def _train(recipe: Recipe, json_output: bool) -> None:
    train_function()(recipe, json_output=json_output)


def train_function() -> Callable[..., object]:
    """Return what a rank runs."""
    from sennit.train.main import run

    return run


__all__ = ["train_alone", "train_as_rank", "train_function", "train_local_rank", "train_on_local_ranks"]
