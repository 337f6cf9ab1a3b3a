"""The table of operators: which provider computes what, on which device and dtype.

An operator has one reference, which defines its numerics, and any number of other providers. `select` picks the
usable one with the highest priority; `force` overrides the choice by name; `explain` says why the others are not used.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sennit.errors import ConfigError

Dtypes = frozenset[torch.dtype]


@dataclass(frozen=True, slots=True)
class Provider:
    """One implementation of an operator.

    `devices`, `dtypes`: where it may run (None: everywhere). `available()` returns None, or why it cannot be used on
    this machine. `accepts(*args, **kwargs)` tells whether it handles a particular call (None: every call).
    """

    op: str
    name: str
    fn: Callable[..., Any]
    devices: frozenset[str] | None = None
    dtypes: Dtypes | None = None
    priority: int = 0
    available: Callable[[], str | None] | None = None
    accepts: Callable[..., bool] | None = None

    def missing(self) -> str | None:
        """Return why this provider cannot be used on this machine, or None."""
        return None if self.available is None else self.available()

    def unfit(self, device: str, dtype: torch.dtype | None) -> str | None:
        """Return why this provider does not serve (device, dtype), or None."""
        if self.devices is not None and device not in self.devices:
            return f"only on {', '.join(sorted(self.devices))}"
        if dtype is not None and self.dtypes is not None and dtype not in self.dtypes:
            return f"only for {', '.join(sorted(str(d).removeprefix('torch.') for d in self.dtypes))}"
        return self.missing()


_providers: dict[str, list[Provider]] = {}
_forced: dict[str, str] = {}
_candidates: dict[tuple[str, str, torch.dtype], tuple[Provider, ...]] = {}


def register(
    op: str,
    provider: str,
    fn: Callable[..., Any],
    *,
    devices: tuple[str, ...] | None = None,
    dtypes: tuple[torch.dtype, ...] | None = None,
    priority: int = 0,
    available: Callable[[], str | None] | None = None,
    accepts: Callable[..., bool] | None = None,
) -> None:
    """Add a provider of `op`; a provider of the same name is replaced. Higher `priority` is preferred."""
    entry = Provider(
        op,
        provider,
        fn,
        None if devices is None else frozenset(devices),
        None if dtypes is None else frozenset(dtypes),
        priority,
        available,
        accepts,
    )
    rows = [row for row in _providers.get(op, []) if row.name != provider]
    _providers[op] = sorted([*rows, entry], key=lambda row: -row.priority)
    _candidates.clear()


def operators() -> list[str]:
    """Return the names of all operators."""
    return sorted(_providers)


def providers(op: str) -> list[Provider]:
    """Return the providers of `op`, preferred first. Raises ConfigError for an unknown operator."""
    if op not in _providers:
        near = difflib.get_close_matches(op, _providers, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"ops.provider: there is no operator {op!r}.{hint} Operators: {', '.join(operators())}.")
    return _providers[op]


def explain(op: str, device: str, dtype: torch.dtype | None = None) -> list[tuple[str, bool, str]]:
    """Return (provider, usable, why) for each provider of `op` on `device`, preferred first."""
    rows = []
    for row in providers(op):
        why = row.unfit(device, dtype)
        forced = _forced.get(op)
        if why is None and forced is not None and forced != row.name:
            why = f"{forced} is forced"
        rows.append((row.name, why is None, why or f"priority {row.priority}"))
    return rows


def select(op: str, device: str, dtype: torch.dtype, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Provider:
    """Return the provider that serves this call. Raises ConfigError if there is none."""
    key = (op, device, dtype)
    rows = _candidates.get(key)
    if rows is None:
        rows = _candidates[key] = _usable(op, device, dtype)
    for row in rows:
        if row.accepts is None or row.accepts(*args, **kwargs):
            return row
    why = "; ".join(
        f"{name}: {'does not handle this kind of call' if usable else reason}"
        for name, usable, reason in explain(op, device, dtype)
    )
    raise ConfigError(
        f"No provider of the operator {op} serves this call on {device} in {str(dtype).removeprefix('torch.')} ({why}). "
        f"Remove its entry from ops.provider or choose another."
    )


def _usable(op: str, device: str, dtype: torch.dtype) -> tuple[Provider, ...]:
    rows = tuple(row for row in providers(op) if row.unfit(device, dtype) is None)
    forced = _forced.get(op)
    return rows if forced is None else tuple(row for row in rows if row.name == forced)


def call(op: str, lead: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run `op` on the device and in the dtype of `lead`, its first argument."""
    row = select(op, lead.device.type, lead.dtype, (lead, *args), kwargs)
    return row.fn(lead, *args, **kwargs)


def set_forced(choice: Mapping[str, str]) -> None:
    """Force providers by operator name for the rest of the process. Raises ConfigError for unknown names."""
    for op, name in choice.items():
        names = [row.name for row in providers(op)]
        if name not in names:
            raise ConfigError(f"ops.provider.{op}: there is no provider {name!r}. Providers: {', '.join(names)}.")
    _forced.clear()
    _forced.update(choice)
    _candidates.clear()


@contextlib.contextmanager
def force(choice: Mapping[str, str]) -> Iterator[None]:
    """Force providers by operator name inside the block."""
    before = dict(_forced)
    set_forced({**before, **choice})
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)
        _candidates.clear()


__all__ = ["Provider", "call", "explain", "force", "operators", "providers", "register", "select", "set_forced"]
