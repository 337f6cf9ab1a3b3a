"""How a step's microbatches become gradients: one after the other on a whole model, or through a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit.errors import ConfigError
from sennit.mesh import Axis, Mesh, new_axis
from sennit.models import Decoder, Part, StagedDecoder, build_parts, gradient_leaves, hold_in
from sennit.nn import DecoderConfig, Recompute
from sennit.pipeline.actions import forward_only, with_reductions, with_sharding
from sennit.pipeline.channels import Channels
from sennit.pipeline.executor import WINDOW, Executor
from sennit.pipeline.plan import PipelinePlan
from sennit.pipeline.schedule import Op, Schedule
from sennit.pipeline.simulate import Event
from sennit.pipeline.stage import DecoderStage, Microbatch
from sennit.pipeline.verify import verify
from sennit.train.gradients import GradientGroup, GradientReducer, ShardedGradients

if TYPE_CHECKING:
    from sennit.device import Device
    from sennit.recipe import Recipe

TIED = "embedding.weight"
"""The parameter that a tied model uses at both of its ends."""


class Stopwatch:
    """Adds wall time to named phases; synchronises the device only if it has asynchronous streams."""

    def __init__(self, device: Device) -> None:
        self.seconds = {"data": 0.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self._device = device
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Count the time since the last lap as `phase`."""
        if self._device.has_streams:
            self._device.synchronize()
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now


class Gradients(Protocol):
    """Collects and reduces the gradients of a step."""

    def begin(self, num_microbatches: int) -> None:
        """Start a step."""
        ...

    def collect(self) -> list[Tensor]:
        """Return the local gradients in parameter order, reduced."""
        ...


class Engine(Protocol):
    """Turns microbatches into losses and gradients. `models`: this rank's parts. `masters`: by parameter name.

    `owned`: names of the parameters that count on this pipeline rank (copies count on another).
    """

    models: list[Decoder]
    masters: dict[str, Tensor]

    @property
    def gradients(self) -> Gradients:
        """What collects the gradients of a step."""
        ...

    def prepare(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Set up the collection of gradients of the named parameters, in this order."""
        ...

    def owned(self, name: str) -> bool:
        """Tell whether the parameter counts here; copies of it may be on other pipeline ranks."""
        ...

    def train(self, microbatches: Sequence[Callable[[], Microbatch]], watch: Stopwatch) -> Tensor:
        """Run forward and backward of all microbatches and return the sum of this rank's losses (float64 scalar)."""
        ...

    def evaluate(self, microbatches: Sequence[Callable[[], Microbatch]]) -> Tensor:
        """Return the sum of this rank's losses (float64 scalar), without gradients."""
        ...

    def inference_model(self) -> Decoder | StagedDecoder:
        """Return what generation calls."""
        ...


class Accumulation:
    """The whole model on every rank (of a data-parallel group): microbatches one after the other."""

    def __init__(
        self, config: DecoderConfig, mesh: Mesh, recipe: Recipe, *, device: torch.device, dtype: torch.dtype, seed: int | None
    ) -> None:
        self.mesh, self.device = mesh, device
        self.models = build_parts(
            config, mesh, [Part.whole(config)], device=device, dtype=dtype, seed=seed, **_build_options(recipe)
        )
        (self.model,) = self.models
        self.masters = hold_in(self.model, dtype)

    def prepare(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """See `Engine`."""
        if self.mesh.shard.size > 1:
            self.gradients: GradientReducer | ShardedGradients = ShardedGradients(self.model, [p for _, p in parameters])
            return
        leaves = gradient_leaves(self.models)
        members = [(index, leaves[name]) for index, (name, _) in enumerate(parameters)]
        group = GradientGroup(members, self.mesh.loss)
        self.gradients = GradientReducer([p for _, p in parameters], [group])

    def owned(self, name: str) -> bool:
        """See `Engine`."""
        return True

    def train(self, microbatches: Sequence[Callable[[], Microbatch]], watch: Stopwatch) -> Tensor:
        """See `Engine`."""
        self.gradients.begin(len(microbatches))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, make in enumerate(microbatches):
            self.gradients.microbatch(last=index + 1 == len(microbatches))
            loss = self._loss(make())
            total += loss.detach()
            watch.lap("forward")
            loss.backward()
            watch.lap("backward")
        return total

    def evaluate(self, microbatches: Sequence[Callable[[], Microbatch]]) -> Tensor:
        """See `Engine`."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for make in microbatches:
            total += self._loss(make())
        return total

    def inference_model(self) -> Decoder:
        """See `Engine`."""
        return self.model

    def _loss(self, batch: Microbatch) -> Tensor:
        return self.model(batch.tokens, batch.context, batch.labels, batch.loss)


class Pipeline:
    """This rank's parts of the model, run by a schedule (`PipelinePlan`).

    Collective over all ranks: they build one each and compare the digests of their schedules.
    Raises ConfigError if the schedules of the ranks of a pipeline differ.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        config: DecoderConfig,
        mesh: Mesh,
        recipe: Recipe,
        *,
        device: Device,
        dtype: torch.dtype,
        seed: int | None,
    ) -> None:
        self.plan, self.mesh, self.device = plan, mesh, device
        self.torch_device = torch.device(device.torch_type)
        self.rank = mesh.pp.rank
        sharded = mesh.shard.size > 1
        keep = not recipe.parallel.reshard_after_forward
        schedule = with_reductions(plan.schedule)
        self.schedule = with_sharding(schedule, keep=keep) if sharded else schedule
        self.proof = verify(self.schedule, window=WINDOW)
        _agree(self.schedule, mesh)
        numbers = plan.parts_of(self.rank)
        self.models = build_parts(
            config,
            mesh,
            [plan.parts[number] for number in numbers],
            device=self.torch_device,
            dtype=dtype,
            seed=seed,
            **_build_options(recipe),
        )
        self._model_of = dict(zip(numbers, self.models, strict=True))
        self.masters = {name: master for model in self.models for name, master in hold_in(model, dtype).items()}
        self._part_of = {
            name: number for number, model in self._model_of.items() for name, _ in model.named_parameters()
        }
        self._parameters = _Gathered(self._model_of) if sharded else None
        self._batches: list[Callable[[], Microbatch]] = []
        self._made: dict[int, Microbatch] = {}
        self.stages = {
            stage: DecoderStage(self._model_of[plan.schedule.param_of[stage]], self._microbatch, dtype=dtype)
            for stage in plan.schedule.stages_of(self.rank)
        }
        self.overlap = recipe.parallel.overlap and plan.fused
        self.channels = Channels(plan.schedule.wires, _pipelines(mesh))
        self._replicas = _replica_axes(plan, mesh)
        self._tied = _tied_axis(plan, mesh) if config.tie_embeddings else Axis("tied")
        self._executors: dict[tuple[str, int], Executor] = {}
        self.record = False

    def prepare(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """See `Engine`."""
        if self._parameters is not None:
            self._parameters.gather(*self._model_of)
        leaves = gradient_leaves(self.models)
        if self._parameters is not None:
            self._parameters.free(*self._model_of)
        members: dict[tuple[int, ...], list[tuple[int, list[Tensor]]]] = {}
        for index, (name, _) in enumerate(parameters):
            members.setdefault(self._uses(name, leaves), []).append((index, leaves[name]))
        shards = self.mesh.shard
        groups = []
        for uses, listed in members.items():
            stages = [stage for stage in self.stages if self.schedule.param_of[stage] in uses]
            replicas = self._replicas.get(min(uses)) or (self.mesh.loss if shards.size == 1 else self.mesh.dp_replicate)
            groups.append(GradientGroup(listed, replicas, shards, frozenset(stages)))
        self._tied_index = next((i for i, (name, _) in enumerate(parameters) if name == TIED), None)
        self.gradients = _PipelineGradients([p for _, p in parameters], groups, self._tied, self._tied_index)

    def _uses(self, name: str, leaves: dict[str, list[Tensor]]) -> tuple[int, ...]:
        """Return the parts on this rank that use a parameter."""
        home = self._part_of[name]
        ends = [number for number, model in self._model_of.items() if model.part.ends]
        return tuple(sorted({home, *ends})) if len(leaves[name]) > 1 else (home,)

    def owned(self, name: str) -> bool:
        """See `Engine`."""
        part = self._part_of[name]
        if name == TIED:
            part = 0
        return self.plan.schedule.rank_of[self.plan.schedule.param_of.index(part)] == self.rank

    # -- running -------------------------------------------------------------------------------------------------

    def train(self, microbatches: Sequence[Callable[[], Microbatch]], watch: Stopwatch) -> Tensor:
        """See `Engine`. Forward and backward interleave; all of it counts as backward in `watch`."""
        assert len(microbatches) == self.schedule.num_microbatches
        self.gradients.begin(len(microbatches))
        self.gradients.microbatch(last=False)
        total = self._run(self._executor(self.schedule), microbatches)
        watch.lap("backward")
        return total

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Callable[[], Microbatch]]) -> Tensor:
        """See `Engine`."""
        forward = forward_only(self.plan.schedule, len(microbatches))
        if self._parameters is not None:
            forward = with_sharding(forward, keep=True)
        return self._run(self._executor(forward), microbatches)

    def inference_model(self) -> StagedDecoder:
        """See `Engine`."""
        schedule = self.plan.schedule
        owners = [schedule.rank_of[schedule.param_of.index(part)] for part in range(schedule.num_parts)]
        return StagedDecoder(self.mesh, self.models[0].config, self._model_of, owners)

    def _executor(self, schedule: Schedule) -> Executor:
        key = (schedule.name, schedule.num_microbatches)
        if key not in self._executors:
            self._executors[key] = Executor(
                schedule,
                self.rank,
                self.stages,
                self.channels,
                device=self.torch_device,
                action=self._act,
                overlap=self.overlap and schedule is self.schedule,
                synchronize=self.device.synchronize if self.device.has_streams else None,
            )
        return self._executors[key]

    def _run(self, executor: Executor, microbatches: Sequence[Callable[[], Microbatch]]) -> Tensor:
        self._batches, self._made = list(microbatches), {}
        executor.record = self.record
        losses = executor.step()
        self._batches, self._made = [], {}
        self.events: list[Event] = executor.events
        total = torch.zeros((), dtype=torch.float64, device=self.torch_device)
        for index in sorted(losses):
            total += losses[index]
        return total

    def _microbatch(self, index: int) -> Microbatch:
        if index not in self._made:
            self._made[index] = self._batches[index]()
        return self._made[index]

    def _act(self, op: Op) -> None:
        part = self.schedule.param_of[op.stage]
        if op.kind == "REDUCE_GRAD":
            self.gradients.finish_stage(op.stage)
        elif self._parameters is not None:
            (self._parameters.gather if op.kind == "UNSHARD" else self._parameters.free)(part)


class _Gathered:
    """Which parameters of this rank's parts are gathered, counted by use: tied parts share an embedding."""

    def __init__(self, models: dict[int, Decoder]) -> None:
        self._modules = {number: _sharded_modules(model, models.values()) for number, model in models.items()}
        self._uses: dict[int, int] = {}

    def gather(self, *parts: int) -> None:
        """Gather the parameters of `parts`."""
        for part in parts:
            for module in self._modules[part]:
                if self._uses.get(id(module), 0) == 0:
                    module.unshard()  # type: ignore[operator]
                self._uses[id(module)] = self._uses.get(id(module), 0) + 1

    def free(self, *parts: int) -> None:
        """Free the gathered parameters of `parts` that no other part uses."""
        for part in parts:
            for module in self._modules[part]:
                self._uses[id(module)] -= 1
                if self._uses[id(module)] == 0:
                    module.reshard()  # type: ignore[operator]


def _sharded_modules(model: Decoder, models: Sequence[Decoder] | object) -> list[nn.Module]:
    modules: list[nn.Module] = [*model.decoder_layers(), model]
    if model.part.ends and model.head is None and model.embedding is None:
        modules += [other for other in models if other.embedding is model.tied_embedding]  # type: ignore[attr-defined]
    return modules


class _PipelineGradients(GradientReducer):
    """Adds, at the end, the gradient that the other end of the pipeline has for a tied embedding."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], groups: Sequence[GradientGroup], tied: Axis, index: int | None
    ) -> None:
        super().__init__(parameters, groups)
        self._tied, self._index = tied, index

    def collect(self) -> list[Tensor]:
        """See `GradientReducer`."""
        gradients = super().collect()
        if self._index is not None and self._tied.size > 1:
            gradients[self._index] = sum_of_uses(gradients[self._index], self._tied)
        return gradients


def sum_of_uses(gradient: Tensor, tied: Axis) -> Tensor:
    """Return the sum of a tied weight's gradients over the two ends of the pipeline."""
    total = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=tied.group)
    return total


def _build_options(recipe: Recipe) -> dict:
    return {
        "recompute": Recompute(str(recipe.recompute.mode), frozenset(recipe.recompute.segments)),
        "reshard_after_forward": recipe.parallel.reshard_after_forward,
    }


def _pipelines(mesh: Mesh) -> list[list[int]]:
    """Return the global ranks of every pipeline of the job, each in order."""
    assert mesh.device_mesh is not None
    return mesh.device_mesh.mesh.flatten(1).T.tolist()


def _agree(schedule: Schedule, mesh: Mesh) -> None:
    """Raise ConfigError on all ranks of a pipeline unless they have the same schedule."""
    digests: list[str | None] = [None] * mesh.pp.size
    dist.all_gather_object(digests, schedule.digest, group=mesh.pp.group)
    if len(set(digests)) > 1:
        raise ConfigError(
            f"The ranks of a pipeline have different schedules (digests by pipeline rank: {', '.join(map(str, digests))}): "
            f"they would wait for each other. Start all ranks with the same recipe and the same version of Sennit."
        )


def _replica_axes(plan: PipelinePlan, mesh: Mesh) -> dict[int, Axis]:
    """Return, for a bidirectional pipeline, by part the axis over all copies of it: those of its two ranks, times data
    ranks. Each part has communicators of its own, because its two ranks finish their parts in opposite orders."""
    schedule = plan.schedule
    if len(set(schedule.param_of)) == schedule.num_stages:
        return {}
    from sennit.mesh.mesh import DIMENSIONS

    assert mesh.device_mesh is not None
    ranks = mesh.device_mesh.mesh  # [pp, dp_replicate, dp_shard, cp, tp]
    shards = ("dp_shard", "cp") if mesh.shard.name == "dp_shard_cp" else ("dp_shard",)
    apart = [*(shards if mesh.shard.size > 1 else ()), "tp"]
    axes = {}
    for part in range(schedule.num_parts):
        owners = sorted({schedule.rank_of[s] for s, p in enumerate(schedule.param_of) if p == part})
        mine = ranks[owners]
        places = [DIMENSIONS.index(name) for name in apart]
        rest = [place for place in range(mine.dim()) if place not in places]
        lists = mine.permute(*places, *rest).reshape(-1, int(torch.tensor([mine.shape[r] for r in rest]).prod()))
        axis = new_axis("replicas", lists.tolist())
        if mesh.pp.rank in owners:
            axes[part] = axis
    return axes


def _tied_axis(plan: PipelinePlan, mesh: Mesh) -> Axis:
    """Return the axis over the two ranks of this pipeline that hold a tied embedding, if they differ."""
    schedule = plan.schedule
    first, last = schedule.param_of.index(0), schedule.param_of.index(schedule.num_parts - 1)
    ends = [schedule.rank_of[first], schedule.rank_of[last]]
    if ends[0] == ends[1] or len(set(schedule.param_of)) < schedule.num_stages:
        return Axis("tied")
    assert mesh.device_mesh is not None
    return new_axis("tied", mesh.device_mesh.mesh[ends].reshape(2, -1).T.tolist())


__all__ = ["Accumulation", "Engine", "Gradients", "Pipeline", "Stopwatch", "sum_of_uses"]
