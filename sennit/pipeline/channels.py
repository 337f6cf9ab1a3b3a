"""The wires of a pipeline: one communicator for each directed pair of ranks that exchange tensors.

Messages of a pair arrive in the order in which they were sent, without tags: that is all NCCL and gloo promise alike.
Separate communicators for the two directions of a pair keep a receive that waits from holding up a send.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor at the boundary of two stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return the spec of `tensor`."""
        return cls(tuple(tensor.shape), tensor.dtype)


class Channels:
    """The directed channels of one rank: `send_to` and `receive_from` by the pipeline rank at the other end.

    `wires`: all (from, to) pairs of pipeline ranks. `pipelines`: the global ranks of every pipeline of the job, in order.
    Collective over all ranks of the job: torch names a group after the number of groups made so far, so all ranks make
    all groups.
    """

    def __init__(self, wires: Iterable[tuple[int, int]], pipelines: Sequence[Sequence[int]]) -> None:
        me = dist.get_rank()
        # (group, the other's rank in it): its own methods, because the checks of dist.isend cost more than the send.
        self._groups: dict[tuple[int, int], tuple[Any, int]] = {}
        self.ranks: list[int] = next(list(ranks) for ranks in pipelines if me in ranks)
        self.rank = self.ranks.index(me)
        for ranks in pipelines:
            for source, target in sorted(set(wires)):
                members = sorted((ranks[source], ranks[target]))
                group = dist.new_group(members)
                if me in members:
                    self._groups[source, target] = group, 1 - members.index(me)

    def send(self, tensor: Tensor, target: int) -> Any:
        """Start to send to pipeline rank `target`; `tensor` must live until the returned work is completed."""
        group, peer = self._groups[self.rank, target]
        return group.send([tensor], peer, 0)

    def receive(self, tensor: Tensor, source: int) -> Any:
        """Start to receive into `tensor` from pipeline rank `source`; returns the work to wait for."""
        group, peer = self._groups[source, self.rank]
        return group.recv([tensor], peer, 0)


class Outbox:
    """Tensors on their way: each is kept until it has left."""

    def __init__(self, channels: Channels | None) -> None:
        self._channels = channels
        self._leaving: deque[tuple[Any, Tensor]] = deque()

    def send(self, tensors: Iterable[Tensor], target: int) -> None:
        """Start to send `tensors` in order, and let go of those that have left."""
        assert self._channels is not None
        leaving = self._leaving
        while leaving and leaving[0][0].is_completed():
            leaving.popleft()
        for tensor in tensors:
            tensor = tensor.contiguous()
            leaving.append((self._channels.send(tensor, target), tensor))

    def flush(self) -> None:
        """Wait until everything has left."""
        while self._leaving:
            self._leaving.popleft()[0].wait()


class BufferPool:
    """Receive buffers, used again once their contents are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: defaultdict[TensorSpec, list[Tensor]] = defaultdict(list)
        self.allocated = 0

    def take(self, spec: TensorSpec) -> Tensor:
        """Return an unused buffer."""
        free = self._free[spec]
        if free:
            return free.pop()
        self.allocated += 1
        return torch.empty(spec.shape, dtype=spec.dtype, device=self._device)

    def give(self, buffers: Iterable[Tensor]) -> None:
        """Take back buffers that nobody reads any more."""
        for buffer in buffers:
            self._free[TensorSpec.of(buffer)].append(buffer)

    def clear(self) -> None:
        """Free all unused buffers (after shapes have changed)."""
        self._free.clear()


__all__ = ["BufferPool", "Channels", "Outbox", "TensorSpec"]
