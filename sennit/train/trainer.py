"""One training run on this rank: model, optimizer, data and the step that ties them together."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from sennit import ops
from sennit.data.loader import padded
from sennit.errors import SennitError
from sennit.mesh import Mesh
from sennit.models import DTYPES, Decoder, decoder_config
from sennit.nn import DropoutKey
from sennit.ops.context_parallel import ContextShards
from sennit.ops.documents import DocumentMask
from sennit.pipeline.plan import plan_pipeline
from sennit.pipeline.stage import Microbatch
from sennit.train.engine import Accumulation, Engine, Pipeline, Stopwatch
from sennit.train.gradients import gradient_norm
from sennit.train.optimizer import SGD, AdamW, Muon, Optimizer, Slot, make_slots
from sennit.train.schedule import learning_rate

if TYPE_CHECKING:
    from sennit.data import Batch, Loader
    from sennit.device import Device
    from sennit.recipe import Recipe

logger = logging.getLogger(__name__)

MAX_BAD_STEPS = 5
"""Consecutive steps with a non-finite loss or gradient norm after which the run stops."""


class TrainingError(SennitError):
    """The numbers of a run went bad."""

    exit_code = 3


@dataclass(slots=True)
class StepRecord:
    """What one step did. `loss`: nats a counted token. `seconds`: wall time by phase. Rates are filled by the loop."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    bytes: int
    skipped: bool
    step_seconds: float
    seconds: dict[str, float] = field(default_factory=dict)


class Trainer:
    """Builds everything a run needs on this rank and performs steps.

    `train_loader` yields this rank's microbatches as a function of the step number. `byte_lengths` [vocab] holds the
    bytes each token stands for, to report bits per byte. Collective: every rank of the mesh builds one and calls its
    methods in the same order.
    """

    def __init__(
        self,
        recipe: Recipe,
        mesh: Mesh,
        device: Device,
        *,
        train_loader: Loader,
        validation_loader: Loader | None = None,
        vocab_size: int,
        byte_lengths: Tensor | None = None,
        initialise: bool = True,
    ) -> None:
        self.recipe, self.mesh, self.device = recipe, mesh, device
        self.train_loader, self.validation_loader = train_loader, validation_loader
        self.byte_lengths = byte_lengths
        self.dtype = DTYPES[str(recipe.precision.dtype)]
        self.torch_device = torch.device(device.torch_type)
        self.config = decoder_config(recipe, vocab_size)
        seed = recipe.run.seed if initialise else None
        self.engine = self._new_engine(seed)
        self.models = self.engine.models
        masters = self.engine.masters
        self.slots = [slot for model in self.models for slot in make_slots(model, masters)]
        self.optimizer = build_optimizer(recipe, self.slots, self.dtype)
        self.parameters = [slot.parameter for slot in self.slots]
        self.engine.prepare([(slot.name, slot.parameter) for slot in self.slots])
        self._owned = [self.engine.owned(slot.name) for slot in self.slots]
        self.step = 0
        self.tokens_seen = 0
        self.updates = 0
        self._bad_steps = 0

    @property
    def model(self) -> Decoder:
        """The whole model, in a job without pipeline stages."""
        (model,) = self.models
        return model

    def _new_engine(self, seed: int | None) -> Engine:
        recipe, mesh = self.recipe, self.mesh
        if mesh.pp.size == 1:
            return Accumulation(self.config, mesh, recipe, device=self.torch_device, dtype=self.dtype, seed=seed)
        train = recipe.train
        plan = plan_pipeline(recipe, self.config, train.global_batch_size // mesh.data.size // train.micro_batch_size)
        return Pipeline(plan, self.config, mesh, recipe, device=self.device, dtype=self.dtype, seed=seed)

    # -- one step ------------------------------------------------------------------------------------------------

    def train_step(self) -> StepRecord:
        """Run one step: forward and backward of every microbatch, reduction, clipping, update.

        The loss and the gradients are sums over the counted tokens of the global batch divided by their number, which
        all ranks agree on before the first forward. A step without any counted token, or with a non-finite loss or
        norm, leaves the weights alone and is reported as skipped.
        Raises TrainingError after MAX_BAD_STEPS such non-finite steps in a row.
        """
        begin = time.perf_counter()
        watch = Stopwatch(self.device)
        for model in self.models:
            model.train()
        batches = self.train_loader.microbatches(self.step, self.mesh.data.rank, self.mesh.data.size)
        counted, num_bytes = self._count(batches)
        watch.lap("data")
        scale = 1.0 / max(counted, 1)
        total = self.engine.train(
            [partial(self._microbatch, batch, scale, self._dropout_key(i, batch)) for i, batch in enumerate(batches)], watch
        )
        gradients = self.engine.gradients.collect()
        value = self._sum_of_losses(total)
        norm = gradient_norm(self.parameters, gradients, self.mesh, self._owned)
        rate = self.rate(self.step)
        good = counted > 0 and math.isfinite(value) and math.isfinite(norm)
        if good:
            limit = self.recipe.optimizer.clip_norm
            scale = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
            self.updates += 1
            self.optimizer.step(gradients, rate=rate, step=self.updates, scale=scale)
        watch.lap("optimizer")
        record = StepRecord(
            self.step, value, norm, rate, counted, num_bytes, not good, time.perf_counter() - begin, watch.seconds
        )
        self._check(record)
        self.step += 1
        self.tokens_seen += counted
        return record

    def _check(self, record: StepRecord) -> None:
        if not record.skipped:
            self._bad_steps = 0
            return
        if record.tokens == 0:
            logger.warning("step %d: no counted token in the whole batch; the update is skipped", record.step)
            return
        self._bad_steps += 1
        logger.warning("step %d: loss %s, norm %s; the update is skipped", record.step, record.loss, record.grad_norm)
        if self._bad_steps >= MAX_BAD_STEPS:
            raise TrainingError(
                f"The loss or the gradient norm was not finite for {self._bad_steps} steps in a row (last: step "
                f"{record.step}, loss {record.loss}, norm {record.grad_norm}). Lower lr.peak, lengthen lr.warmup_steps "
                f"or set optimizer.clip_norm, then resume from the last checkpoint."
            )

    def _microbatch(self, batch: Batch, scale: float, dropout: DropoutKey | None = None) -> Microbatch:
        """Return what the model needs of `batch`; its loss is `scale` times the sum of the token losses."""
        tp, shards, positions = self.mesh.tp, None, batch.positions
        tokens, labels, documents = batch.tokens, batch.labels, None
        if self.mesh.cp.size > 1:
            batch = padded(batch, self._sequence_unit)
            lengths = batch.documents or [[batch.tokens.shape[1]]] * batch.tokens.shape[0]
            shards = ContextShards.of(lengths, cp=self.mesh.cp, ring=self.mesh.ring, ulysses=self.mesh.ulysses)
            tokens, labels, positions = map(shards.take, (batch.tokens, batch.labels, batch.positions))
            if dropout is not None:
                dropout = dropout.of_positions(shards.index, shards.length)
        elif batch.documents is not None:
            documents = DocumentMask.from_lengths(batch.documents)
        tokens = tokens.to(self.torch_device)
        sequence_parallel = self.recipe.parallel.sequence_parallel and tp.size > 1 and tokens.shape[1] % tp.size == 0
        plain = documents is None and shards is None
        context = self.models[0].context(
            tokens,
            dtype=self.dtype,
            positions=None if plain else positions.to(self.torch_device),
            documents=documents,
            sequence_parallel=sequence_parallel,
            dropout=dropout,
            shards=shards,
        )
        return Microbatch(
            tokens,
            labels.to(self.torch_device),
            context,
            self._loss_function(scale),
            tokens.shape[1] // tp.size if sequence_parallel else tokens.shape[1],
        )

    @property
    def _sequence_unit(self) -> int:
        """What the length of a sequence must divide by to be spread over the context-parallel ranks."""
        parallel, tp = self.recipe.parallel, self.mesh.tp.size
        return self.mesh.cp.size * (tp if parallel.sequence_parallel else 1)

    def _loss_function(self, scale: float) -> Callable[..., Tensor]:
        train, training = self.recipe.train, self.models[0].training
        return partial(
            ops.linear_cross_entropy,
            vocab_size=self.config.vocab_size,
            axis=self.mesh.tp,
            label_smoothing=train.label_smoothing if training else 0.0,
            z_loss=train.z_loss if training else 0.0,
            scale=scale,
        )

    def _dropout_key(self, index: int, batch: Batch) -> DropoutKey | None:
        if not self.config.dropout:
            return None
        train = self.recipe.train
        first = self.step * train.global_batch_size + self.mesh.data.rank * (
            train.global_batch_size // self.mesh.data.size
        )
        first += index * train.micro_batch_size
        return DropoutKey(self.recipe.run.seed, tuple(range(first, first + batch.tokens.shape[0])))

    def _count(self, batches: list[Batch]) -> tuple[int, int]:
        """Return (counted tokens, bytes they stand for) of the global batch."""
        counts = torch.zeros(2, dtype=torch.int64)
        for batch in batches:
            counts[0] += int(batch.num_loss_tokens())
            if self.byte_lengths is not None:
                counts[1] += int(batch.num_bytes(self.byte_lengths))
        counts = counts.to(self.torch_device)
        if self.mesh.data.size > 1:
            dist.all_reduce(counts, group=self.mesh.data.group)
        return int(counts[0]), int(counts[1])

    def _sum_of_losses(self, value: Tensor) -> float:
        """Sum over the ranks that hold other tokens, and over the stages: the last one has the losses."""
        for axis in (self.mesh.loss, self.mesh.pp):
            if axis.size > 1:
                dist.all_reduce(value, group=axis.group)
        return float(value)

    def rate(self, step: int) -> float:
        """Return the learning rate of `step`."""
        lr, train = self.recipe.lr, self.recipe.train
        return learning_rate(
            step,
            peak=lr.peak,
            schedule=str(lr.schedule),
            warmup_steps=lr.warmup_steps,
            total_steps=lr.total_steps or train.steps,
            min_ratio=lr.min_ratio,
            decay_fraction=lr.decay_fraction,
        )

    # -- evaluation ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, num_batches: int) -> tuple[float, float | None]:
        """Return (nats a token, bits a byte or None) over `num_batches` global batches of held-out data.

        Always the same batches; the model, the data position and the random state are left as they were.
        """
        assert self.validation_loader is not None
        for model in self.models:
            model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.torch_device)
        tokens = num_bytes = 0
        for index in range(num_batches):
            batches = self.validation_loader.microbatches(index, self.mesh.data.rank, self.mesh.data.size)
            counted, size = self._count(batches)
            tokens, num_bytes = tokens + counted, num_bytes + size
            total += self.engine.evaluate([partial(self._microbatch, batch, 1.0) for batch in batches])
        for model in self.models:
            model.train()
        nats = self._sum_of_losses(total)
        if tokens == 0:
            return 0.0, None
        return nats / tokens, nats / math.log(2) / num_bytes if num_bytes else None

    # -- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the tensors of a checkpoint, sharing storage: masters, optimizer state, random state.

        Keys are parameter names, values have global shapes: nothing depends on the layout.
        """
        return {
            "model": {slot.name: slot.master for slot in self.slots},
            "optimizer": {name: state for name, state in self.optimizer.state().items() if state},
            "random": {"cpu": self._random_state()},
        }

    def _random_state(self) -> Tensor:
        """The generator state of rank 0; all random numbers of a run derive from its seed and sample numbers, so one
        state serves every layout."""
        state = torch.get_rng_state()
        if self.mesh.world.size > 1:
            dist.broadcast(state, 0)
        return state

    def progress(self) -> dict[str, Any]:
        """Return the counters of a checkpoint: step, updates, consumed samples, tokens."""
        return {
            "step": self.step,
            "updates": self.updates,
            "tokens_seen": self.tokens_seen,
            "samples_seen": self.step * self.recipe.train.global_batch_size,
        }

    def restore(self, progress: dict[str, Any], random_state: Tensor) -> None:
        """Take over the counters and refresh the compute copies, after `state()`'s tensors have been loaded."""
        self.step, self.updates = int(progress["step"]), int(progress["updates"])
        self.tokens_seen = int(progress["tokens_seen"])
        torch.set_rng_state(random_state)
        self.optimizer.refresh()


def build_optimizer(recipe: Recipe, slots: list[Slot], dtype: torch.dtype) -> Optimizer:
    """Return the optimizer that the recipe asks for over `slots`."""
    o = recipe.optimizer
    if o.kind == "sgd":
        return SGD(slots, weight_decay=o.weight_decay, momentum=o.momentum)
    if o.kind == "muon":
        return Muon(
            slots,
            weight_decay=o.weight_decay,
            beta1=o.beta1,
            beta2=o.beta2,
            eps=o.eps,
            momentum=o.momentum,
            ns_steps=o.ns_steps,
            iterate_in=dtype,
        )
    return AdamW(slots, weight_decay=o.weight_decay, beta1=o.beta1, beta2=o.beta2, eps=o.eps)


__all__ = ["MAX_BAD_STEPS", "StepRecord", "Trainer", "TrainingError", "build_optimizer"]
