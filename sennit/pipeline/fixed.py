"""Hand-made schedules: the compute order of each rank in closed form.

p ranks, m microbatches, v virtual stages a rank. Formulas for their bubbles and activation memory: `formulas`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sennit.pipeline.schedule import Item, Op, Pair, Schedule, chain


def loop_placement(p: int, v: int) -> list[int]:
    """Virtual stage s on rank s mod p: the pipeline runs around the ranks v times."""
    return [stage % p for stage in range(p * v)]


def v_placement(p: int) -> list[int]:
    """Virtual stages 0..p-1 down the ranks and p..2p-1 up again: first and last stage are on rank 0."""
    return [*range(p), *reversed(range(p))]


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965)."""
    order = [[Op(kind, rank, i) for kind in "FB" for i in range(m)] for rank in range(p)]
    return chain("gpipe", loop_placement(p, 1), m, order)


def one_f_one_b(p: int, m: int) -> Schedule:
    """One forward, one backward in turn after p-1-r forwards of warm-up (PipeDream-Flush, arXiv 2006.09503)."""
    order = []
    for rank in range(p):
        warm = min(m, p - 1 - rank)
        items: list[Item] = [Op("F", rank, i) for i in range(warm)]
        for i in range(m - warm):
            items += [Op("F", rank, warm + i), Op("B", rank, i)]
        order.append(items + [Op("B", rank, i) for i in range(m - warm, m)])
    return chain("1f1b", loop_placement(p, 1), m, order)


def interleaved(p: int, m: int, v: int = 2, *, extra_warmup: int = 0) -> Schedule:
    """1F1B over v chunks of layers a rank (arXiv 2104.04473); m must be a multiple of p.

    `extra_warmup`: additional forwards before the first backward. With one, each forward and the backward after it are
    of different microbatches and can be paired (`fuse`).
    """
    total = m * v
    order = []
    for rank in range(p):
        warm = min(total, 2 * (p - 1 - rank) + (v - 1) * p + extra_warmup)

        def forward(k: int, rank: int = rank) -> Op:
            return Op("F", k // p % v * p + rank, k // (p * v) * p + k % p)

        def backward(k: int, rank: int = rank) -> Op:
            return Op("B", (v - 1 - k // p % v) * p + rank, k // (p * v) * p + k % p)

        items: list[Item] = [forward(k) for k in range(warm)]
        for k in range(total - warm):
            items += [forward(warm + k), backward(k)]
        order.append(items + [backward(k) for k in range(total - warm, total)])
    return chain("interleaved", loop_placement(p, v), m, order)


def _zb_h(name: str, p: int, m: int, slope: int) -> Schedule:
    """1F1B with split backwards: slope * (p-1-r) forwards of warm-up, and the weight gradients of rank r `slope * r`
    microbatches behind. In the cool-down one of them fills each gap."""
    order = []
    for rank in range(p):
        warm = min(m, slope * (p - 1 - rank))
        items: list[Item] = [Op("F", rank, i) for i in range(warm)]
        waiting: deque[int] = deque()
        for i in range(m):
            if warm + i < m:
                items.append(Op("F", rank, warm + i))
            items.append(Op("I", rank, i))
            waiting.append(i)
            if warm + i >= m or len(waiting) > slope * rank:
                items.append(Op("W", rank, waiting.popleft()))
        order.append(items + [Op("W", rank, i) for i in waiting])
    return chain(name, loop_placement(p, 1), m, order)


def zb_h1(p: int, m: int) -> Schedule:
    """Zero bubble with the memory of 1F1B (arXiv 2401.10241)."""
    return _zb_h("zb-h1", p, m, 1)


def zb_h2(p: int, m: int) -> Schedule:
    """Zero bubble with twice the memory of 1F1B: no rank waits between its first and its last operation."""
    return _zb_h("zb-h2", p, m, 2)


def zb_v(p: int, m: int) -> Schedule:
    """Zero bubble on a V with the memory of 1F1B (arXiv 2405.15362); m must be at least 2p - 1.

    Rank r holds virtual stages r (down) and 2p-1-r (up). It starts with enough downward forwards that the first
    upward one arrives without a wait, keeps both directions going, and moves weight gradients into the cool-down.
    """
    order = []
    for rank in range(p):
        track = _Track(rank, 2 * p - 1 - rank)
        for _ in range(2 * (p - rank) - 1):
            track.forward(0)
        for _ in range(rank):
            track.forward(1)
            track.forward(0)
        for _ in range(p - rank):
            track.forward(1)
            track.split(1)
            track.weights(1)
        while track.next["F", 1] < m:
            if track.next["F", 0] < m:
                track.forward(0)
            track.split(0)
            track.weights(0)
            track.forward(1)
            track.split(1)
            track.weights(1)
        for _ in range(rank):
            track.split(0)
            track.split(1)
        for _ in range(p - rank):
            track.split(0)
            track.weights(0)
        for half in (1, 0):
            while track.next["W", half] < m:
                track.weights(half)
        order.append(track.items)
    return chain("zb-v", v_placement(p), m, order)


class _Track:
    """The order of one rank under construction: two virtual stages, each of which takes its microbatches in turn."""

    def __init__(self, first: int, second: int, start: tuple[int, int] = (0, 0)) -> None:
        self.items: list[Item] = []
        self.stages = (first, second)
        self.next = {(kind, half): start[half] for kind in "FBW" for half in (0, 1)}
        self.waiting: deque[Op] = deque()

    def _op(self, kind: str, half: int) -> Op:
        counter = ("B" if kind == "I" else kind, half)
        microbatch = self.next[counter]
        self.next[counter] += 1
        return Op(kind, self.stages[half], microbatch)

    def forward(self, half: int) -> None:
        self.items.append(self._op("F", half))

    def backward(self, half: int) -> None:
        self.items.append(self._op("B", half))
        self.next["W", half] += 1

    def split(self, half: int) -> None:
        self.items.append(self._op("I", half))

    def weights(self, half: int) -> None:
        self.items.append(self._op("W", half))

    def split_later(self, half: int) -> None:
        """Backward for inputs; its weight gradients wait in line for `waiting_weights`."""
        op = self._op("I", half)
        self.items.append(op)
        self.waiting.append(Op("W", op.stage, op.microbatch))

    def waiting_weights(self) -> None:
        self.items.append(self.waiting.popleft())

    def pair(self, forward: int, backward: int) -> None:
        f = self._op("F", forward)
        self.items.append(Pair(f, self._op("B", backward)))


def _dual(track: _Track, depth: int, distance: int, count: int) -> list[Item]:
    """Fill in the eight phases of DualPipe (arXiv 2412.19437, fig. 5; DualPipeV of the same authors).

    `depth`: ranks from an end to the middle (the turning point); `distance`: of this rank from that end; `count`:
    microbatches of each direction.
    """
    t, inner = track, depth - distance - 1
    for _ in range(2 * inner):
        t.forward(0)
    for _ in range(distance + 1):
        t.forward(0)
        t.forward(1)
    for _ in range(inner):
        t.split_later(1)
        t.waiting_weights()
        t.forward(1)
    for i in range(count - 2 * depth + distance + 1):
        if i == 0 and inner == 0:  # the forward has only just ended; its backward cannot run beside it
            t.forward(0)
            t.backward(1)
        else:
            t.pair(0, 1)
        t.pair(1, 0)
    for _ in range(inner):
        t.backward(1)
        t.pair(1, 0)
    half = (distance + 1) // 2
    for i in range(distance + 1):
        # The second half of these backwards leaves its weight gradients for later.
        late_first = i > half or (i == half and distance % 2 == 1)
        late_second = i >= half
        t.split_later(1) if late_first else t.backward(1)
        t.split_later(0) if late_second else t.backward(0)
    for _ in range(inner):
        t.waiting_weights()
        t.split_later(0)
    for _ in range(distance + 1):
        t.waiting_weights()
    assert not t.waiting
    return t.items


def dualpipe_v(p: int, m: int) -> Schedule:
    """DualPipe folded into a V: one copy of the parameters; m must be at least 2p."""
    order = [_dual(_Track(rank, 2 * p - 1 - rank), p, rank, m) for rank in range(p)]
    return chain("dualpipev", v_placement(p), m, order)


def dualpipe(p: int, m: int) -> Schedule:
    """Bidirectional pipeline (arXiv 2412.19437): p even, m even and at least 2p.

    Virtual stage s runs on rank s for the first half of the microbatches, p + s on rank p-1-s for the second half,
    with the same parameters: every rank holds two parts of the model.
    """
    half = m // 2
    order = []
    for rank in range(p):
        down, up = rank, p + (p - 1 - rank)
        upper = rank >= p // 2
        stages, start = ((up, down), (half, 0)) if upper else ((down, up), (0, half))
        track = _Track(*stages, start=start)
        order.append(_dual(track, p // 2, min(rank, p - 1 - rank), half))
    begins = [0, p]
    prev = tuple(None if stage in begins else stage - 1 for stage in range(2 * p))
    following = tuple(None if stage + 1 in (p, 2 * p) else stage + 1 for stage in range(2 * p))
    first, second = tuple(range(half)), tuple(range(half, m))
    return Schedule(
        "dualpipe",
        tuple(v_placement(p)),
        prev,
        following,
        tuple(stage % p for stage in range(2 * p)),
        (first,) * p + (second,) * p,
        tuple(tuple(items) for items in order),
    )


FIXED: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe": dualpipe,
    "dualpipev": dualpipe_v,
}
"""Generators that take p and m alone. `interleaved` takes v too."""

__all__ = [
    "FIXED",
    "dualpipe",
    "dualpipe_v",
    "gpipe",
    "interleaved",
    "loop_placement",
    "one_f_one_b",
    "v_placement",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
