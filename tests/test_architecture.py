"""The rules that keep the tree an architecture diagram, checked on the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import sennit

ROOT = Path(sennit.__file__).parent
MODULES = sorted(path for path in ROOT.rglob("*.py"))

LAYERS = (
    {"errors", "paths"},
    {"recipe", "device"},
    {"mesh", "data", "checkpoint", "launch"},
    {"ops"},
    {"nn"},
    {"models"},
    {"generate", "report", "pipeline"},
    {"train"},
    {"cli"},
)
"""Packages in the direction of dependence: each may import those before it and those beside it, never in a circle."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of every import of a module, also those inside functions, but not those for types only."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree(path)):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield node.lineno, module
            if module == "sennit":
                yield from ((node.lineno, f"sennit.{alias.name}") for alias in node.names)


def foreign_imports(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line, module, its package) of the imports from other packages of Sennit."""
    for line, module in imports(path):
        parts = module.split(".")
        if parts[0] == "sennit" and len(parts) > 1 and parts[1] not in (package_of(path), "__version__"):
            yield line, module, parts[1]


def level(package: str) -> int:
    """Return the place of a package in LAYERS; the program itself comes last."""
    return next((index for index, names in enumerate(LAYERS) if package in names), len(LAYERS))


def test_every_package_has_a_level() -> None:
    assert {package_of(path) for path in MODULES} - {"__init__", "__main__"} <= set().union(*LAYERS)


def test_dependencies_point_one_way() -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {module}"
        for path in MODULES
        for line, module, other in foreign_imports(path)
        if level(other) > level(package_of(path))
    ]
    assert wrong == []


def test_packages_do_not_import_each_other_in_a_circle() -> None:
    edges = {(package_of(path), other) for path in MODULES for _, _, other in foreign_imports(path)}
    assert [edge for edge in edges if edge[::-1] in edges and edge[0] < edge[1]] == []


def test_only_the_device_folder_names_a_vendor() -> None:
    wrong = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in MODULES
        if package_of(path) != "device"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"torch\.(cuda|musa|npu|xpu)\b|\.cuda\(", line)
    ]
    assert wrong == []


def test_every_module_has_a_docstring_and_is_ascii() -> None:
    assert [name_of(path) for path in MODULES if not ast.get_docstring(tree(path))] == []
    assert [name_of(path) for path in MODULES if not path.read_text(encoding="utf-8").isascii()] == []


def test_every_module_names_its_public_parts() -> None:
    without = [name_of(path) for path in MODULES if "__all__" not in assigned(path)]
    assert [name for name in without if name != "__init__.py"] == []


def assigned(path: Path) -> set[str]:
    """Return the names that a module assigns at its top level."""
    names = set()
    for node in tree(path).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_private_names_of_other_packages_are_left_alone() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno} imports {alias.name} of {node.module}"
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sennit.")
        for alias in node.names
        if alias.name.startswith("_") and (node.module or "").split(".")[1] != package_of(path)
    ]
    assert wrong == []


def test_no_path_of_a_particular_machine_in_the_package() -> None:
    shipped = [path for path in ROOT.rglob("*") if path.suffix in (".py", ".toml", ".css", ".js", ".md")]
    for path in shipped:
        found = re.search(r"(?<![\w.])/(work|home|root|Users|workspace)/\w+", path.read_text(encoding="utf-8"))
        assert not found, f"{name_of(path)} names {found and found.group()}"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("sennit", ("torch", "pydantic", "numpy")),
        ("sennit.cli.main", ("torch", "pydantic", "numpy")),
        ("sennit.cli.train", ("torch", "pydantic", "numpy")),
        ("sennit.launch", ("torch", "pydantic", "numpy")),
        ("sennit.recipe", ("torch", "numpy")),
        ("sennit.device", ("torch", "numpy")),
    ],
)
def test_start_up_imports_nothing_heavy(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*[name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "", f"importing {module} imports {done.stdout.strip()}"
