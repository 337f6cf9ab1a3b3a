"""Optimizers over master weights.

Every parameter has a master tensor: the parameter itself in float32/float64 runs and under FSDP, a float32 copy
otherwise. An optimizer updates the masters' local parts and refreshes the compute copies; its state has the
parameter's placement, so checkpoints reshard it like the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sennit import ops
from sennit.train.gradients import local_data


@dataclass(slots=True)
class Slot:
    """One parameter as the optimizer sees it. `decay`: weight decay applies (matrices, embeddings; never norms and
    biases). `matrix`: a hidden weight matrix, which Muon orthogonalises. `state`: named tensors like the master."""

    name: str
    parameter: nn.Parameter
    master: Tensor
    decay: bool
    matrix: bool
    state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def shadow(self) -> Tensor | None:
        """The compute copy to refresh after an update, or None if the parameter is its own master."""
        data = local_data(self.parameter)
        return None if data.dtype == self.master.dtype else data


def make_slots(model: nn.Module, masters: dict[str, Tensor]) -> list[Slot]:
    """Return a slot for each parameter of `model`; `masters` by parameter name (see `models.hold_in`)."""
    slots = []
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() == 2 and name.startswith("layers.")
        slots.append(Slot(name, parameter, masters[name], parameter.dim() >= 2, matrix))
    return slots


class Optimizer:
    """Base: state tensors, checkpoint state, refreshing of compute copies."""

    def __init__(self, slots: Sequence[Slot], *, weight_decay: float) -> None:
        self.slots = list(slots)
        self.weight_decay = weight_decay
        for slot in self.slots:
            for name in self.state_names(slot):
                slot.state[name] = torch.zeros_like(slot.master)

    def state_names(self, slot: Slot) -> tuple[str, ...]:
        """Names of the state tensors of `slot`."""
        raise NotImplementedError

    def step(self, gradients: Sequence[Tensor], *, rate: float, step: int, scale: float) -> None:
        """Update all masters from local `gradients` times `scale` (clipping) with learning rate `rate`.

        `step` counts updates from 1 (bias correction).
        """
        raise NotImplementedError

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state tensors by parameter name, sharing storage with the optimizer."""
        return {slot.name: dict(slot.state) for slot in self.slots}

    def refresh(self) -> None:
        """Recompute every compute copy from its master (after a load)."""
        with torch.no_grad():
            for slot in self.slots:
                if slot.shadow is not None:
                    slot.shadow.copy_(local_data(slot.master))

    def _decay(self, slot: Slot) -> float:
        return self.weight_decay if slot.decay else 0.0


class AdamW(Optimizer):
    """AdamW (arXiv 1711.05101): decoupled weight decay, bias-corrected moments in the masters' precision."""

    def __init__(
        self, slots: Sequence[Slot], *, weight_decay: float, beta1: float, beta2: float, eps: float
    ) -> None:
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        super().__init__(slots, weight_decay=weight_decay)

    def state_names(self, slot: Slot) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def step(self, gradients: Sequence[Tensor], *, rate: float, step: int, scale: float) -> None:
        self._adamw(self.slots, gradients, rate=rate, step=step, scale=scale)

    def _adamw(
        self, slots: Sequence[Slot], gradients: Sequence[Tensor], *, rate: float, step: int, scale: float
    ) -> None:
        shadows = [slot.shadow for slot in slots]
        ops.adamw_(
            [local_data(slot.master) for slot in slots],
            list(gradients),
            [local_data(slot.state["exp_avg"]) for slot in slots],
            [local_data(slot.state["exp_avg_sq"]) for slot in slots],
            None if all(shadow is None for shadow in shadows) else shadows,
            lr=rate,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decays=[self._decay(slot) for slot in slots],
            step=step,
            grad_scale=scale,
        )


class Muon(AdamW):
    """Muon for hidden matrices, AdamW for everything else.

    Momentum with Nesterov, then the nearest semi-orthogonal matrix by a quintic Newton-Schulz iteration
    (K. Jordan et al. 2024), scaled by 0.2 sqrt(max(rows, columns)) so that the update's root mean square matches
    AdamW's and one learning rate serves both (arXiv 2502.16982, eq. 4). A sharded matrix is gathered for the
    iteration, so every layout takes the same step.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        *,
        weight_decay: float,
        beta1: float,
        beta2: float,
        eps: float,
        momentum: float,
        ns_steps: int,
        iterate_in: torch.dtype,
    ) -> None:
        self.momentum, self.ns_steps, self.iterate_in = momentum, ns_steps, iterate_in
        super().__init__(slots, weight_decay=weight_decay, beta1=beta1, beta2=beta2, eps=eps)

    def state_names(self, slot: Slot) -> tuple[str, ...]:
        return ("momentum",) if slot.matrix else super().state_names(slot)

    def step(self, gradients: Sequence[Tensor], *, rate: float, step: int, scale: float) -> None:
        rest = [(s, g) for s, g in zip(self.slots, gradients, strict=True) if not s.matrix]
        self._adamw([s for s, _ in rest], [g for _, g in rest], rate=rate, step=step, scale=scale)
        with torch.no_grad():
            for slot, gradient in zip(self.slots, gradients, strict=True):
                if slot.matrix:
                    self._muon(slot, gradient, rate, scale)

    def _muon(self, slot: Slot, gradient: Tensor, rate: float, scale: float) -> None:
        master, buffer = local_data(slot.master), local_data(slot.state["momentum"])
        gradient = gradient.to(buffer.dtype) * scale
        buffer.mul_(self.momentum).add_(gradient)
        direction = _like(slot.master, gradient.add_(buffer, alpha=self.momentum))
        full = direction.full_tensor() if hasattr(direction, "full_tensor") else direction  # type: ignore[attr-defined]
        update = orthogonalise(full.to(self.iterate_in), steps=self.ns_steps).to(master.dtype)
        factor = 0.2 * max(full.shape) ** 0.5
        master.mul_(1.0 - rate * self._decay(slot)).add_(_local_part(update, slot.master), alpha=-rate * factor)
        if slot.shadow is not None:
            slot.shadow.copy_(master)


def orthogonalise(matrix: Tensor, *, steps: int) -> Tensor:
    """Return a matrix [m, n] with the singular vectors of `matrix` and singular values near 1.

    Quintic Newton-Schulz iteration with coefficients (3.4445, -4.7750, 2.0315) (K. Jordan et al. 2024).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.mT
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


class SGD(Optimizer):
    """Gradient descent, with momentum if it is not 0. Shows wrong gradient scales that Adam hides."""

    def __init__(self, slots: Sequence[Slot], *, weight_decay: float, momentum: float) -> None:
        self.momentum = momentum
        super().__init__(slots, weight_decay=weight_decay)

    def state_names(self, slot: Slot) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def step(self, gradients: Sequence[Tensor], *, rate: float, step: int, scale: float) -> None:
        with torch.no_grad():
            for slot, gradient in zip(self.slots, gradients, strict=True):
                master = local_data(slot.master)
                direction = gradient.to(master.dtype) * scale
                if self.momentum:
                    direction = local_data(slot.state["momentum"]).mul_(self.momentum).add_(direction)
                master.mul_(1.0 - rate * self._decay(slot)).add_(direction, alpha=-rate)
                if slot.shadow is not None:
                    slot.shadow.copy_(master)


def _like(parameter: Tensor, data: Tensor) -> Tensor:
    """Wrap local `data` with the placement of `parameter`."""
    if not hasattr(parameter, "placements"):
        return data
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        data,
        parameter.device_mesh,  # type: ignore[attr-defined]
        parameter.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _local_part(full: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of a full tensor, placed like `parameter`."""
    from sennit.nn.parameter import local_part

    part, offsets = local_part(parameter)
    for dim, (offset, size) in enumerate(zip(offsets, part.shape, strict=True)):
        full = full.narrow(dim, min(offset, full.shape[dim] - size), size)
    return full


__all__ = ["SGD", "AdamW", "Muon", "Optimizer", "Slot", "make_slots", "orthogonalise"]
