"""The program `sennit`. Only the command that is called is imported, so that help comes at once."""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import typer

import sennit
from sennit.cli.output import print_error
from sennit.errors import ConfigError, SennitError


@dataclass(frozen=True, slots=True)
class Command:
    """A command: the module and the function that does it, and its line of help."""

    module: str
    function: str
    help: str


COMMANDS = {
    "train": Command("sennit.cli.train", "train", "Train a recipe, on this machine or as a rank of a larger job."),
    "schedule": Command("sennit.cli.schedule", "schedule", "Prove, time and draw a pipeline schedule."),
    "generate": Command("sennit.cli.generate", "generate", "Continue text with a trained model."),
    "export": Command("sennit.cli.export", "export", "Write a checkpoint as a Hugging Face model."),
    "import": Command("sennit.cli.import_", "import_", "Write a recipe that trains a Hugging Face model."),
    "data": Command("sennit.cli.data", "data", "Build and inspect tokenized data."),
    "doctor": Command("sennit.cli.doctor", "doctor", "Say what this machine can do, what is missing and why."),
    "report": Command("sennit.cli.report", "report", "Draw a run: one page and one picture."),
}
"""All commands, in the order of the help."""

USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def build_app(chosen: str | None) -> typer.Typer:
    """Return the program with `chosen` ready to run and the other commands as names only."""
    app = typer.Typer(
        name="sennit",
        help="Train transformers in parallel, exactly: the same recipe on a laptop and on a cluster.",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_top)
    for name, command in COMMANDS.items():
        function, settings = load_command(command) if name == chosen else _stub(command)
        if isinstance(function, typer.Typer):
            app.add_typer(function, name=name)
        else:
            app.command(name, **settings)(function)
    return app


def load_command(command: Command) -> tuple[Callable[..., Any] | typer.Typer, dict[str, Any]]:
    """Return a command's function and its settings for typer (SETTINGS of its module). Raises ConfigError if absent."""
    try:
        module = importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        if error.name != command.module:
            raise
        raise ConfigError(f"This installation has no {command.module}; install sennit again.") from None
    return getattr(module, command.function), getattr(module, "SETTINGS", {})


def _stub(command: Command) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return what stands for a command that was not called: its line in the help."""

    def not_called() -> None:
        """Do nothing."""

    return not_called, {"help": command.help}


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sennit {sennit.__version__}")
        raise typer.Exit


def _top(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", is_eager=True, callback=_print_version, help="Print the version."),
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def choose(argv: Sequence[str]) -> str | None:
    """Return the command that `argv` calls, or None. Raises ConfigError, with the nearest name, if there is none."""
    name = next((word for word in argv if not word.startswith("-")), None)
    if name is None or name in COMMANDS:
        return name
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(f"There is no command {name!r}.{hint} Commands: {', '.join(COMMANDS)}.")


def run(argv: Sequence[str]) -> int:
    """Run the command line `argv` (without the program's name) and return its exit code.

    0 done; 1 unexpected error; 2 a mistake in the input; 3 training broke down; 130 interrupted; 128 + n signal n.
    Every error is one paragraph on stderr; with --json it is also the JSON document on stdout.
    """
    as_json = "--json" in argv
    chosen = None
    try:
        chosen = choose(argv)
        code = build_app(chosen)(args=list(argv), prog_name="sennit", standalone_mode=False)
        if code == INTERRUPTED:  # typer turns Ctrl-C into this
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except SennitError as error:
        failure = getattr(error, "failure", None)
        if failure is not None and failure.trace:
            sys.stderr.write(failure.trace)
        details = {"rank": failure.rank} if failure is not None else {}
        kind = failure.kind if failure is not None else type(error).__name__
        print_error(kind, str(error), error.exit_code, as_json=as_json, **details)
        return error.exit_code
    except USAGE_ERROR as error:
        hint = f"`sennit {chosen} --help` lists the options." if chosen else "`sennit --help` lists the commands."
        message = getattr(error, "format_message", error.__str__)()
        print_error("UsageError", f"{message.rstrip('.')}. {hint}", 2, as_json=as_json)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        message = "Interrupted. What is saved stays; the same command goes on from the last checkpoint."
        print_error("Interrupted", message, INTERRUPTED, as_json=as_json)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # whoever read the output has gone
        return 1
    except Exception as error:
        traceback.print_exc()
        print_error(type(error).__name__, f"{type(error).__name__}: {error}", 1, as_json=as_json)
        return 1


def main() -> None:
    """Run the program with the process's arguments and exit."""
    argv = sys.argv[1:]
    if argv[:1] in (["train"], ["generate"]) and not {"--help", "-h"} & set(argv):
        from sennit.cli.train import local_ranks
        from sennit.launch import restart

        restart(local_ranks(argv))
    sys.exit(run(argv))


__all__ = ["COMMANDS", "Command", "build_app", "choose", "load_command", "main", "run"]
