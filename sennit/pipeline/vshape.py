"""Schedules made of a repeated block, with a limit on memory: V-half, V-min, and the tools to make others.

The life of one microbatch, from its first forward to its last backward for inputs, is a *block*: a time for each of
these operations. Repeated every `interval`, the blocks give each rank an order of its forwards and backwards. The
longer a virtual stage waits between its F and its I, in intervals, the more activations it holds; so the shape of the
block decides the memory, and where p virtual stages go down the ranks and p go up again, it can be the same on all of
them (arXiv 2405.15362). Weight gradients have no place in the block: `weave` runs the orders and puts each W into a
wait, or where memory is needed.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain as joined
from math import inf
from typing import NamedTuple

from sennit.pipeline.fixed import v_placement
from sennit.pipeline.schedule import Op, Schedule, chain
from sennit.pipeline.simulate import Costs

ROUNDING = 1e-9
"""Relative error allowed to sums of times and of activations."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be done: virtual stages 0, 1, .. in a chain on the ranks `rank_of`, and what each of them costs.

    `whole`, `after_input`: activations by virtual stage, kept from F until I, and of those until W. `limit`: the most
    that a rank may hold. `window`: how many receives a rank posts ahead on each channel, as in `verify`.
    """

    rank_of: tuple[int, ...]
    microbatches: int
    costs: Costs
    whole: tuple[float, ...]
    after_input: tuple[float, ...]
    limit: float = inf
    window: int = 4

    @property
    def num_ranks(self) -> int:
        """Ranks, p."""
        return max(self.rank_of) + 1

    def per_rank(self, values: Sequence[float]) -> list[float]:
        """Return the sum over the virtual stages of each rank of one value a virtual stage."""
        sums = [0.0] * self.num_ranks
        for rank, value in zip(self.rank_of, values, strict=True):
            sums[rank] += value
        return sums

    @property
    def loads(self) -> list[float]:
        """The time that each rank computes for one microbatch."""
        costs = self.costs
        return self.per_rank([sum(parts) for parts in zip(costs.forward, costs.input, costs.weight, strict=True)])


class Block(NamedTuple):
    """When one microbatch does its F and its I, by virtual stage, and after what time the next one follows."""

    forward: tuple[float, ...]
    input: tuple[float, ...]
    interval: float

    def lines(self, work: Work) -> list[Lines]:
        """Return, by rank, one line for F and one for I of each of its virtual stages."""
        lines: list[Lines] = [[] for _ in range(work.num_ranks)]
        for stage, rank in enumerate(work.rank_of):
            for kind, begin in (("I", self.input[stage]), ("F", self.forward[stage])):
                times = (begin + i * self.interval for i in range(work.microbatches))
                lines[rank].append([(time, Op(kind, stage, i)) for i, time in enumerate(times)])
        return lines


Lines = list[list[tuple[float, Op]]]
"""Lines of (priority, operation) that one rank works off, each in its order; the lowest priority goes first."""


def in_one_line(lines: list[Lines]) -> list[Lines]:
    """Return the lines of each rank merged by priority into one, so that no operation overtakes another."""
    return [[sorted(joined.from_iterable(of_rank))] for of_rank in lines]


class Woven(NamedTuple):
    """What `weave` has found.

    `order`: each rank's F, I and W, None if memory does not suffice, the lines wait for each other or it takes longer
    than allowed; then `makespan` is infinite. `peak`: the most activations that a rank holds. `steps`: operations tried.
    """

    order: list[list[Op]] | None
    makespan: float
    peak: float
    steps: int


def weave(
    work: Work, lines: list[Lines], *, patience: float = 1.0, reserve: Sequence[float] = (), bound: float = inf
) -> Woven:
    """Run the lines of all ranks and return the order that results, with the weight gradients in it.

    `lines`, by rank: what it may do next is the head of any line. Of the heads that can start now it takes the first by
    priority. If there is none it does a W, the oldest first, unless a head can start within `patience` times the
    duration of that W.
    `reserve`, by virtual stage: what must still be free after a forward of it. `bound`: the longest makespan allowed.
    """
    return _Weaver(work, lines, patience, reserve or (0.0,) * len(work.rank_of), bound).run()


class _Weaver:
    """The state of `weave`: an event simulation in which the ranks choose."""

    def __init__(
        self, work: Work, lines: list[Lines], patience: float, reserve: Sequence[float], bound: float
    ) -> None:
        ranks, stages = work.num_ranks, len(work.rank_of)
        self.work, self.lines, self.patience = work, lines, patience
        self.room = [work.limit * (1 + ROUNDING) - more - kept for more, kept in zip(work.whole, reserve, strict=True)]
        self.bound = bound * (1 + ROUNDING)
        self.heads = [[0] * len(of_rank) for of_rank in lines]
        self.order: list[list[Op]] = [[] for _ in range(ranks)]
        self.weights: list[list[Op]] = [[] for _ in range(ranks)]
        self.weights_done = [0] * ranks
        self.held = [0.0] * ranks
        self.peak = 0.0
        self.free_at = [0.0] * ranks
        self.left = [load * work.microbatches for load in work.loads]
        self.ends = {kind: [[inf] * work.microbatches for _ in range(stages)] for kind in "FI"}
        self.numbers: dict[Op, int] = {}
        self.sent = [[0] * ranks for _ in range(ranks)]
        self.used = [[0] * ranks for _ in range(ranks)]
        self.events = [(0.0, rank) for rank in range(ranks)]

    def run(self) -> Woven:
        """Return what comes out."""
        possible = True
        while self.events and possible:
            now, rank = heappop(self.events)
            if now < self.free_at[rank]:
                continue
            possible = now + self.left[rank] <= self.bound
            op = self._choose(rank, now)
            if op is not None:
                self._do(op, rank, now)
        steps = sum(map(len, self.order))
        if possible and steps == 3 * len(self.work.rank_of) * self.work.microbatches:
            return Woven(self.order, max(self.free_at), self.peak, steps)
        return Woven(None, inf, self.peak, steps)

    def _choose(self, rank: int, now: float) -> Op | None:
        chosen, first, soonest = -1, inf, inf
        heads, lines = self.heads[rank], self.lines[rank]
        for number, head in enumerate(heads):
            if head == len(lines[number]):
                continue
            priority, op = lines[number][head]
            if op.kind == "F" and self.held[rank] > self.room[op.stage]:
                continue
            ready = self._ready(op, rank)
            if ready > now:
                soonest = min(soonest, ready)
            elif priority < first:
                chosen, first = number, priority
        if chosen >= 0:
            heads[chosen] += 1
            return lines[chosen][heads[chosen] - 1][1]
        if (done := self.weights_done[rank]) < len(self.weights[rank]):
            op = self.weights[rank][done]
            if soonest - now >= self.patience * self.work.costs.weight[op.stage]:
                self.weights_done[rank] += 1
                return op
        return None

    def _ready(self, op: Op, rank: int) -> float:
        """Return when `op` can have its inputs, infinity if that is not known yet."""
        kind, stage, i = op
        near = stage - 1 if kind == "F" else stage + 1
        own = 0.0 if kind == "F" else self.ends["F"][stage][i]
        if not 0 <= near < len(self.work.rank_of):
            return own
        source, there = self.work.rank_of[near], self.ends[kind][near][i]
        if source == rank:
            return max(own, there)
        if there < inf and self.numbers[op] - self.used[source][rank] >= self.work.window:
            return inf
        return max(own, there + self.work.costs.send)

    def _do(self, op: Op, rank: int, now: float) -> None:
        work, (kind, stage, i) = self.work, op
        took = work.costs.of(op)
        self.free_at[rank] = end = now + took
        self.left[rank] -= took
        self.order[rank].append(op)
        heappush(self.events, (end, rank))
        if kind == "W":
            self.held[rank] -= work.after_input[stage]
            return
        self.ends[kind][stage][i] = end
        before, after = stage - 1, stage + 1
        if kind == "F":
            self.held[rank] += work.whole[stage]
            self.peak = max(self.peak, self.held[rank])
        else:
            self.held[rank] -= work.whole[stage] - work.after_input[stage]
            self.weights[rank].append(Op("W", stage, i))
            before, after = after, before
        if 0 <= before < len(work.rank_of) and (source := work.rank_of[before]) != rank:
            self.used[source][rank] += 1
        if 0 <= after < len(work.rank_of) and (to := work.rank_of[after]) != rank:
            self.numbers[Op(kind, after, i)] = self.sent[rank][to]
            self.sent[rank][to] += 1
            heappush(self.events, (end + work.costs.send, to))


def _repeated(name: str, p: int, m: int, *, hops: tuple[int, int], turn: int, peak: int) -> Schedule:
    """Return the schedule of a V-shaped block in units of one operation of half a rank's layers, six to an interval.

    `hops`: from one virtual stage to the next, forwards and backwards while going down the ranks, and the same while
    going up; `turn`: at the last rank. `peak`: the most that a rank holds, in (layers of one rank) x microbatches.
    """
    stages = 2 * p
    down, up = hops
    forward = [0.0]
    for stage in range(1, stages):
        forward.append(forward[-1] + (down if stage < p else turn if stage == p else up))
    backward = [forward[-1] + 1]
    for stage in reversed(range(stages - 1)):
        hop = down if stage >= p else turn if stage == p - 1 else up
        backward.append(backward[-1] + hop)
    block = Block(tuple(forward), tuple(reversed(backward)), 6.0)
    ones, halves = (1.0,) * stages, (0.5,) * stages
    work = Work(tuple(v_placement(p)), m, Costs(ones, ones, ones), halves, halves, peak)
    woven = weave(work, in_one_line(block.lines(work)))
    assert woven.order is not None  # the blocks fit into each other for every p, and then this memory suffices
    return chain(name, work.rank_of, m, woven.order)


def v_half(p: int, m: int) -> Schedule:
    """Zero-bubble schedule on a V with half the activations of 1F1B (arXiv 2405.15362); any m.

    Activations: at most min(m, p // 2 + 1) on any rank, in (layers of one rank) x microbatches, until W. Makespan for
    F = I = W = 1: at most 3 m + 1.5 (p-1) if m > p // 2 (half the bubble of 1F1B), else 3 m + 2 (p-1).
    """
    return _repeated("v-half", p, m, hops=(1, 2), turn=1, peak=p // 2 + 1)


def v_min(p: int, m: int) -> Schedule:
    """Zero-bubble schedule on a V with a third of the activations of 1F1B (arXiv 2405.15362); any m.

    Activations: at most min(m, (p+1) // 3 + 1) on any rank, in (layers of one rank) x microbatches, until W. Makespan
    for F = I = W = 1: 3 m + 2 (p-1) - 1/2 for p > 1, two thirds of the bubble of 1F1B.
    """
    # Where p is a multiple of 3 the operations of both directions would fall on the same units of time.
    return _repeated("v-min", p, m, hops=(1, 1), turn=1 if p % 3 else 3, peak=(p + 1) // 3 + 1)


__all__ = ["ROUNDING", "Block", "Lines", "Work", "Woven", "in_one_line", "v_half", "v_min", "weave"]
