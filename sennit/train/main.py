"""`sennit train`: one run from recipe to report, on every rank."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from sennit import ops
from sennit.device import Device, get_device
from sennit.mesh import Mesh, build_mesh
from sennit.train.checkpointing import resume_run, save_run
from sennit.train.environment import environment
from sennit.train.run_log import RunLog
from sennit.train.trainer import StepRecord, Trainer

if TYPE_CHECKING:
    from sennit.data import DataBundle
    from sennit.recipe import Recipe

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(slots=True)
class Job:
    """The processes of a run as this one sees them."""

    device: Device
    mesh: Mesh
    checkpoint_group: Any
    rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        """Whether this rank writes logs, metrics and reports."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()


def start_job(recipe: Recipe) -> Job:
    """Join the job described by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (one process without them)."""
    device = get_device()
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device.prepare_rank(local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    ops.set_forced(recipe.ops.provider)
    group = None
    if world_size > 1:
        dist.init_process_group(device.comm_backend, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
        from sennit.checkpoint import new_checkpoint_group

        group = new_checkpoint_group()
    p = recipe.parallel
    mesh = build_mesh(
        device_type=device.torch_type,
        pp=p.pp,
        dp_replicate=p.dp_replicate,
        dp_shard=p.dp_shard,
        cp=p.cp,
        tp=p.tp,
        ulysses=p.ulysses,
    )
    return Job(device, mesh, group, rank, world_size)


def run(recipe: Recipe, *, json_output: bool = False) -> dict[str, Any]:
    """Train `recipe` (checked and resolved for this world size) to its last step and return the summary.

    Collective: every rank calls it. Rank 0 writes the run directory, prints progress to stderr, the closing sample
    and, with `json_output`, the summary as one JSON document to stdout.
    """
    started = time.time()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    job = start_job(recipe)
    try:
        summary = _run(recipe, job, started)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if job.is_main and json_output:
        json.dump(summary, sys.stdout)
        sys.stdout.write("\n")
    return summary


def _run(recipe: Recipe, job: Job, started: float) -> dict[str, Any]:
    from sennit.data import build_loaders

    run_dir = Path(recipe.run.dir or f"runs/{recipe.run.name}")
    if job.is_main:
        print(f"run {run_dir}: reading data (built and cached the first time)", file=sys.stderr)
    bundle = build_loaders(recipe, main_rank=job.is_main, barrier=job.barrier)
    trainer = build_trainer(recipe, job, bundle)
    resumed_from = resume_run(trainer, run_dir, job.checkpoint_group, bundle.fingerprint)
    if resumed_from is None and recipe.model.init_from:
        from sennit.models.hf import init_weights

        init_weights(trainer, recipe.model.init_from)
    done = finished_summary(run_dir, trainer) if resumed_from is not None else None
    if done is not None:
        if job.is_main:
            print(
                f"the run is complete: {trainer.step} of {recipe.train.steps} steps. Raise train.steps to go on, or name "
                f"another run.dir for a new run.",
                file=sys.stderr,
            )
        return done
    if job.is_main:
        write_run_files(run_dir, recipe, job, trainer, bundle)
    log = RunLog(
        run_dir,
        active=job.is_main,
        start_step=trainer.step,
        total_steps=recipe.train.steps,
        tensorboard=recipe.log.tensorboard,
    )
    try:
        log.message(describe_run(recipe, job, trainer))
        if resumed_from is not None:
            log.message(f"resumed from {resumed_from}")
            log.write("resume", step=trainer.step, **{"from": str(resumed_from)})
        totals = Totals(trainer, job, peak_flops(job, recipe))
        train_loop(trainer, job, log, totals, run_dir, bundle)
        finish(trainer, job, log, totals, bundle)
    finally:
        log.close()
    summary = totals.summary(run_dir, bundle, started)
    if job.is_main:
        closing(run_dir, summary)
    return summary


def finished_summary(run_dir: Path, trainer: Trainer) -> dict[str, Any] | None:
    """Return the summary of a run that has nothing left to do, or None: more steps wanted, or it ended before its summary."""
    if trainer.step < trainer.recipe.train.steps:
        return None
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if summary.get("steps") == trainer.step else None


def logged_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Return the step records of metrics.jsonl, of this process and of those before it."""
    records = []
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "step":
            records.append(record)
    return records


def describe_run(recipe: Recipe, job: Job, trainer: Trainer) -> str:
    """Return what is trained, on what and how, in one line."""
    p, train = recipe.parallel, recipe.train
    sizes = {"pp": p.pp, "dp_replicate": p.dp_replicate, "dp_shard": p.dp_shard, "cp": p.cp, "tp": p.tp}
    layout = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
    tokens = train.global_batch_size * train.seq_len
    return (
        f"{recipe.model.family}, {trainer.config.num_parameters / 1e6:,.1f} M parameters, {recipe.precision.dtype} on "
        f"{job.device.description()}, {layout}; {train.steps} steps of {tokens:,} tokens"
    )


def build_trainer(recipe: Recipe, job: Job, bundle: DataBundle) -> Trainer:
    """Return the trainer of this rank."""
    return Trainer(
        recipe,
        job.mesh,
        job.device,
        train_loader=bundle.train,
        validation_loader=bundle.validation,
        vocab_size=bundle.vocab_size,
        byte_lengths=bundle.byte_lengths,
    )


def peak_flops(job: Job, recipe: Recipe) -> float | None:
    """Return the peak rate of all ranks together in the run's dtype, FLOP/s: the denominator of MFU.

    Known for a listed accelerator. On a CPU it is the matrix-product rate measured on this machine (cached), for all
    cores: local ranks share them, so it does not grow with the number of local ranks.
    """
    dtype = str(recipe.precision.dtype)
    value = [job.device.peak_flops(dtype) if job.is_main else None]
    if job.world_size > 1:
        dist.broadcast_object_list(value, src=0)
    if value[0] is None:
        return None
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", str(job.world_size))) if job.device.shared_by_ranks else 1
    return value[0] * job.world_size / sharing


class Totals:
    """Rates of a step and the figures of a whole run."""

    def __init__(self, trainer: Trainer, job: Job, peak: float | None) -> None:
        self.trainer, self.job, self.peak = trainer, job, peak
        recipe = trainer.recipe
        self._flops = trainer.config.flops_per_token(recipe.train.seq_len)
        self._batch_tokens = recipe.train.global_batch_size * recipe.train.seq_len
        self._first: float | None = None
        self._last: StepRecord | None = None
        self._seconds: list[float] = []
        self.bits_per_byte: float | None = None

    def add(self, record: StepRecord, finished: int) -> dict[str, Any]:
        """Return the metrics line of a step. The first step of a process (warm-up) is left out of the averages."""
        self._first = record.loss if self._first is None else self._first
        if self._last is not None:
            self._seconds.append(record.step_seconds)
        self._last = record
        rate = self._batch_tokens / record.step_seconds
        bits = record.loss * record.tokens / 0.6931471805599453 / record.bytes if record.bytes else None
        return {
            "step": finished,
            "loss": record.loss,
            "bits_per_byte": bits,
            "grad_norm": record.grad_norm,
            "lr": record.lr,
            "tokens": self.trainer.tokens_seen,
            "skipped": record.skipped,
            "tokens_per_second": rate,
            "tflops": rate * self._flops / 1e12,
            "mfu": rate * self._flops / self.peak if self.peak else None,
            "step_seconds": record.step_seconds,
            "peak_memory_bytes": self.job.device.peak_memory_bytes(),
            "seconds": record.seconds,
        }

    def eta_seconds(self, finished: int, total_steps: int) -> float:
        """Return the time that the remaining steps will take, by the mean of the last 20."""
        recent = self._seconds[-20:] or [self._last.step_seconds if self._last is not None else 0.0]
        return sum(recent) / len(recent) * (total_steps - finished)

    def summary(self, run_dir: Path, bundle: DataBundle, started: float) -> dict[str, Any]:
        """Return the JSON document of a run."""
        steps = logged_steps(run_dir) if self.job.is_main else []
        seconds = self._seconds or [record["step_seconds"] for record in steps]
        rate = self._batch_tokens * len(seconds) / sum(seconds) if seconds else None
        first = steps[0]["loss"] if steps else self._first
        last = steps[-1]["loss"] if steps and self._last is None else None if self._last is None else self._last.loss
        memory = self.job.device.peak_memory_bytes()
        return {
            "run_dir": str(run_dir),
            "steps": self.trainer.step,
            "loss_first": first,
            "loss_last": last,
            "bits_per_byte": self.bits_per_byte,
            "gzip_bits_per_byte": bundle.heldout_gzip_bits_per_byte,
            "tokens_per_second": rate,
            "mfu": rate * self._flops / self.peak if rate and self.peak else None,
            "mfu_denominator_flops": self.peak,
            "peak_memory_bytes": memory,
            "parameters": self.trainer.config.num_parameters,
            "train_seconds": time.time() - started,
        }


def train_loop(
    trainer: Trainer, job: Job, log: RunLog, totals: Totals, run_dir: Path, bundle: DataBundle
) -> None:
    """Run the remaining steps with logging, evaluation, checkpoints and, on request, a profile."""
    from sennit.train.profiling import StepProfiler
    from sennit.train.timeline import StepTimeline

    recipe = trainer.recipe
    profiler = StepProfiler(recipe.log.profile_steps, run_dir, job.rank)
    timelines = StepTimeline(trainer, run_dir, log)
    every_save, every_eval = recipe.checkpoint.every, recipe.train.eval_every
    while trainer.step < recipe.train.steps:
        with profiler.step(trainer.step):
            record = trainer.train_step()
        done = trainer.step
        timelines.after_step(done)
        fields = totals.add(record, done)
        shown = {**fields, "eta_seconds": totals.eta_seconds(done, recipe.train.steps)}
        if done % recipe.log.every == 0 or done == recipe.train.steps:
            log.write("step", **fields)
        log.show(done, shown)
        last = done == recipe.train.steps
        if every_eval and done % every_eval == 0 and not last and trainer.validation_loader is not None:
            nats, bits = trainer.evaluate(recipe.train.eval_batches)
            log.write("eval", step=done, loss=nats, bits_per_byte=bits)
            share = f"first {recipe.train.eval_batches} batches of the held-out text"
            log.message(f"step {done}: {share}: loss {nats:.4f}" + (f", {bits:.3f} bits/byte" if bits else ""))
        if last or (every_save and done % every_save == 0):
            log.sync()
            saved = save_run(trainer, run_dir, job.checkpoint_group, bundle.fingerprint, bundle.tokenizer)
            log.write("checkpoint", step=done, seconds=saved.seconds, bytes=saved.bytes, path=str(saved.path))


def finish(trainer: Trainer, job: Job, log: RunLog, totals: Totals, bundle: DataBundle) -> None:
    """Evaluate on all held-out data and generate a sample, after the last step."""
    recipe = trainer.recipe
    if trainer.validation_loader is not None:
        batches = max(trainer.validation_loader.steps_per_epoch, 1)
        nats, bits = trainer.evaluate(batches)
        totals.bits_per_byte = bits
        log.write("eval", step=trainer.step, loss=nats, bits_per_byte=bits)
        text = f"all held-out text: loss {nats:.4f}"
        if bits is not None:
            text += f", {bits:.3f} bits/byte"
            if bundle.heldout_gzip_bits_per_byte is not None:
                text += f" (gzip -9 on the same text: {bundle.heldout_gzip_bits_per_byte:.3f})"
        log.message(text)
    if recipe.log.sample_tokens and bundle.tokenizer is not None:
        from sennit.generate import sample_text

        sample = sample_text(
            trainer.engine.inference_model(),
            bundle.tokenizer,
            recipe.log.sample_prompt,
            max_new_tokens=recipe.log.sample_tokens,
            seed=recipe.run.seed,
        )
        log.write("sample", step=trainer.step, prompt=recipe.log.sample_prompt, text=sample)
        log.message(f"sample:\n{recipe.log.sample_prompt}{sample}")


def write_run_files(run_dir: Path, recipe: Recipe, job: Job, trainer: Trainer, bundle: DataBundle) -> None:
    """Write the resolved recipe, the environment and the tokenizer into the run directory, each atomically."""
    run_dir.mkdir(parents=True, exist_ok=True)
    facts = environment(job.device, job.world_size)
    facts["parameters"] = trainer.config.num_parameters
    for name, text in (("recipe.toml", recipe.to_toml()), ("environment.json", json.dumps(facts, indent=1))):
        temporary = run_dir / f"{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(run_dir / name)
    if bundle.tokenizer is not None:
        bundle.tokenizer.save(run_dir / "tokenizer")


def closing(run_dir: Path, summary: dict[str, Any]) -> None:
    """Write summary.json and the report, and say where they are."""
    temporary = run_dir / "summary.json.tmp"
    temporary.write_text(json.dumps(summary, indent=1), encoding="utf-8")
    temporary.replace(run_dir / "summary.json")
    from sennit.report import build_report

    files = build_report(run_dir)
    print(f"report: {files.html}", file=sys.stderr)


__all__ = ["Job", "Totals", "build_trainer", "peak_flops", "run", "start_job"]
