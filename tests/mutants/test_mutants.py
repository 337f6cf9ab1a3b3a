"""No communication can be lost unnoticed: each one of tests/mutants/table.py is left out, and its test must fail."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import sennit
from sennit.mesh import collectives
from tests.mutants.table import MUTANTS, Killer

COMMUNICATING = {"all_reduce", "all_gather", "all_gather_single", "all_gather_into_tensor", "reduce_scatter",
                 "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single", "broadcast",
                 "full_tensor"}  # fmt: skip
HELPERS = {"_all_reduce", "_all_gather", "_reduce_scatter"}
"""What the collectives themselves are made of."""


@cache
def passes(killer: Killer) -> bool:
    """Run `killer` on the real code, once."""
    killer()
    return True


@pytest.mark.parametrize("name", MUTANTS)
def test_a_communication_that_is_left_out_is_noticed(name: str) -> None:
    mutant = MUTANTS[name]
    assert passes(mutant.killer)
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch)
        with pytest.raises(AssertionError) as noticed:
            mutant.killer()
    message = str(noticed.value)
    assert "Traceback" not in message or "\nAssertionError" in message, f"wrong numbers, not a crash: {message}"


def communicating_functions() -> set[str]:
    """Return the functions of the training step that call torch.distributed, from the source."""
    found = set()
    for package in ("mesh", "nn", "models", "ops", "pipeline", "train"):
        for path in sorted((Path(sennit.__file__).parent / package).rglob("*.py")):
            _collect(ast.parse(path.read_text(encoding="utf-8")), "", found)
    return found


def _collect(node: ast.AST, prefix: str, found: set[str]) -> None:
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, (ast.FunctionDef, ast.ClassDef))
        if named and child.name == "spmd_typecheck":  # type: ignore[attr-defined]
            continue  # states a type, sends nothing
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and prefix:
            if child.func.attr in COMMUNICATING:
                found.add(prefix)
        _collect(child, f"{prefix}.{child.name}".lstrip(".") if named else prefix, found)  # type: ignore[attr-defined]


def test_the_table_names_every_communication() -> None:
    covered = {mutant.covers for mutant in MUTANTS.values()}
    assert set(collectives.__all__) <= covered
    assert communicating_functions() - HELPERS <= covered
