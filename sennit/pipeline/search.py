"""Schedules made for the costs and the memory at hand.

Hand-made schedules assume equal stages, F = I = W and free messages. `adaptive` starts from those that keep the memory
limit and looks for a shorter one in three steps, all of which run `weave` on priorities for F and I:

1. the orders of the hand-made schedules again, with the weight gradients placed anew;
2. repeated blocks: a coarse grid over their shapes, then random changes of the best;
3. the start times of the best schedule so far as priorities, with noise.

Each attempt is given up as soon as it cannot be as short as the best. The search is deterministic, and ends at the
latest after a number of operations tried, not after a time. Its result is never longer than a hand-made schedule.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import product
from math import inf, isfinite
from random import Random
from typing import NamedTuple

from sennit.errors import ConfigError
from sennit.pipeline.catalog import make
from sennit.pipeline.fixed import loop_placement, v_placement
from sennit.pipeline.schedule import Op, Schedule, chain
from sennit.pipeline.simulate import Costs, activation_curve, simulate
from sennit.pipeline.vshape import ROUNDING, Block, Lines, Work, in_one_line, weave
from sennit.recipe.schedules import PipelineSchedule, schedule_problems


class Placement(StrEnum):
    """How virtual stages lie on the ranks: one each; around all ranks several times; down the ranks and up again."""

    LINE = "line"
    LOOP = "loop"
    V = "v"


HAND_MADE = {
    Placement.LINE: (
        PipelineSchedule.GPIPE,
        PipelineSchedule.ONE_F_ONE_B,
        PipelineSchedule.ZB_H1,
        PipelineSchedule.ZB_H2,
    ),
    Placement.LOOP: (PipelineSchedule.INTERLEAVED,),
    Placement.V: (
        PipelineSchedule.V_MIN,
        PipelineSchedule.V_HALF,
        PipelineSchedule.ZB_V,
        PipelineSchedule.DUALPIPE_V,
    ),
}
"""The schedules that `adaptive` starts from: only those of the same placement have the same costs."""

STEPS = 600_000
"""Operations tried by a search of effort 1: some hundred attempts for p = 8, m = 32, as most are given up early."""

ATTEMPTS = 400
"""Random attempts of a search of effort 1: what bounds it for small pipelines."""


def adaptive(
    p: int,
    m: int,
    costs: Costs,
    *,
    placement: str = Placement.V,
    virtual_stages: int = 0,
    memory_limit: float | None = None,
    activation: Sequence[float] | None = None,
    after_input: Sequence[float] | None = None,
    effort: float = 1.0,
) -> Schedule:
    """Return the shortest schedule found for p ranks and m microbatches under `costs`, none of it in pairs.

    `costs` by virtual stage. `placement`: line (one virtual stage a rank), loop (`virtual_stages` a rank, by default 2)
    or v (two). `activation`, by virtual stage: what F keeps, by default in (layers of one rank) x microbatches;
    `after_input`: what I leaves of it for W, by default all. `memory_limit`: the most that a rank may hold, in that unit.
    `effort`: 1 takes up to two seconds for p = 8, m = 32; 0 tries little more than the hand-made schedules.

    It has the name of the hand-made schedule if none shorter was found, else `adaptive`. Of equally short ones it
    prefers those that need less memory.
    Raises ConfigError for numbers that do not fit together and for a limit below what one microbatch needs.
    """
    kind, chunks = _check_placement(p, m, placement, virtual_stages)
    rank_of = tuple(v_placement(p) if kind is Placement.V else loop_placement(p, chunks))
    whole = (1 / chunks,) * len(rank_of) if activation is None else tuple(activation)
    late = whole if after_input is None else tuple(after_input)
    work = Work(rank_of, m, costs, whole, late, inf if memory_limit is None else memory_limit)
    _check_work(work)
    asked = chunks if kind is Placement.LOOP else 0
    made = [make(name, p, m, asked, pairs=False) for name in HAND_MADE[kind] if not schedule_problems(name, p, m, asked)]
    return _Search(work).run(made, effort)


def _check_placement(p: int, m: int, placement: str, virtual_stages: int) -> tuple[Placement, int]:
    if p < 1 or m < 1:
        raise ConfigError(f"{p} ranks and {m} microbatches: both must be at least 1.")
    if placement not in tuple(Placement):
        raise ConfigError(f"There is no placement {placement!r}; use one of {', '.join(Placement)}.")
    kind = Placement(placement)
    own = 1 if kind is Placement.LINE else 2
    chunks = virtual_stages or own
    if chunks < own or (chunks > own and kind is not Placement.LOOP):
        raise ConfigError(
            f"virtual_stages={virtual_stages} with placement {placement}: line has 1 a rank, v has 2, loop any number from "
            f"2; use virtual_stages={own}, or placement {'line' if chunks == 1 else 'loop'}."
        )
    return kind, chunks


def _check_work(work: Work) -> None:
    n, costs = len(work.rank_of), work.costs
    by_stage = {
        "costs.forward": costs.forward,
        "costs.input": costs.input,
        "costs.weight": costs.weight,
        "activation": work.whole,
        "after_input": work.after_input,
    }
    for name, values in by_stage.items():
        if len(values) != n:
            raise ConfigError(f"{name} has {len(values)} entries for {n} virtual stages; give one for each.")
        if not all(isfinite(value) and value >= 0 for value in values):
            raise ConfigError(f"{name} is {values}; costs and activations must be finite and not negative.")
    if not (isfinite(costs.send) and costs.send >= 0):
        raise ConfigError(f"costs.send={costs.send}; it must be finite and not negative; use 0 for free messages.")
    for stage, (late, whole) in enumerate(zip(work.after_input, work.whole, strict=True)):
        if late > whole:
            raise ConfigError(
                f"after_input={late:g} of virtual stage {stage} is part of its activation={whole:g}; use at most that."
            )
    # A microbatch is on all virtual stages of a rank at once: the first waits for the last.
    need = max(work.per_rank(work.whole))
    if not work.limit * (1 + ROUNDING) >= need:
        raise ConfigError(
            f"memory_limit={work.limit:g}: one microbatch alone holds the activations of all virtual stages of a rank, "
            f"at most {need:g}; use memory_limit={need:g} or more."
        )


class _Shape(NamedTuple):
    """Free choices of a block and of how it is woven; times in units of the longest load of a rank.

    `forward`, `input`: what a microbatch waits at each virtual stage beyond what it must, in the first and the second
    half of the virtual stages; `turn`: once, between these halves. `overtake`: whether a rank may do what comes later in
    its order if what comes next cannot start. `depth`: microbatches that a rank holds at most, in units of p, even if
    the memory suffices for more: who runs too far ahead makes others wait.
    """

    forward: tuple[float, float]
    input: tuple[float, float]
    turn: float = 0.0
    interval: float = 1.0
    patience: float = 0.5
    overtake: bool = False
    depth: float = inf

    def block(self, work: Work) -> Block:
        """Return the block for the costs of `work`."""
        costs, n, unit = work.costs, len(work.rank_of), max(work.loads)
        forward, backward = [0.0], []
        for stage in range(n - 1):
            wait = self.turn if stage == n // 2 - 1 else self.forward[stage >= n // 2]
            forward.append(forward[-1] + costs.forward[stage] + costs.send + wait * unit)
        time = forward[-1] + costs.forward[-1]
        for stage in reversed(range(n)):
            backward.append(time)
            time += costs.input[stage] + costs.send + self.input[stage >= n // 2] * unit
        return Block(tuple(forward), tuple(reversed(backward)), self.interval * unit)

    def changed(self, random: Random) -> _Shape:
        """Return the shape with some of its choices changed."""
        waits = [*self.forward, *self.input, self.turn]
        interval, patience, overtake, depth = self[3:]
        for choice in random.sample(range(9), random.randint(1, 3)):
            if choice < 5:
                waits[choice] = max(0.0, waits[choice] + random.gauss(0, 0.1))
            elif choice == 5:
                interval = max(0.8, interval + random.gauss(0, 0.2))
            elif choice == 6:
                patience = random.choice(_PATIENCE)
            elif choice == 7:
                overtake = not overtake
            else:
                depth = random.choice(_DEPTHS)
        return _Shape((waits[0], waits[1]), (waits[2], waits[3]), waits[4], interval, patience, overtake, depth)


_PATIENCE = (0.1, 0.3, 0.5, 0.7, 1.0, 1.3)
_DEPTHS = (0.75, 1.0, 1.25, 1.5, 2.0, inf)


def _grid() -> Iterator[_Shape]:
    """Yield shapes from short to long, with the waits in different places: the longer, the more memory they need."""
    modes = ((False, inf), (True, 1.5), (True, inf))
    for wait, interval, (overtake, depth) in product((0.0, 0.1, 0.2, 0.4, 0.8, 1.6), (1.0, 1.5), modes):
        for a, b in ((0.5, 0.5), (0, 1), (1, 0), (0, 0), (1, 1)) if wait else ((0, 0),):
            forward, backward = (a * wait, b * wait), ((1 - a) * wait, (1 - b) * wait)
            yield _Shape(forward, backward, interval=interval, overtake=overtake, depth=depth)


class _Recipe(NamedTuple):
    """All that `weave` needs to make a schedule of a work."""

    lines: list[Lines]
    patience: float
    overtake: bool
    limit: float = inf


class _Search:
    """The best schedule so far and how it was made."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.random = Random(0)
        self.steps = 0
        self.best: Schedule | None = None
        self.makespan = self.peak = inf
        self.recipe: _Recipe | None = None
        self.reserve = tuple(
            sum(work.whole[later] for later in range(stage + 1, len(work.rank_of)) if work.rank_of[later] == rank)
            for stage, rank in enumerate(work.rank_of)
        )
        self.need = max(work.per_rank(work.whole))
        self.target = _shortest(work) * (1 + ROUNDING)

    def run(self, made: Sequence[Schedule], effort: float) -> Schedule:
        """Return the best schedule after all steps."""
        for schedule in made:
            self._consider(schedule)
        for schedule, patience, overtake in product(made, (0.5, 1.0), (False, True)):
            self.attempt(_Recipe(self._start_times(schedule), patience, overtake), self.makespan)
        self._shapes(int(0.6 * effort * STEPS), int(effort * ATTEMPTS))
        self._shake(int(effort * STEPS), int(effort * ATTEMPTS))
        self._save_memory(int(effort * STEPS))
        assert self.best is not None  # one microbatch at a time is always possible
        return self.best

    def attempt(self, recipe: _Recipe, bound: float) -> float:
        """Return the makespan of a recipe, infinity if it exceeds `bound`; keep the schedule if it is the best."""
        work = replace(self.work, limit=min(self.work.limit, recipe.limit))
        lines = recipe.lines if recipe.overtake else in_one_line(recipe.lines)
        # With a reserve no forward can take the memory that the last ones in flight need to get through.
        reserve = self.reserve if recipe.overtake else ()
        woven = weave(work, lines, patience=recipe.patience, reserve=reserve, bound=bound)
        # Preparing the lines takes about as long as a third of the operations.
        self.steps += woven.steps + len(work.rank_of) * work.microbatches
        if woven.order is not None and self._better(woven.makespan, woven.peak):
            self.best = chain("adaptive", work.rank_of, work.microbatches, woven.order)
            self.makespan, self.peak, self.recipe = woven.makespan, woven.peak, recipe
        return woven.makespan

    def _better(self, makespan: float, peak: float) -> bool:
        if abs(makespan - self.makespan) <= ROUNDING * makespan:
            return peak < self.peak * (1 - ROUNDING)
        return makespan < self.makespan

    def _consider(self, schedule: Schedule) -> None:
        """Keep a hand-made schedule if it is the best that the memory suffices for."""
        work = self.work
        peak = max(
            max(activation_curve(schedule, rank, whole=work.whole, after_input=work.after_input))
            for rank in range(work.num_ranks)
        )
        if peak <= work.limit * (1 + ROUNDING):
            makespan = simulate(schedule, work.costs).makespan
            if self._better(makespan, peak):
                self.best, self.makespan, self.peak = schedule, makespan, peak

    def _start_times(self, schedule: Schedule) -> list[Lines]:
        """Return lines with the start of each F and I as its priority."""
        lines: list[Lines] = []
        for events in simulate(schedule, self.work.costs).events:
            found: dict[tuple[str, int], list[tuple[float, Op]]] = {}
            for event in events:
                op = event.item
                assert isinstance(op, Op)
                if op.kind != "W":
                    op = op._replace(kind="I") if op.kind == "B" else op
                    found.setdefault((op.kind, op.stage), []).append((event.start, op))
            lines.append(list(found.values()))
        return lines

    def _shapes(self, steps: int, attempts: int) -> None:
        """Try the grid, then changes of the best shape."""
        # The shapes compete among themselves: a hand-made schedule that is better now says nothing about their changes.
        shortest, best = inf, None
        for recipe, shape in self._grid_recipes():
            if best is not None and self.steps > steps:
                break
            made = self.attempt(recipe, shortest)
            if made < shortest:
                shortest, best = made, shape
        if best is None:
            self._one_by_one()
            return
        for _ in range(attempts):
            if self.steps > steps or self.makespan <= self.target:
                return
            shape = best.changed(self.random)
            made = self.attempt(self._recipe_of(shape), shortest)
            if made <= shortest:
                shortest, best = made, shape

    def _one_by_one(self) -> None:
        """Try each microbatch after the end of the one before: the least memory, and never a deadlock."""
        block = _Shape((0.0, 0.0), (0.0, 0.0)).block(self.work)
        lines = block._replace(interval=block.input[0] + self.work.costs.input[0]).lines(self.work)
        self.attempt(_Recipe(lines, 1.0, False), inf)

    def _grid_recipes(self) -> Iterator[tuple[_Recipe, _Shape]]:
        for shape in _grid():
            recipe = self._recipe_of(shape)
            if shape.depth == inf or recipe.limit < self.work.limit:  # else the same again
                yield recipe, shape

    def _recipe_of(self, shape: _Shape) -> _Recipe:
        limit = max(1.0, shape.depth * self.work.num_ranks) * self.need
        return _Recipe(shape.block(self.work).lines(self.work), shape.patience, shape.overtake, limit)

    def _shake(self, steps: int, attempts: int) -> None:
        """Try the start times of the best schedule with noise."""
        base, lines = None, []
        for _ in range(attempts):
            if self.steps > steps or self.makespan <= self.target or self.best is None:
                return
            if base is not self.best:
                base, lines = self.best, self._start_times(self.best)
            noise = self.random.choice((0.03, 0.1, 0.3)) * max(self.work.loads)
            moved = [
                [[(time + self.random.gauss(0, noise), op) for time, op in line] for line in of_rank]
                for of_rank in lines
            ]
            self.attempt(_Recipe(moved, self.random.choice(_PATIENCE), self.random.random() < 0.5), self.makespan)

    def _save_memory(self, steps: int) -> None:
        """Make the best schedule again under lower limits, by bisection, as long as it takes no longer.

        What is left of the steps goes to other shapes under these limits.
        """
        recipe, low, high = self.recipe, self.need, self.peak
        if recipe is None:
            return
        for _ in range(6):
            limit, before = (low + high) / 2, self.peak
            self.attempt(recipe._replace(limit=limit), self.makespan)
            for other, _shape in self._grid_recipes():
                if self.peak < before or self.steps > steps:
                    break
                self.attempt(other._replace(limit=limit), self.makespan)
            if self.peak < before:
                high = self.peak
            else:
                low = limit


def _shortest(work: Work) -> float:
    """Return a time that no schedule can beat: a rank starts when its first input comes and then has all its work."""
    time, starts = 0.0, {}
    for stage, rank in enumerate(work.rank_of):
        if stage and work.rank_of[stage - 1] != rank:
            time += work.costs.send
        starts.setdefault(rank, time)
        time += work.costs.forward[stage]
    return max(starts[rank] + load * work.microbatches for rank, load in enumerate(work.loads))


__all__ = ["HAND_MADE", "Placement", "adaptive"]
