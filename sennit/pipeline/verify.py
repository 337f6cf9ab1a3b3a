"""Proof that a schedule can run to its end, found in milliseconds before anything runs.

Each rank works through its own order. Results travel over one channel for each directed pair of ranks, in the order in
which the sender produces them. A receiver posts `window` receives ahead in that same order; sends never block. So a
schedule runs to its end if and only if

- every virtual stage does each of its microbatches completely and once, on its rank, and in an order that respects
  what depends on what within the rank (`_check_operations`, `_check_dataflow`, `_check_actions`);
- the orders of the ranks have no circle of waiting between them (`_replay`);
- every message is among the first `window` unused ones of its channel when it is needed (`_check_window`).

The replay keeps vector clocks (Mattern 1989): with each message goes the number of items of every rank that must have
run before it can exist. That bounds how early a message can arrive however fast or slow the ranks are, and with it how
many can lie unused at a receiver.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple

from sennit.errors import ConfigError, ScheduleError
from sennit.pipeline.schedule import ACTIONS, COMPUTE, Message, Op, Pair, Schedule, ops_of
from sennit.pipeline.simulate import activation_curve


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known of a schedule that has been verified.

    `peak_activations`: by rank, the most that it holds at once, in (layers of one rank) x microbatches or the caller's
    unit. `peak_messages`: by rank, the most messages that can be received and not yet used, whatever the speeds of the
    ranks. `parameter_copies`: by rank, its parameters in units of L / p layers. `num_messages`: between ranks, a step.
    """

    peak_activations: tuple[float, ...]
    peak_messages: tuple[int, ...]
    parameter_copies: tuple[float, ...]
    num_messages: int


_ROUNDING = 1e-9
"""Relative error allowed to sums of activations: thirds of a rank's layers do not add up exactly."""


class _Use(NamedTuple):
    """How the receiver of a message uses it.

    `place` in its order; how many of the channel it has `used_before`; the first place where it can have arrived.
    """

    place: int
    used_before: int
    arrives: int

    def depth(self, index: int) -> int:
        """Return how many receives must be posted for message number `index` of its channel to be among them."""
        return index - self.used_before + 1


def verify(
    schedule: Schedule,
    *,
    window: int = 4,
    activation: Sequence[float] | None = None,
    after_input: Sequence[float] | None = None,
    memory_limit: float | None = None,
) -> Proof:
    """Return the proof that `schedule` runs to its end with `window` receives posted ahead on each channel.

    `activation`: what a forward keeps, by virtual stage, in any unit; the default is the layers of one rank as 1.
    `after_input`: the part of it that a backward for inputs leaves for W; by default all of it.
    `memory_limit`: the most that a rank may hold, in that unit.

    Raises ScheduleError for the schedule, ConfigError for the other arguments.
    """
    if window < 1:
        raise ConfigError(f"window={window}: a rank must post at least 1 receive ahead; use 1 or more.")
    _check_structure(schedule)
    _check_dataflow(schedule, _check_operations(schedule))
    _check_actions(schedule)
    uses = _replay(schedule)
    _check_window(schedule, uses, window)
    whole = (schedule.share,) * schedule.num_stages if activation is None else activation
    late = whole if after_input is None else after_input
    if len(whole) != schedule.num_stages or len(late) != schedule.num_stages:
        raise ConfigError(
            f"activation has {len(whole)} and after_input {len(late)} entries; give one for each of the "
            f"{schedule.num_stages} virtual stages."
        )
    peaks = _peak_activations(schedule, whole, late, inf if memory_limit is None else memory_limit)
    return Proof(
        peak_activations=peaks,
        peak_messages=_peak_messages(schedule, uses, window),
        parameter_copies=tuple(
            len({schedule.param_of[stage] for stage in schedule.stages_of(rank)}) * schedule.share
            for rank in range(schedule.num_ranks)
        ),
        num_messages=sum(map(len, schedule.channels.values())),
    )


def required_window(schedule: Schedule) -> int:
    """Return the fewest receives, at least 1, that ranks must post ahead on each channel.

    Raises ScheduleError if the schedule cannot run with any.
    """
    _check_structure(schedule)
    _check_dataflow(schedule, _check_operations(schedule))
    return _widest(schedule, _replay(schedule))


def _needed(schedule: Schedule, op: Op) -> tuple[Message, int] | None:
    """Return the message that `op` takes in and the virtual stage that makes it, or None."""
    kind, stage, microbatch = op
    maker = schedule.prev[stage] if kind == "F" else schedule.next[stage] if kind in ("B", "I") else None
    return None if maker is None else (Message("F" if kind == "F" else "B", stage, microbatch), maker)


def _error(schedule: Schedule, rank: int, place: int, problem: str) -> ScheduleError:
    return ScheduleError(f"Schedule {schedule.name}, {_at(schedule, rank, place)}: {problem}")


def _at(schedule: Schedule, rank: int, place: int) -> str:
    items = schedule.order[rank]
    return f"rank {rank}, item {place + 1} of {len(items)}, {items[place]}"


# -- structure ---------------------------------------------------------------------------------------------------------


def _check_structure(schedule: Schedule) -> None:
    """Check that virtual stages form chains, each of which is the whole model, on ranks that exist."""
    n, p = schedule.num_stages, schedule.num_ranks
    name = f"Schedule {schedule.name}"
    if n == 0 or p == 0:
        raise ScheduleError(f"{name} has {n} virtual stages on {p} ranks; it needs at least one of both.")
    for field in ("prev", "next", "param_of", "visits"):
        if (length := len(getattr(schedule, field))) != n:
            raise ScheduleError(f"{name}: {field} has {length} entries for {n} virtual stages; give one for each.")
    for stage, rank in enumerate(schedule.rank_of):
        if not 0 <= rank < p:
            raise ScheduleError(f"{name}: virtual stage {stage} is on rank {rank}; ranks are 0 to {p - 1}.")
    _check_neighbours(schedule, "prev", schedule.prev, schedule.next)
    _check_neighbours(schedule, "next", schedule.next, schedule.prev)
    _check_chains(schedule)


def _check_neighbours(schedule: Schedule, field: str, near: Sequence[int | None], back: Sequence[int | None]) -> None:
    for stage, other in enumerate(near):
        if other is None:
            continue
        if not 0 <= other < schedule.num_stages:
            raise ScheduleError(
                f"Schedule {schedule.name}: {field} of virtual stage {stage} is {other}; virtual stages are 0 to "
                f"{schedule.num_stages - 1}."
            )
        if back[other] != stage:
            raise ScheduleError(
                f"Schedule {schedule.name}: {field} of virtual stage {stage} is {other}, but virtual stage "
                f"{other} leads back to {back[other]}; prev and next must be inverse of each other."
            )


def _check_chains(schedule: Schedule) -> None:
    name = f"Schedule {schedule.name}"
    reached: set[int] = set()
    taken: dict[int, int] = {}
    for start in (stage for stage, before in enumerate(schedule.prev) if before is None):
        chain, following = [start], schedule.next[start]
        while following is not None:
            chain.append(following)
            following = schedule.next[following]
        reached.update(chain)
        parts = [schedule.param_of[stage] for stage in chain]
        if parts != list(range(schedule.num_parts)):
            raise ScheduleError(
                f"{name}: the chain of virtual stages {chain} has the parts {parts} of the model; each chain must run "
                f"through all {schedule.num_parts} parts, 0 first."
            )
        for stage in chain:
            if schedule.visits[stage] != schedule.visits[start]:
                raise ScheduleError(
                    f"{name}: microbatches {_span(schedule.visits[stage])} visit virtual stage {stage} but "
                    f"{_span(schedule.visits[start])} the first of its chain, {start}; they must be the same."
                )
        for microbatch in schedule.visits[start]:
            if microbatch in taken:
                raise ScheduleError(
                    f"{name}: microbatch {microbatch} visits the chain of virtual stage {start} and before that the "
                    f"chain of virtual stage {taken[microbatch]}; each goes through the model once."
                )
            taken[microbatch] = start
    if circle := sorted(set(range(schedule.num_stages)) - reached):
        raise ScheduleError(f"{name}: virtual stages {circle} follow each other in a circle; a chain must have ends.")
    if taken.keys() != set(range(len(taken))):
        raise ScheduleError(f"{name}: microbatches {_span(sorted(taken))} must be numbered from 0 without gaps.")


# -- operations of one rank --------------------------------------------------------------------------------------------


def _check_operations(schedule: Schedule) -> dict[Op, tuple[int, int]]:
    """Check that every rank does its computations completely and once. Return (rank, place) of each."""
    visits = [frozenset(microbatches) for microbatches in schedule.visits]
    found: dict[Op, tuple[int, int]] = {}
    for rank, items in enumerate(schedule.order):
        for place, item in enumerate(items):
            if isinstance(item, Pair) and (item.forward.kind, item.backward.kind) != ("F", "B"):
                raise _error(schedule, rank, place, "a pair is a forward F and a full backward B.")
            for op in ops_of(item):
                problem = _problem(schedule, visits, rank, op)
                if problem is None and op in found:
                    problem = f"{op} has been done already, {_at(schedule, *found[op])}."
                if problem is not None:
                    raise _error(schedule, rank, place, problem)
                if op.kind in COMPUTE:
                    found[op] = rank, place
    for stage, microbatches in enumerate(schedule.visits):
        for microbatch in microbatches:
            kinds = "".join(kind for kind in COMPUTE if Op(kind, stage, microbatch) in found)
            if kinds not in ("FB", "FIW"):
                raise ScheduleError(
                    f"Schedule {schedule.name}, rank {schedule.rank_of[stage]}: virtual stage {stage} does "
                    f"{' '.join(kinds) or 'nothing'} for microbatch {microbatch}; it must do F, and then B or I and W."
                )
    return found


def _problem(schedule: Schedule, visits: Sequence[frozenset[int]], rank: int, op: Op) -> str | None:
    """Return what is wrong with `op` by itself on `rank`."""
    if op.kind not in COMPUTE and op.kind not in ACTIONS:
        return f"unknown operation {op.kind!r}; use one of {', '.join(COMPUTE + ACTIONS)}."
    if not 0 <= op.stage < schedule.num_stages:
        return f"there is no virtual stage {op.stage}; they are 0 to {schedule.num_stages - 1}."
    if schedule.rank_of[op.stage] != rank:
        return f"virtual stage {op.stage} is on rank {schedule.rank_of[op.stage]}; {op} belongs there."
    if op.kind in ACTIONS:
        return None if op.microbatch == -1 else f"{op.kind} concerns parameters, not a microbatch; leave that at -1."
    if op.microbatch not in visits[op.stage]:
        return f"virtual stage {op.stage} is visited by microbatches {_span(schedule.visits[op.stage])} only."
    return None


def _span(numbers: Sequence[int]) -> str:
    """Return `0 to 7` for consecutive numbers, else all of them."""
    whole = len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers)) or "none"


def _check_dataflow(schedule: Schedule, found: Mapping[Op, tuple[int, int]]) -> None:
    """Check that F comes before B or I, and I before W: not in the same pair either."""
    before = {"B": "F", "I": "F", "W": "I"}
    for op, (rank, place) in found.items():
        if op.kind in before:
            first = op._replace(kind=before[op.kind])
            at = found[first][1]
            if at >= place:
                problem = f"{op} needs {first}, which comes at item {at + 1}; put {first} before it."
                raise _error(schedule, rank, place, problem)


def _check_actions(schedule: Schedule) -> None:
    """Check that parameters are gathered while they are used, and gradients reduced once, when they are complete."""
    for rank, items in enumerate(schedule.order):
        sharded = {item.stage for item in items if isinstance(item, Op) and item.kind == "UNSHARD"}
        gathered: dict[int, int] = {}
        reduced: dict[int, int] = {}
        for place, item in enumerate(items):
            for op in ops_of(item):
                problem = _step_action(op, place, sharded, gathered, reduced)
                if problem is not None:
                    raise _error(schedule, rank, place, problem)
        for stage, place in gathered.items():
            problem = f"the parameters of virtual stage {stage} are never freed; end with RESHARD."
            raise _error(schedule, rank, place, problem)


def _step_action(
    op: Op, place: int, sharded: set[int], gathered: dict[int, int], reduced: dict[int, int]
) -> str | None:
    """Follow `op` in what is gathered and reduced (stage -> place) and return what is wrong with it."""
    kind, stage, _ = op
    if kind == "UNSHARD":
        if stage in gathered:
            return f"virtual stage {stage} has been gathered at item {gathered[stage] + 1}; RESHARD it before."
        gathered[stage] = place
    elif kind == "RESHARD":
        if gathered.pop(stage, None) is None:
            return f"virtual stage {stage} is not gathered; an UNSHARD must come before."
    elif kind == "REDUCE_GRAD":
        if stage in reduced:
            return f"the gradients of virtual stage {stage} have been reduced at item {reduced[stage] + 1}; do it once."
        reduced[stage] = place
    elif stage in sharded and stage not in gathered:
        return f"{op} uses parameters that are not gathered; put it between {stage}UNSHARD and {stage}RESHARD."
    elif kind in ("B", "W") and stage in reduced:
        return f"{op} adds to gradients that have been reduced at item {reduced[stage] + 1}; reduce after the last."
    return None


# -- between ranks -----------------------------------------------------------------------------------------------------


def _replay(schedule: Schedule) -> dict[Message, _Use]:
    """Run the orders. Return how each message between ranks is used. Raises ScheduleError on a deadlock."""
    p, rank_of = schedule.num_ranks, schedule.rank_of
    clocks = [[0] * p for _ in range(p)]  # items run of each rank, as far as a rank knows; of itself exactly
    sent: dict[Message, tuple[int, ...]] = {}
    waiting: dict[Message, int] = {}
    uses: dict[Message, _Use] = {}
    used = [[0] * p for _ in range(p)]
    todo = list(range(p))
    while todo:
        rank = todo.pop()
        clock, items = clocks[rank], schedule.order[rank]
        while clock[rank] < len(items):
            place = clock[rank]
            ops = ops_of(items[place])
            needed = [need for op in ops if (need := _needed(schedule, op)) is not None]
            missing = next((message for message, _ in needed if message not in sent), None)
            if missing is not None:
                waiting[missing] = rank
                break
            for message, maker in needed:
                source = rank_of[maker]
                if source != rank:
                    uses[message] = _Use(place, used[rank][source], arrives=sent[message][rank])
                    used[rank][source] += 1
                    clock[:] = map(max, clock, sent[message])
            clock[rank] += 1
            for op in ops:
                message = schedule.message_of(op)
                if message is not None:
                    sent[message] = tuple(clock)
                    if message in waiting:
                        todo.append(waiting.pop(message))
    if waiting:
        raise ScheduleError(_deadlock(schedule, [clock[rank] for rank, clock in enumerate(clocks)], sent.keys()))
    return uses


def _deadlock(schedule: Schedule, places: Sequence[int], sent: Collection[Message]) -> str:
    """Describe where each stuck rank stands and what it waits for."""
    stuck = []
    for rank, place in enumerate(places):
        items = schedule.order[rank]
        if place == len(items):
            continue
        needs = [need for op in ops_of(items[place]) if (need := _needed(schedule, op)) is not None]
        message, maker = next(need for need in needs if need[0] not in sent)
        what = "output of its F" if message.what == "F" else "gradient of its B or I"
        stuck.append(
            f"{_at(schedule, rank, place)} waits for virtual stage {maker} on rank {schedule.rank_of[maker]}: the "
            f"{what} of microbatch {message.microbatch}"
        )
    return (
        f"Schedule {schedule.name} deadlocks, its ranks wait for each other: {'; '.join(stuck)}. Move one of these "
        f"items behind what the others wait for."
    )


def _widest(schedule: Schedule, uses: Mapping[Message, _Use]) -> int:
    """Return the smallest window that works."""
    return max(
        (uses[message].depth(index) for queue in schedule.channels.values() for index, message in enumerate(queue)),
        default=1,
    )


def _check_window(schedule: Schedule, uses: Mapping[Message, _Use], window: int) -> None:
    for (source, rank), queue in schedule.channels.items():
        for index, message in enumerate(queue):
            use = uses[message]
            if use.depth(index) > window:
                raise _error(
                    schedule,
                    rank,
                    use.place,
                    f"it needs message {index + 1} from rank {source} while {index - use.used_before} sent before that "
                    f"are still unused, so {use.depth(index)} receives must be posted ahead; window={window} is too "
                    f"small. The schedule needs window={_widest(schedule, uses)}.",
                )


def _peak_messages(schedule: Schedule, uses: Mapping[Message, _Use], window: int) -> tuple[int, ...]:
    """Return, by rank, the most messages that have arrived and are unused before an item takes its inputs.

    At every place of a rank there is a timing at which all that can have arrived has: the other ranks run as far as
    they can while it stands there.
    """
    changes = [[0] * (len(items) + 1) for items in schedule.order]
    for (_, rank), queue in schedule.channels.items():
        places = sorted(uses[message].place for message in queue)
        for index, message in enumerate(queue):
            use = uses[message]
            posted = places[index - window] + 1 if index >= window else 0
            changes[rank][min(max(use.arrives, posted), use.place)] += 1
            changes[rank][use.place + 1] -= 1
    return tuple(max(accumulate(change)) for change in changes)


# -- memory ------------------------------------------------------------------------------------------------------------


def _peak_activations(
    schedule: Schedule, whole: Sequence[float], after_input: Sequence[float], limit: float
) -> tuple[float, ...]:
    curves = [
        activation_curve(schedule, rank, whole=whole, after_input=after_input) for rank in range(schedule.num_ranks)
    ]
    peaks = tuple(max(curve, default=0.0) for curve in curves)
    for rank, curve in enumerate(curves):
        place = next((place for place, held in enumerate(curve) if held > limit * (1 + _ROUNDING)), None)
        if place is not None:
            raise _error(
                schedule,
                rank,
                place,
                f"it holds activations of {curve[place]:g}, more than memory_limit={limit:g}; the schedule needs "
                f"{max(peaks):g}.",
            )
    return peaks


__all__ = ["Proof", "required_window", "verify"]
