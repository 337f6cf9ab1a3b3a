"""Runs a schedule on this rank: the computations in their order, the sends and receives that follow from it.

A rank posts the receives of each incoming channel in the sender's order, a few ahead (`window`). It sends each result
as soon as it exists and lets go of it when it has left. Nothing else about communication is decided here, so there is
nothing to get wrong: the verifier has proven that the order runs to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sennit.errors import SennitError
from sennit.nn import Segment
from sennit.ops.weight_queue import WeightQueue, deferring
from sennit.pipeline.channels import BufferPool, Channels, Outbox, TensorSpec
from sennit.pipeline.overlap import Tape, zipped
from sennit.pipeline.schedule import ACTIONS, Item, Message, Op, Pair, Schedule, ops_of
from sennit.pipeline.simulate import Event

WINDOW = 4
"""Receives that a rank posts ahead on each channel."""

Tensors = tuple[Tensor, ...]


class PipelineError(SennitError):
    """An operation of a schedule failed; the message says which, on which rank and where in its order."""

    exit_code = 1


class Stage(Protocol):
    """What a virtual stage does with a microbatch."""

    def forward(self, microbatch: int, inputs: Tensors) -> Tensors:
        """Return the tensors for the next stage, or (loss,). `inputs`: those of the stage before; () for the first."""
        ...

    def input_specs(self, microbatch: int) -> tuple[TensorSpec, ...]:
        """Return what comes from the stage before."""
        ...

    def output_specs(self, microbatch: int) -> tuple[TensorSpec, ...]:
        """Return what goes to the stage behind."""
        ...

    def segments(self, microbatch: int) -> list[Segment]:
        """Return `forward` as segments. Needed only where a forward and a backward overlap."""
        ...


@dataclass(slots=True)
class _Pass:
    """What a forward leaves for its backward: its inputs (leaves), where gradients enter its outputs, and the buffers
    that its inputs live in. Under overlap, the tape of its segments instead."""

    inputs: Tensors
    outputs: list[Any]
    buffers: list[Tensor]
    tape: Tape | None = None


@dataclass(slots=True)
class _Later:
    """Weight gradients put off until W, and the buffers that they may read."""

    queue: WeightQueue = field(default_factory=WeightQueue)
    buffers: list[Tensor] = field(default_factory=list)


class Executor:
    """Executes one rank's part of a schedule, any number of times.

    `stages`: this rank's virtual stages. `action(op)` does what ACTIONS of the schedule ask for. `overlap`: run the two
    operations of a pair segment by segment, each side's communication beside the other's computation; without it they
    run one after the other. `record`: keep the start (after the wait for its inputs) and the end of each item in `events`,
    seconds from the step's start.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Stage],
        channels: Channels | None,
        *,
        device: torch.device = torch.device("cpu"),
        window: int = WINDOW,
        action: Callable[[Op], None] | None = None,
        overlap: bool = False,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self.schedule, self.rank, self.stages = schedule, rank, dict(stages)
        self.window, self.overlap, self.record = window, overlap, False
        self.events: list[Event] = []
        self._waited = 0.0
        self._channels, self._device = channels, device
        self._action, self._synchronize = action, synchronize
        self._order = schedule.order[rank]
        self._incoming = {source: queue for (source, to), queue in schedule.channels.items() if to == rank}
        self._pool = BufferPool(device)
        self._outbox = Outbox(channels)
        self._reset()

    def _reset(self) -> None:
        self.losses: dict[int, Tensor] = {}
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._later: dict[tuple[int, int], _Later] = {}
        self._here: dict[Message, Tensors] = {}
        self._posted: dict[Message, tuple[list[Tensor], list[Any], int]] = {}
        self._next_post = dict.fromkeys(self._incoming, 0)
        self._waiting = dict.fromkeys(self._incoming, 0)

    def step(self) -> dict[int, Tensor]:
        """Run the order once and return the losses by microbatch (on the ranks that hold a last stage).

        Gradients are left in the leaves' `.grad`. Raises PipelineError if an operation fails.
        """
        self._reset()
        self.events = []
        begin = time.perf_counter()
        place, item = 0, None
        try:
            for source in self._incoming:
                self._post(source)
            for item in self._order:
                if self.record:
                    self._run_recorded(item, begin)
                else:
                    self._run(item)
                place += 1
            self._outbox.flush()
        except PipelineError:
            raise
        except Exception as error:
            raise PipelineError(self._failure(error, place, item)) from error
        assert not self._passes and not self._later and not self._posted, "the schedule left something undone"
        return self.losses

    def _failure(self, error: Exception, place: int, item: Item | None) -> str:
        what = f"{item} (item {place + 1} of {len(self._order)})" if item is not None else "the first receives"
        return (
            f"Pipeline rank {self.rank} of {self.schedule.num_ranks} failed in schedule {self.schedule.name} at {what}, "
            f"with {len(self._passes)} forwards open: {type(error).__name__}: {error}"
        )

    def _run_recorded(self, item: Item, begin: float) -> None:
        start, self._waited = time.perf_counter() - begin, 0.0
        self._run(item)
        if self._synchronize is not None:
            self._synchronize()
        self.events.append(Event(start + self._waited, time.perf_counter() - begin, item))

    def _run(self, item: Item) -> None:
        if isinstance(item, Pair):
            if self.overlap:
                self._overlapped(item)
                return
            for op in ops_of(item):
                self._run(op)
            return
        if item.kind == "F":
            self._forward(item)
        elif item.kind == "W":
            later = self._later.pop((item.stage, item.microbatch))
            later.queue.run()
            self._pool.give(later.buffers)
        elif item.kind in ACTIONS:
            if self._action is not None:
                self._action(item)
        else:
            self._backward(item)

    # -- computation ---------------------------------------------------------------------------------------------

    def _forward(self, op: Op) -> None:
        inputs, buffers = self._inputs(op)
        if self.overlap:
            tape = Tape(self.stages[op.stage].segments(op.microbatch))
            for _ in tape.forward(inputs):
                pass
            self._finish_forward(op, tape.inputs, tape.outputs, buffers, tape)
            return
        with torch.profiler.record_function(f"F{op.stage}"):
            outputs = self.stages[op.stage].forward(op.microbatch, inputs)
        self._finish_forward(op, inputs, outputs, buffers, None)

    def _inputs(self, op: Op) -> tuple[Tensors, list[Tensor]]:
        """Return what the stage before sent, as leaves, and the buffers it came in."""
        if self.schedule.prev[op.stage] is None:
            return (), []
        tensors, buffers = self._take(Message("F", op.stage, op.microbatch))
        if not torch.is_grad_enabled():
            return tensors, buffers
        # Fresh leaves over the buffers: a hook or gradient on one microbatch's input stays with that microbatch.
        return tuple(x.detach().requires_grad_(x.is_floating_point()) for x in tensors), buffers

    def _finish_forward(
        self, op: Op, inputs: Tensors, outputs: Tensors, buffers: list[Tensor], tape: Tape | None
    ) -> None:
        message = self.schedule.message_of(op)
        if message is None:
            self.losses[op.microbatch] = outputs[0].detach()
        else:
            self._give(message, [y.detach() for y in outputs])
        if not torch.is_grad_enabled():
            return  # the buffers are not used again: what was sent may lie in them
        ends: list[Any] = []
        if tape is None:
            # An edge keeps the graph but not the output itself, whose memory is free once it has been sent.
            edge = torch.autograd.graph.get_gradient_edge
            ends = [edge(y) if y.requires_grad else None for y in outputs]
        self._passes[op.stage, op.microbatch] = _Pass(inputs, ends, buffers, tape)

    def _backward(self, op: Op) -> None:
        done, gradients, later = self._begin_backward(op)
        with deferring(later.queue if op.kind == "I" else None):
            if done.tape is not None:
                for _ in done.tape.backward(gradients):
                    pass
            else:
                pairs = [(end, g) for end, g in zip(done.outputs, gradients, strict=True) if end is not None]
                with torch.profiler.record_function(f"{op.kind}{op.stage}"):
                    if pairs:
                        torch.autograd.backward([end for end, _ in pairs], [g for _, g in pairs])
        self._finish_backward(op, done, later)

    def _begin_backward(self, op: Op) -> tuple[_Pass, Tensors, _Later]:
        done = self._passes.pop((op.stage, op.microbatch))
        later = _Later(buffers=done.buffers)
        if self.schedule.next[op.stage] is None:
            loss = self.losses[op.microbatch]
            return done, (torch.ones_like(loss),), later
        gradients, buffers = self._take(Message("B", op.stage, op.microbatch))
        later.buffers = done.buffers + buffers
        return done, gradients, later

    def _finish_backward(self, op: Op, done: _Pass, later: _Later) -> None:
        message = self.schedule.message_of(op)
        if message is not None:
            gradients = [_gradient(x) for x in done.inputs if x.is_floating_point()]
            self._give(message, gradients)
            leaving = {g.untyped_storage().data_ptr() for g in gradients}
            later.buffers = [b for b in later.buffers if b.untyped_storage().data_ptr() not in leaving]
        if op.kind == "I":
            self._later[op.stage, op.microbatch] = later
        else:
            self._pool.give(later.buffers)

    def _overlapped(self, pair: Pair) -> None:
        """Run both operations of a pair as one zip of their segments."""
        f, b = pair
        inputs, buffers = self._inputs(f)
        done, gradients, later = self._begin_backward(b)
        assert done.tape is not None
        tape = Tape(self.stages[f.stage].segments(f.microbatch))
        with torch.profiler.record_function(f"F{f.stage}&B{b.stage}"):
            for _ in zipped(tape.forward(inputs), done.tape.backward(gradients)):
                pass
        self._finish_forward(f, tape.inputs, tape.outputs, buffers, tape)
        self._finish_backward(b, done, later)

    # -- communication -------------------------------------------------------------------------------------------

    def _give(self, message: Message, tensors: list[Tensor]) -> None:
        target = self.schedule.rank_of[message.stage]
        if target == self.rank:
            self._here[message] = tuple(tensors)
        else:
            self._outbox.send(tensors, target)

    def _take(self, message: Message) -> tuple[Tensors, list[Tensor]]:
        """Return the tensors of a message and the pool's buffers they are in."""
        if message in self._here:
            return self._here.pop(message), []
        buffers, works, source = self._posted.pop(message)
        begin = time.perf_counter() if self.record else 0.0
        for work in works:
            work.wait()
        if self.record:
            self._waited += time.perf_counter() - begin
        self._waiting[source] -= 1
        self._post(source)
        return tuple(buffers), buffers

    def _post(self, source: int) -> None:
        """Post the next receives from `source`, up to the window."""
        queue, place = self._incoming[source], self._next_post[source]
        assert self._channels is not None
        while place < len(queue) and self._waiting[source] < self.window:
            message = queue[place]
            buffers = [self._pool.take(spec) for spec in self._specs(message)]
            works = [self._channels.receive(buffer, source) for buffer in buffers]
            self._posted[message] = (buffers, works, source)
            self._waiting[source] += 1
            place += 1
        self._next_post[source] = place

    def _specs(self, message: Message) -> tuple[TensorSpec, ...]:
        stage = self.stages[message.stage]
        if message.what == "F":
            return stage.input_specs(message.microbatch)
        return tuple(spec for spec in stage.output_specs(message.microbatch) if spec.dtype.is_floating_point)


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


__all__ = ["WINDOW", "Executor", "PipelineError", "Stage"]
