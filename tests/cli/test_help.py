"""Help, version and names: at once, without torch, and every field of the recipe."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sennit.cli.main import COMMANDS
from tests.cli.program import environment, error_of, sennit


def test_help_lists_all_commands() -> None:
    done = sennit("--help")
    assert done.returncode == 0
    assert all(f"{name} " in done.stdout for name in COMMANDS)
    assert sennit().stdout == done.stdout


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["train", "--train.steps", "x"]])
def test_help_and_mistakes_import_no_torch(argv: list[str]) -> None:
    code = "import sys; from sennit.cli.main import run; run(sys.argv[1:]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, *argv], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_of_the_program_imports_no_pydantic() -> None:
    code = "import sys; from sennit.cli.main import run; run(['--help']); assert 'pydantic' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_train_help_lists_every_field_of_the_recipe() -> None:
    from sennit.recipe.fields import recipe_fields

    done = sennit("train", "--help")
    words = set(done.stdout.split())
    assert done.returncode == 0
    assert {f"--{path}" for path in recipe_fields()} <= words
    assert {"--nproc", "--json", "Presets:", "tiny"} <= words


def test_version() -> None:
    import sennit as package

    assert sennit("--version").stdout == f"sennit {package.__version__}\n"


def test_unknown_command_names_the_nearest() -> None:
    message = error_of(sennit("trian", "--json"))["message"]
    assert "'trian'" in message and "Did you mean train?" in message
