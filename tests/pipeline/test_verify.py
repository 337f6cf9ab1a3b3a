"""The proof of schedules, against a machine that runs them as the executor would, and against every kind of damage."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.errors import ConfigError, ScheduleError
from sennit.pipeline.actions import with_reductions, with_sharding
from sennit.pipeline.fixed import FIXED, dualpipe, interleaved, one_f_one_b, zb_h1, zb_v
from sennit.pipeline.schedule import Item, Message, Op, Pair, Schedule, chain, fuse, ops_of, unfuse
from sennit.pipeline.verify import Proof, required_window, verify

SCHEDULES = [
    FIXED["gpipe"](2, 3),
    one_f_one_b(3, 5),
    zb_h1(3, 4),
    FIXED["zb-h2"](2, 4),
    zb_v(2, 4),
    zb_v(3, 5),
    dualpipe(4, 8),
    FIXED["dualpipev"](2, 4),
    unfuse(FIXED["dualpipev"](3, 6)),
    interleaved(2, 4, 3),
    fuse(interleaved(3, 6, extra_warmup=1)),
]
Orders = list[list[Item]]
schedules = st.sampled_from(SCHEDULES)


def orders_of(schedule: Schedule) -> Orders:
    return [list(items) for items in schedule.order]


# -- a machine that runs schedules -------------------------------------------------------------------------------------


class Machine:
    """Runs orders one item at a time, whichever rank comes next. Knows nothing of the verifier.

    Each directed pair of ranks has a line of messages in the order sent, of which the receiver can see those that have
    been sent and are among the `window` receives that it keeps posted.
    """

    def __init__(self, schedule: Schedule, window: int) -> None:
        self.schedule, self.window = schedule, window
        self.place = [0] * schedule.num_ranks
        self.done: set[Op] = set()
        self.sent: dict[tuple[int, int], list[Message]] = {channel: [] for channel in schedule.channels}
        self.used: dict[tuple[int, int], set[Message]] = {channel: set() for channel in schedule.channels}

    def finished(self) -> bool:
        return self.place == [len(items) for items in self.schedule.order]

    def unused(self, rank: int) -> int:
        """Messages that lie received and unused at `rank`."""
        return sum(len(self._received(channel) - self.used[channel]) for channel in self.sent if channel[1] == rank)

    def _received(self, channel: tuple[int, int]) -> set[Message]:
        return set(self.sent[channel][: len(self.used[channel]) + self.window])

    def step(self, rank: int) -> bool:
        """Run the next item of `rank`, if it has one and its inputs are there."""
        items = self.schedule.order[rank]
        if self.place[rank] == len(items):
            return False
        before = {channel: set(used) for channel, used in self.used.items()}
        ops = ops_of(items[self.place[rank]])
        if not all(self._take(op, rank) for op in ops):
            self.used = before
            return False
        for op in ops:
            self.done.add(op)
            message = self.schedule.message_of(op)
            if message is not None and (to := self.schedule.rank_of[message.stage]) != rank:
                self.sent[rank, to].append(message)
        self.place[rank] += 1
        return True

    def _take(self, op: Op, rank: int) -> bool:
        kind, stage, microbatch = op
        own = {"B": "F", "I": "F", "W": "I"}.get(kind)
        if own is not None and Op(own, stage, microbatch) not in self.done:
            return False
        maker = self.schedule.prev[stage] if kind == "F" else self.schedule.next[stage] if kind in ("B", "I") else None
        if maker is None:
            return True
        source = self.schedule.rank_of[maker]
        if source == rank:
            return any(Op(made, maker, microbatch) in self.done for made in ("F" if kind == "F" else "BI"))
        message = Message("F" if kind == "F" else "B", stage, microbatch)
        if message not in self._received((source, rank)):
            return False
        self.used[source, rank].add(message)
        return True


def run(schedule: Schedule, window: int, dice: random.Random) -> tuple[bool, list[int]]:
    """Run in random order. Return whether it came to its end, and the most unused messages seen at each rank."""
    machine, p = Machine(schedule, window), schedule.num_ranks
    seen = [0] * p
    while True:
        # Some rank is favoured for a while, so that ranks run far ahead of others.
        ranks = dice.sample(range(p), p)
        if not any(machine.step(rank) for rank in ranks):
            return machine.finished(), seen
        seen = [max(most, machine.unused(rank)) for rank, most in enumerate(seen)]


def worst_unused(schedule: Schedule, window: int, rank: int) -> int:
    """Return the most unused messages when all others run as far as they can before each item of `rank`."""
    machine, worst = Machine(schedule, window), 0
    while True:
        while any(machine.step(other) for other in range(schedule.num_ranks) if other != rank):
            pass
        worst = max(worst, machine.unused(rank))
        if not machine.step(rank):
            assert machine.finished()
            return worst


@given(schedules, st.integers(2, 5), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_proven_schedules_run_whatever_the_speeds(schedule: Schedule, window: int, dice: random.Random) -> None:
    proof = verify(schedule, window=window)
    finished, seen = run(schedule, window, dice)
    assert finished
    assert all(most <= bound for most, bound in zip(seen, proof.peak_messages, strict=True))


@pytest.mark.parametrize("window", [2, 3, 8])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_peak_messages_is_reached_in_the_worst_timing(schedule: Schedule, window: int) -> None:
    worst = tuple(worst_unused(schedule, window, rank) for rank in range(schedule.num_ranks))
    assert verify(schedule, window=window).peak_messages == worst


@given(schedules, st.integers(1, 3), st.data())
@settings(max_examples=200, deadline=None)
def test_reordered_schedules_are_proven_if_and_only_if_they_run(
    schedule: Schedule, window: int, data: st.DataObject
) -> None:
    """A few items moved within their ranks: the machine stops short if and only if the verifier refuses."""
    orders = orders_of(schedule)
    for _ in range(data.draw(st.integers(1, 4))):
        items = data.draw(st.sampled_from(orders))
        at = data.draw(st.integers(0, len(items) - 1))
        to = min(max(at + data.draw(st.integers(-4, 4)), 0), len(items) - 1)
        items.insert(to, items.pop(at))
    changed = schedule.with_order(orders)
    finished, _ = run(changed, window, random.Random(0))
    try:
        verify(changed, window=window)
    except ScheduleError:
        assert not finished
    else:
        assert finished


@given(schedules, st.data())
@settings(max_examples=100, deadline=None)
def test_required_window_is_the_smallest_that_works(schedule: Schedule, data: st.DataObject) -> None:
    """Orders in which each rank's forwards are shuffled within the room that the others leave."""
    orders = orders_of(schedule)
    for _ in range(6):
        items = data.draw(st.sampled_from(orders))
        at = data.draw(st.integers(0, len(items) - 2))
        items[at : at + 2] = items[at + 1], items[at]
    changed = schedule.with_order(orders)
    try:
        verify(changed, window=10**6)
    except ScheduleError:
        return
    window = required_window(changed)
    verify(changed, window=window)
    if window > 1:
        with pytest.raises(ScheduleError, match=f"The schedule needs window={window}"):
            verify(changed, window=window - 1)


# -- damage ------------------------------------------------------------------------------------------------------------


def drop(schedule: Schedule, draw: Callable) -> Orders:
    orders = orders_of(schedule)
    items = draw(st.sampled_from(orders))
    item = items.pop(draw(st.integers(0, len(items) - 1)))
    if isinstance(item, Pair) and draw(st.booleans()):
        items.append(draw(st.sampled_from(item)))  # only the other half is gone
    return orders


def duplicate(schedule: Schedule, draw: Callable) -> Orders:
    orders = orders_of(schedule)
    items = draw(st.sampled_from(orders))
    op = draw(st.sampled_from(ops_of(draw(st.sampled_from(items)))))
    items.insert(draw(st.integers(0, len(items))), op)
    return orders


def move_to_another_rank(schedule: Schedule, draw: Callable) -> Orders:
    orders = orders_of(schedule)
    source, target = draw(st.permutations(range(len(orders))))[:2]
    item = orders[source].pop(draw(st.integers(0, len(orders[source]) - 1)))
    orders[target].insert(draw(st.integers(0, len(orders[target]))), item)
    return orders


def change_kind(schedule: Schedule, draw: Callable) -> Orders:
    orders = orders_of(schedule)
    items = draw(st.sampled_from(orders))
    at = draw(st.integers(0, len(items) - 1))
    item = items[at]
    ops = list(ops_of(item))
    half = draw(st.integers(0, len(ops) - 1))
    kinds = [kind for kind in ("F", "B", "I", "W", "UNSHARD", "RESHARD", "REDUCE_GRAD", "X") if kind != ops[half].kind]
    ops[half] = ops[half]._replace(kind=draw(st.sampled_from(kinds)))
    items[at] = ops[0] if isinstance(item, Op) else Pair(*ops)
    return orders


def change_number(schedule: Schedule, draw: Callable) -> Orders:
    orders = orders_of(schedule)
    items = draw(st.sampled_from(orders))
    at = draw(st.integers(0, len(items) - 1))
    item = items[at]
    ops = list(ops_of(item))
    half = draw(st.integers(0, len(ops) - 1))
    field = draw(st.sampled_from(["stage", "microbatch"]))
    ops[half] = ops[half]._replace(**{field: getattr(ops[half], field) + draw(st.sampled_from([-20, -1, 1, 20]))})
    items[at] = ops[0] if isinstance(item, Op) else Pair(*ops)
    return orders


def swap_dependent(schedule: Schedule, draw: Callable) -> Orders:
    """Swap a forward with its backward, or a backward for inputs with its W."""
    orders = orders_of(schedule)
    items = draw(st.sampled_from(orders))
    at = {op: place for place, item in enumerate(items) for op in ops_of(item)}
    op = draw(st.sampled_from([op for op in at if op.kind in ("B", "I", "W")]))
    first = at[op._replace(kind={"B": "F", "I": "F", "W": "I"}[op.kind])]
    items[first], items[at[op]] = items[at[op]], items[first]
    return orders


def swap_around_another_rank(schedule: Schedule, draw: Callable) -> Orders:
    """Swap two of a microbatch's visits to a rank: each needs those before it, by way of other ranks or directly."""
    orders = orders_of(schedule)
    items = draw(st.sampled_from(orders))
    at = {op: place for place, item in enumerate(items) for op in ops_of(item) if op.kind in "FBI"}
    journeys = Counter(op.microbatch for op in at)
    microbatch = draw(st.sampled_from([i for i, count in journeys.items() if count > 1]))
    places = sorted({place for op, place in at.items() if op.microbatch == microbatch})
    first, second = sorted(draw(st.permutations(places))[:2])
    items[first], items[second] = items[second], items[first]
    return orders


DAMAGE = [
    drop,
    duplicate,
    move_to_another_rank,
    change_kind,
    change_number,
    swap_dependent,
    swap_around_another_rank,
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@given(schedule=schedules, data=st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_schedules_are_always_refused(damage: Callable, schedule: Schedule, data: st.DataObject) -> None:
    damaged = schedule.with_order(damage(schedule, data.draw))
    with pytest.raises(ScheduleError, match=f"^Schedule {re.escape(schedule.name)}"):
        verify(damaged, window=10**6)


# -- messages ----------------------------------------------------------------------------------------------------------


def f(stage: int, microbatch: int = 0) -> Op:
    return Op("F", stage, microbatch)


def b(stage: int, microbatch: int = 0) -> Op:
    return Op("B", stage, microbatch)


def line(*order: Sequence[Item], m: int = 1) -> Schedule:
    return chain("test", range(len(order)), m, order)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (line([f(0)]), "rank 0: virtual stage 0 does F for microbatch 0; it must do F, and then B or I and W"),
        (line([f(0), b(0), Op("W", 0, 0)]), "virtual stage 0 does F B W for microbatch 0"),
        (line([]), "virtual stage 0 does nothing for microbatch 0"),
        (line([f(0), f(0), b(0)]), "rank 0, item 2 of 3, 0F0: 0F0 has been done already, rank 0, item 1 of 3"),
        (line([f(0), b(0), f(0, 1)]), "item 3 of 3, 0F1: virtual stage 0 is visited by microbatches 0 only"),
        (line([f(0), b(0), f(3)]), "there is no virtual stage 3; they are 0 to 0"),
        (line([f(0), b(0)], [f(1), b(1), f(0)]), "rank 1, item 3 of 3, 0F0: virtual stage 0 is on rank 0"),
        (line([f(0), Op("Z", 0, 0)]), "unknown operation 'Z'; use one of F, B, I, W, UNSHARD, RESHARD, REDUCE_GRAD"),
        (line([b(0), f(0)]), "rank 0, item 1 of 2, 0B0: 0B0 needs 0F0, which comes at item 2; put 0F0 before it"),
        (line([Pair(f(0), b(0))]), "0B0 needs 0F0, which comes at item 1"),
        (line([f(0), Op("W", 0, 0), Op("I", 0, 0)]), "item 2 of 3, 0W0: 0W0 needs 0I0, which comes at item 3"),
        (line([Pair(b(0), f(0))]), "a pair is a forward F and a full backward B"),
        (line([f(0), b(0), Op("REDUCE_GRAD", 0, 0)]), "REDUCE_GRAD concerns parameters, not a microbatch"),
    ],
)
def test_messages_on_operations(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        verify(schedule)


UNSHARD, RESHARD, REDUCE = Op("UNSHARD", 0), Op("RESHARD", 0), Op("REDUCE_GRAD", 0)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([f(0), UNSHARD, b(0), RESHARD], "item 1 of 4, 0F0: 0F0 uses parameters that are not gathered"),
        ([UNSHARD, f(0), RESHARD, b(0)], "item 4 of 4, 0B0: 0B0 uses parameters that are not gathered"),
        ([UNSHARD, UNSHARD, f(0), b(0), RESHARD], "item 2 of 5, 0UNSHARD: virtual stage 0 has been gathered at item 1"),
        ([f(0), b(0), RESHARD], "item 3 of 3, 0RESHARD: virtual stage 0 is not gathered"),
        ([UNSHARD, f(0), b(0)], "item 1 of 3, 0UNSHARD: the parameters of virtual stage 0 are never freed"),
        ([f(0), REDUCE, b(0)], "item 3 of 3, 0B0: 0B0 adds to gradients that have been reduced at item 2"),
        ([f(0), Op("I", 0, 0), REDUCE, Op("W", 0, 0)], "0W0 adds to gradients that have been reduced at item 3"),
        ([f(0), b(0), REDUCE, REDUCE], "item 4 of 4, 0REDUCE_GRAD: the gradients of virtual stage 0 have been reduced"),
    ],
)
def test_messages_on_actions(order: list[Item], message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        verify(line(order))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank_of": (0, 3)}, "virtual stage 1 is on rank 3; ranks are 0 to 1"),
        ({"rank_of": ()}, "has 0 virtual stages on 2 ranks"),
        ({"param_of": (0,)}, "param_of has 1 entries for 2 virtual stages"),
        ({"prev": (None, 5)}, "prev of virtual stage 1 is 5; virtual stages are 0 to 1"),
        ({"prev": (None, None)}, "next of virtual stage 0 is 1, but virtual stage 1 leads back to None"),
        ({"next": (None, None)}, "prev of virtual stage 1 is 0, but virtual stage 0 leads back to None"),
        ({"prev": (1, 0), "next": (1, 0)}, "virtual stages [0, 1] follow each other in a circle"),
        ({"param_of": (1, 0)}, "the chain of virtual stages [0, 1] has the parts [1, 0] of the model"),
        ({"visits": ((0, 1), (0,))}, "microbatches 0 visit virtual stage 1 but 0, 1 the first of its chain"),
        ({"visits": ((0, 2), (0, 2))}, "microbatches 0, 2 must be numbered from 0 without gaps"),
        ({"visits": ((0, 0), (0, 0))}, "microbatch 0 visits the chain of virtual stage 0 and before that"),
    ],
)
def test_messages_on_structure(change: dict, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        verify(replace(one_f_one_b(2, 2), **change))


def test_both_directions_must_share_the_microbatches_out() -> None:
    schedule = dualpipe(2, 4)
    with pytest.raises(ScheduleError, match="microbatch 0 visits the chain of virtual stage 2 and before that"):
        verify(replace(schedule, visits=((0, 1), (0, 1), (0, 1), (0, 1))))


def test_a_deadlock_names_every_stuck_rank_and_what_it_waits_for() -> None:
    # Rank 0 wants the gradient of microbatch 0 before it sends microbatch 1; rank 1 wants microbatch 1 first.
    schedule = line([f(0), b(0), f(0, 1), b(0, 1)], [f(1), f(1, 1), b(1), b(1, 1)], m=2)
    with pytest.raises(ScheduleError) as caught:
        verify(schedule)
    assert str(caught.value).startswith(
        "Schedule test deadlocks, its ranks wait for each other: "
        "rank 0, item 2 of 4, 0B0 waits for virtual stage 1 on rank 1: the gradient of its B or I of microbatch 0; "
        "rank 1, item 2 of 4, 1F1 waits for virtual stage 0 on rank 0: the output of its F of microbatch 1."
    )


def test_fusing_can_deadlock() -> None:
    """A pair sends both results at its end, so the ranks of plain gpipe, fused, wait for each other."""
    with pytest.raises(ScheduleError, match=r"deadlocks.*rank 0, item 3 of 5, \(0F2;0B0\)OVERLAP_F_B waits for"):
        verify(fuse(FIXED["gpipe"](2, 3)))


def test_a_message_out_of_turn_needs_a_wider_window() -> None:
    first = [op(0, i) for op in (f, b) for i in range(4)]
    second = [*(f(1, i) for i in (2, 0, 1, 3)), *(b(1, i) for i in range(4))]
    schedule = line(first, second, m=4)
    assert required_window(schedule) == 3
    assert verify(schedule, window=3).num_messages == 8
    with pytest.raises(ScheduleError) as caught:
        verify(schedule, window=2)
    assert "rank 1, item 1 of 8, 1F2: it needs message 3 from rank 0 while 2 sent before that are" in str(caught.value)
    assert "The schedule needs window=3." in str(caught.value)


def test_one_rank_needs_no_messages() -> None:
    schedule = one_f_one_b(1, 3)
    assert required_window(schedule) == 1
    assert verify(schedule, window=1) == Proof((1.0,), (0,), (1.0,), 0)


def test_memory_in_the_caller_s_unit() -> None:
    schedule = zb_h1(2, 4)
    assert verify(schedule).peak_activations == (2.0, 2.0)
    # 10 bytes a forward on rank 0, 6 on rank 1; a backward for inputs leaves 1 of them.
    proof = verify(schedule, activation=(10, 6), after_input=(1, 1), memory_limit=20)
    assert proof.peak_activations == (20, 7)
    with pytest.raises(ScheduleError, match="item 2 of 12, 0F1: it holds activations of 20, .*=15; .* needs 20"):
        verify(schedule, activation=(10, 6), after_input=(1, 1), memory_limit=15)
    # A limit is met however its sum is rounded: here 15 thirds.
    thirds = interleaved(4, 8, 3)
    assert verify(thirds, memory_limit=5 * (1 - 1e-12)).peak_activations[0] == pytest.approx(5)
    # Without `after_input` all of it is held until W.
    assert verify(schedule, activation=(10, 6)).peak_activations == (20, 12)


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match="window=0"):
        verify(one_f_one_b(2, 2), window=0)
    with pytest.raises(ConfigError, match="activation has 3 and after_input 3 entries; give one for each of the 2"):
        verify(one_f_one_b(2, 2), activation=(1, 1, 1))


def test_proof_of_1f1b() -> None:
    proof = verify(one_f_one_b(4, 8))
    assert proof.peak_activations == (4.0, 3.0, 2.0, 1.0)
    assert proof.parameter_copies == (1.0,) * 4
    assert proof.num_messages == 2 * 3 * 8


def test_bidirectional_pipelines_hold_two_copies() -> None:
    assert verify(dualpipe(4, 8)).parameter_copies == (2.0,) * 4


def test_actions_change_nothing_of_the_proof() -> None:
    schedule = FIXED["dualpipev"](3, 6)
    assert verify(with_sharding(with_reductions(schedule), keep=False)) == verify(schedule)
