"""What the hand-made schedules cost, in closed form: to prune before simulating, and to check the simulation.

p ranks, m microbatches, v virtual stages a rank; F, I, W: times of a forward, a backward for inputs and a backward for
weights of the layers that one rank owns (L / p), B = I + W. All parts of the model cost the same, messages nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Expected:
    """What a schedule costs.

    `excess`: makespan - m (F + I + W), None where the formula does not hold for these numbers. `peak_activations`: of
    the rank that holds most, in (layers of one rank) x microbatches, until W. `parameters`: of a rank, in L / p layers.
    """

    excess: float | None
    peak_activations: float
    parameters: float


@dataclass(frozen=True, slots=True)
class _Case:
    """The numbers that a formula depends on."""

    p: int
    m: int
    v: int
    forward: float
    input: float
    weight: float
    fused: bool

    @property
    def backward(self) -> float:
        """B = I + W."""
        return self.input + self.weight

    @property
    def even(self) -> bool:
        """Whether F = I >= W: then the patterns of V-shaped and bidirectional pipelines fit into each other."""
        return self.forward == self.input >= self.weight

    @property
    def fill(self) -> float:
        """What a pair costs beyond three W while a bidirectional pipeline fills: F + B as one, or its longer half."""
        c = self
        return c.forward + 2 * c.backward - 3 * c.weight if c.fused else c.forward + c.input - c.weight


def expected(
    name: str,
    p: int,
    m: int,
    v: int = 1,
    forward: float = 1.0,
    input: float = 1.0,
    weight: float = 1.0,
    *,
    fused: bool = False,
) -> Expected | None:
    """Return the closed form of the schedule `name` of the module `fixed`, or None where there is none.

    `v` counts for `interleaved` alone. `fused`: with pairs of a forward and a backward that take the sum of both and
    send both results at their end, nothing hidden; interleaved then has one more forward of warm-up. Schedules without
    pairs are the same either way. The numbers must be ones that the schedule takes.

    The excess, with the numbers for which it holds:

    - gpipe, 1f1b: (p-1)(F+B); interleaved: (p-1)(F+B)/v. Always, but fused only for m > p.
    - zb-h1: (p-1)(F+I) - (min(m, p)-1) W, for W <= min(F, I). From m = p on this is (p-1)(F+I-W).
    - zb-h2: (p-1) F, for m >= 2p-1 and I <= 2 min(F, W); for F = I = W any m, then with max(0, p-m) F more. From a
      common start: each rank alone has no wait between its first and last operation.
    - zb-v: (p-1) F/2, for F = I and W <= I <= 2 W.
    - dualpipe: (p/2-1)(F+I-W), dualpipev: (p-1)(F+I-W)/2, for F = I >= W. Fused, F+B+B-3W stands for F+I-W.

    Sources: arXiv 1811.06965, 2006.09503, 2104.04473, 2401.10241, 2405.15362, 2412.19437; zb-h1 for m < p, the
    activations for small m and the ranges were found by simulation.
    """
    formula = _FORMULAS.get(name)
    return None if formula is None else formula(_Case(p, m, v, forward, input, weight, fused))


def _gpipe(c: _Case) -> Expected:
    return Expected((c.p - 1) * (c.forward + c.backward), c.m, 1.0)


def _one_f_one_b(c: _Case) -> Expected:
    return Expected((c.p - 1) * (c.forward + c.backward), min(c.m, c.p), 1.0)


def _interleaved(c: _Case) -> Expected:
    # Of rank 0: the forwards of its warm-up and the one that follows.
    held = 2 * (c.p - 1) + (c.v - 1) * c.p + 1 + c.fused
    excess = None if c.fused and c.m <= c.p else (c.p - 1) * (c.forward + c.backward) / c.v
    return Expected(excess, min(held, c.m * c.v) / c.v, 1.0)


def _zb_h1(c: _Case) -> Expected:
    excess = (c.p - 1) * (c.forward + c.input) - (min(c.m, c.p) - 1) * c.weight
    return Expected(excess if c.weight <= min(c.forward, c.input) else None, min(c.m, c.p), 1.0)


def _zb_h2(c: _Case) -> Expected:
    equal = c.forward == c.input == c.weight
    steady = c.m >= 2 * c.p - 1 and c.input <= 2 * min(c.forward, c.weight)
    excess = (c.p - 1 + max(0, c.p - c.m)) * c.forward if equal or steady else None
    return Expected(excess, min(c.m, 2 * c.p - 1), 1.0)


def _zb_v(c: _Case) -> Expected:
    steady = c.even and c.input <= 2 * c.weight
    return Expected((c.p - 1) * c.forward / 2 if steady else None, c.p, 1.0)


def _dualpipe(c: _Case) -> Expected:
    return Expected((c.p / 2 - 1) * c.fill if c.even else None, c.p + 1, 2.0)


def _dualpipe_v(c: _Case) -> Expected:
    return Expected((c.p - 1) * c.fill / 2 if c.even else None, c.p + 0.5, 1.0)


_FORMULAS = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-h2": _zb_h2,
    "zb-v": _zb_v,
    "dualpipe": _dualpipe,
    "dualpipev": _dualpipe_v,
}

__all__ = ["Expected", "expected"]
