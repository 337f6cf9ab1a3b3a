"""Choosing and forcing providers of operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sennit import ops
from sennit.errors import ConfigError
from sennit.ops import table


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """An operator `double` with four providers, in a table that is put back."""
    rows, forced = dict(table._providers), dict(table._forced)
    table.register("double", "plain", lambda x: x * 2)
    table.register("double", "small", lambda x: x + x, priority=30, accepts=lambda x: x.numel() < 3)
    table.register("double", "half", lambda x: x * 2, priority=20, dtypes=(torch.bfloat16,))
    table.register("double", "elsewhere", lambda x: x * 2, priority=40, devices=("cuda", "musa"))
    table.register("double", "absent", lambda x: x * 2, priority=50, available=lambda: "no compiler")
    yield
    table._providers.clear()
    table._providers.update(rows)
    table._forced.clear()
    table._forced.update(forced)
    table._candidates.clear()


def chosen(size: int, dtype: torch.dtype = torch.float32) -> str:
    x = torch.ones(size, dtype=dtype)
    assert torch.equal(table.call("double", x), x * 2)
    return table.select("double", "cpu", dtype, (x,), {}).name


def test_the_usable_provider_of_highest_priority_serves() -> None:
    assert chosen(2) == "small"
    assert chosen(3) == "plain", "small does not accept it"
    assert chosen(3, torch.bfloat16) == "half"
    assert [row.name for row in table.providers("double")] == ["absent", "elsewhere", "small", "half", "plain"]


def test_force_holds_inside_its_block_and_nests() -> None:
    with table.force({"double": "plain"}):
        assert chosen(2) == "plain"
        with table.force({"double": "small"}):
            assert chosen(2) == "small"
        assert chosen(2) == "plain"
        with pytest.raises(KeyError), table.force({"double": "small"}):
            raise KeyError
        assert chosen(2) == "plain"
    assert chosen(2) == "small"


def test_set_forced_holds_until_it_is_set_again() -> None:
    table.set_forced({"double": "plain"})
    assert chosen(2) == "plain"
    table.set_forced({})
    assert chosen(2) == "small"


def test_unknown_names_are_refused_with_those_that_exist_and_nothing_changes() -> None:
    with pytest.raises(ConfigError, match=r"no operator 'doubel'\. Did you mean double\? Operators: .*double.*rms_norm"):
        table.set_forced({"doubel": "plain"})
    with pytest.raises(ConfigError, match=r"ops\.provider\.double: there is no provider 'plian'\. Providers: absent, .*plain"):
        with table.force({"double": "plian"}):
            pass
    assert chosen(2) == "small"


@pytest.mark.parametrize(
    ("forced", "size", "why"),
    [("small", 3, "plain: small is forced"), ("half", 3, "half: only for bfloat16"), ("absent", 3, "absent: no compiler")],
)
def test_a_forced_provider_that_cannot_serve_is_an_error_that_says_why(forced: str, size: int, why: str) -> None:
    with table.force({"double": forced}), pytest.raises(ConfigError, match="No provider of the operator double") as error:
        table.call("double", torch.ones(size))
    assert why in str(error.value) and "on cpu in float32" in str(error.value)


def test_explain_says_why_each_provider_is_not_used() -> None:
    assert table.explain("double", "cpu", torch.float32) == [
        ("absent", False, "no compiler"),
        ("elsewhere", False, "only on cuda, musa"),
        ("small", True, "priority 30"),
        ("half", False, "only for bfloat16"),
        ("plain", True, "priority 0"),
    ]
    with table.force({"double": "plain"}):
        assert dict((name, why) for name, _, why in table.explain("double", "cpu"))["small"] == "plain is forced"
    assert [usable for _, usable, _ in table.explain("double", "cuda")] == [False, True, True, True, True]


def test_a_provider_registered_again_replaces_the_old_one() -> None:
    assert chosen(3) == "plain"
    table.register("double", "plain", lambda x: x * 2, priority=60)
    assert chosen(2) == "plain"
    assert len(table.providers("double")) == 5


@pytest.mark.parametrize("device", ["cpu", "cuda", "musa", "some-new-device"])
@pytest.mark.parametrize("op", [op for op in table.operators() if op != "passes"])
def test_every_operator_has_a_reference_that_serves_every_device_and_dtype(op: str, device: str) -> None:
    """A device that nobody has written an operator for still trains."""
    with table.force({op: "reference"}):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            assert table.select(op, device, dtype, (), {}).name == "reference"


def test_reference_is_the_last_choice() -> None:
    for op in ops.operators():
        rows = ops.providers(op)
        assert rows[-1].name == ("torch" if op == "passes" else "plain" if op == "double" else "reference")
        assert rows[-1].devices is None and rows[-1].dtypes is None and rows[-1].accepts is None
