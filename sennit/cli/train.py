"""`sennit train`: from the command line to the ranks of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from sennit.errors import ConfigError, SennitError

OPTIONS = ("nproc", "json", "help")

HELP = """Train a recipe: a preset by name, or a TOML file. Without either, the preset `tiny`.

Any field of the recipe is set with --section.field VALUE; a yes-no field alone means yes.

Under torchrun, SLURM or MPI, start this command once a rank, without --nproc.
"""


class TrainCommand(TyperCommand):
    """A command whose help also lists all recipe fields."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the usual help, then the presets and the fields by section."""
        from sennit.cli.recipe_help import print_recipe_help

        super().format_help(ctx, formatter)
        print_recipe_help()


def train(
    context: typer.Context,
    nproc: Annotated[
        int | None, typer.Option("--nproc", metavar="N", help="Start N ranks on this machine; without it, one.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the run's summary as one JSON document.")] = False,
) -> None:
    """Train a recipe, on this machine or as a rank of a job that an engine started (HELP has the details)."""
    from sennit.cli.arguments import read_recipe_arguments
    from sennit.launch import find_ranks
    from sennit.launch.rank import check_port
    from sennit.recipe import check_run, load_recipe

    arguments = read_recipe_arguments(context.args, OPTIONS)
    ranks = find_ranks()
    world_size = _world_size(nproc, None if ranks is None else ranks.world_size)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    checked = check_run(recipe, world_size, fast_dtypes=())  # before torch is imported: a mistake shows at once
    if ranks is not None:
        check_port(ranks)

    from sennit.device import get_device

    device = get_device()
    checked = checked.replace(precision__dtype=device.resolve_dtype(str(recipe.precision.dtype)))
    if world_size > 1 and (why := device.backend_missing()) is not None:
        raise ConfigError(f"{world_size} ranks on {device.name} need the backend {device.comm_backend}, but {why}.")
    from sennit.cli.training import train_alone, train_as_rank, train_on_local_ranks

    if ranks is not None:
        train_as_rank(checked, ranks, json_output=json_output)
    elif world_size > 1:
        train_on_local_ranks(checked, world_size, device, json_output=json_output)
    else:
        train_alone(checked, json_output=json_output)


def _world_size(nproc: int | None, found: int | None) -> int:
    """Return the number of ranks of the job. Raises ConfigError if --nproc makes no sense."""
    if nproc is not None and nproc < 1:
        raise ConfigError(f"--nproc {nproc}: a job has at least one rank; give a number from 1 up.")
    if found is None:
        return nproc or 1
    if nproc is not None:
        raise ConfigError(
            f"--nproc {nproc} starts ranks, but this process already is one of {found} that an engine started: leave "
            f"--nproc out, or unset the engine's variables (RANK and WORLD_SIZE, SLURM_PROCID, ...)."
        )
    return found


def local_ranks(argv: Sequence[str]) -> int:
    """Return how many ranks will share this machine, read from unparsed arguments; 1 if they make no sense."""
    from sennit.launch import find_ranks

    text = ""
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word == "--nproc":
            text = following
        elif word.startswith("--nproc="):
            text = word.partition("=")[2]
    if text.isdecimal():
        return max(int(text), 1)
    try:
        ranks = find_ranks()
    except SennitError:
        return 1  # the command itself reports it
    return 1 if ranks is None else ranks.local_world_size


SETTINGS = {
    "cls": TrainCommand,
    "help": HELP,
    "options_metavar": "[PRESET | RECIPE.toml] [--nproc N] [--json] [--SECTION.FIELD VALUE]...",
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}

__all__ = ["HELP", "OPTIONS", "SETTINGS", "TrainCommand", "local_ranks", "train"]
