"""Every command in the README and the documentation exists, and every recipe option in them is accepted."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from sennit.cli.arguments import read_recipe_arguments
from sennit.cli.main import COMMANDS
from sennit.recipe import check_run, load_recipe, preset_names

ROOT = Path(__file__).resolve().parents[1]


def commands() -> Iterator[tuple[str, str]]:
    """Yield (place, command line) for each command of Sennit in fenced blocks and in code spans."""
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        fenced = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            place = f"{path.relative_to(ROOT)}:{number}"
            if line.lstrip().startswith("```"):
                fenced = not fenced
            elif fenced and re.search(r"(^|\s)(sennit|-m sennit) ", line):
                yield place, line
            elif fenced and re.match(r"--\w", line):
                yield place, f"sennit train tiny {line}"
            else:
                for span in re.findall(r"`(sennit [^`]+|--nproc[^`]+)`", line):
                    yield place, span if span.startswith("sennit") else f"sennit train tiny {span}"


@cache
def help_of(command: str) -> str:
    return subprocess.run([sys.executable, "-m", "sennit", command, "--help"], capture_output=True, text=True).stdout


def check_training(words: list[str]) -> None:
    """Load the recipe with its overrides (a file's is replaced by tiny) and check it for the ranks it asks for."""
    ranks = 1
    if "--nproc" in words:
        index = words.index("--nproc")
        ranks = int(words[index + 1])
        del words[index : index + 2]
    arguments = read_recipe_arguments([word for word in words if word != "--json"], ())
    name = arguments.recipe if arguments.recipe in preset_names() else "tiny"
    recipe = load_recipe(name, arguments.overrides)
    p = recipe.parallel
    if ranks == 1:
        ranks = p.pp * p.dp_replicate * max(p.dp_shard, 1) * p.cp * p.tp
    check_run(recipe, ranks, fast_dtypes=())


def test_every_command_in_the_documentation_works() -> None:
    problems, seen = [], 0
    for place, line in commands():
        words = shlex.split(line.partition("|")[0], comments=True)
        if any(word.startswith(("[", "N", "...")) for word in words):
            continue  # a synopsis
        words = words[words.index("sennit") + 1 :]
        if not words or words[0].startswith("-"):
            continue
        command, *options = words
        seen += 1
        if command not in COMMANDS:
            problems.append(f"{place}: there is no command {command}: {line}")
        elif command == "train" and "--help" not in options:
            try:
                check_training(options)
            except Exception as error:
                problems.append(f"{place}: {line}: {error}")
        elif command != "train":
            for option in (word.partition("=")[0] for word in options if word.startswith("--")):
                if option not in help_of(command):
                    problems.append(f"{place}: {command} has no {option}: {line}")
    assert not problems, "\n".join(problems)
    assert seen > 25
