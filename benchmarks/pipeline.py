"""Pipelines next to torch.distributed.pipelining: what running a schedule costs the host, what a split backward costs, and
whether activation memory is what the verifier says.

Two ranks on gloo, one thread each, interleaved A B A B in one run; medians, with the spread in brackets.

    python benchmarks/pipeline.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from sennit import ops
from sennit.nn import Segment
from sennit.ops.weight_queue import WeightQueue, deferring
from sennit.pipeline.catalog import make
from sennit.pipeline.channels import Channels, TensorSpec
from sennit.pipeline.executor import Executor
from sennit.pipeline.schedule import Schedule
from sennit.pipeline.verify import verify

RANKS, MICROBATCHES, WIDTH, TOKENS = 2, 32, 32, 8
SPEC = TensorSpec((TOKENS, WIDTH), torch.float32)
PEERS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


class Block(nn.Module):
    """x + W2 gelu(W1 x), through our linear operator, whose weight gradients can wait, or through torch's."""

    def __init__(self, *, ours: bool) -> None:
        super().__init__()
        self.first, self.second, self.ours = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False), ours

    def forward(self, x: Tensor) -> Tensor:
        apply = ops.linear if self.ours else nn.functional.linear
        return x + apply(nn.functional.gelu(apply(x, self.first.weight)), self.second.weight)


class ModuleStage:
    """A module as a stage of our executor; the last one returns a loss."""

    def __init__(self, module: nn.Module, schedule: Schedule, stage: int, x: Tensor) -> None:
        self.module, self.x = module, x
        self.first, self.last = schedule.prev[stage] is None, schedule.next[stage] is None

    def forward(self, microbatch: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        y = self.module(self.x if self.first else inputs[0])
        return (y.sum(),) if self.last else (y,)

    def input_specs(self, microbatch: int) -> tuple[TensorSpec, ...]:
        return () if self.first else (SPEC,)

    def output_specs(self, microbatch: int) -> tuple[TensorSpec, ...]:
        return () if self.last else (SPEC,)

    def segments(self, microbatch: int) -> list[Segment]:
        return [Segment("all", "compute", lambda *inputs: self.forward(microbatch, inputs))]


def our_step(name: str) -> tuple[Callable[[], object], Schedule]:
    """Return one step of our executor on this rank."""
    schedule = make(name, RANKS, MICROBATCHES, pairs=False)
    x = torch.randn(SPEC.shape)
    rank = dist.get_rank()
    stages = {s: ModuleStage(Block(ours=True), schedule, s, x) for s in schedule.stages_of(rank)}
    return Executor(schedule, rank, stages, Channels(schedule.wires, [list(range(RANKS))])).step, schedule


def torch_step(name: str) -> Callable[[], object]:
    """Return one step of torch's schedule of the same name on this rank."""
    import torch.distributed.pipelining as peer
    from torch.distributed.pipelining import schedules

    ours, rank = make(name, RANKS, MICROBATCHES, pairs=False), dist.get_rank()
    parts = [
        peer.PipelineStage(Block(ours=False), stage, ours.num_stages, torch.device("cpu"))
        for stage in ours.stages_of(rank)
    ]
    kind = getattr(schedules, PEERS[name])
    single = len(parts) == 1
    runner = kind(parts[0] if single else parts, n_microbatches=MICROBATCHES, loss_fn=lambda y, target: y.sum())
    x = torch.randn(MICROBATCHES * TOKENS, WIDTH)
    first = 0 in ours.stages_of(rank)
    last = ours.num_stages - 1 in ours.stages_of(rank)

    def step() -> None:
        losses: list[Tensor] = []
        runner.step(*((x,) if first else ()), **({"target": x, "losses": losses} if last else {}))

    return step


def host_times(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return, by schedule, the CPU seconds a (chunk, microbatch) on this rank: ours and torch's, round by round."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in PEERS:
        mine, schedule = our_step(name)
        steps = {"ours": mine, "torch": torch_step(name)}
        work = len(schedule.stages_of(dist.get_rank())) * MICROBATCHES
        times: dict[str, list[float]] = {"ours": [], "torch": []}
        for round_ in range(rounds + 1):
            for who, step in steps.items():
                dist.barrier()
                begin = time.process_time()
                step()
                if round_:
                    times[who].append((time.process_time() - begin) / work)
        found[name] = times
    return found


class Held:
    """A tensor that autograd keeps, and how many bytes of them are alive."""

    live = peak = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.size = tensor, tensor.numel() * tensor.element_size()
        Held.live += self.size
        Held.peak = max(Held.peak, Held.live)

    def __del__(self) -> None:
        Held.live -= self.size


def peaks() -> dict[str, tuple[int, float]]:
    """Return, by schedule, (bytes kept for backward at the peak, bytes that the verifier predicts) on this rank."""
    found = {}
    for name in ("gpipe", "1f1b", "interleaved"):
        step, schedule = our_step(name)
        with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
            before = Held.live
            y = Block(ours=True)(torch.randn(SPEC.shape, requires_grad=True))
            one = Held.live - before
            del y
            Held.peak = Held.live
            step()
        proof = verify(schedule, activation=(one,) * schedule.num_stages)
        found[name] = (Held.peak, proof.peak_activations[dist.get_rank()])
    return found


def rank_main(rank: int, store: str, rounds: int, results: str) -> None:
    """One rank of the measurement; rank 0 leaves the results in a file."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    document = {"host": host_times(rounds), "peaks": peaks()}
    if rank == 0:
        Path(results).write_text(json.dumps(document))
    dist.barrier()
    dist.destroy_process_group()


def split_costs(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return, by number of blocks, (I + W) / full backward: our queue's and torch's, round by round."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    found: dict[str, dict[str, list[float]]] = {}
    grad = torch.randn(SPEC.shape)
    for blocks in (2, 4, 8, 16):
        mine = nn.Sequential(*(Block(ours=True) for _ in range(blocks)))
        theirs = copy.deepcopy(mine)
        for block in theirs:
            block.ours = False  # type: ignore[assignment]

        def timed(model: nn.Module, run: Callable[[Tensor, Tensor], None]) -> float:
            x = torch.randn(SPEC.shape, requires_grad=True)
            y = model(x)
            begin = time.process_time()
            run(x, y)
            took = time.process_time() - begin
            model.zero_grad()
            return took

        def full(x: Tensor, y: Tensor) -> None:
            y.backward(grad)

        def queued(x: Tensor, y: Tensor) -> None:
            queue = WeightQueue()
            with deferring(queue):
                y.backward(grad)
            queue.run()

        def peer(x: Tensor, y: Tensor, model: nn.Module = theirs) -> None:
            _, groups = stage_backward_input([y], [grad], [x], model.parameters())
            stage_backward_weight(model.parameters(), groups)

        ratios: dict[str, list[float]] = {"ours": [], "torch": []}
        for round_ in range(4 * rounds + 2):
            a, b = timed(mine, full), timed(mine, queued)
            c, d = timed(theirs, full), timed(theirs, peer)
            if round_ > 1:
                ratios["ours"].append(b / a)
                ratios["torch"].append(d / c)
        found[str(blocks)] = ratios
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Return the median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high}


def measure(rounds: int) -> dict[str, Any]:
    """Return all figures."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = f"{folder}/results.json"
        mp.start_processes(rank_main, (f"{folder}/store", rounds, results), nprocs=RANKS, start_method="spawn")  # type: ignore[attr-defined]
        ranks = json.loads(Path(results).read_text())
    host = {}
    for name, times in ranks["host"].items():
        ratios = [b / a for a, b in zip(times["ours"], times["torch"], strict=True)]
        host[name] = {
            "ours_us": 1e6 * statistics.median(times["ours"]),
            "torch_us": 1e6 * statistics.median(times["torch"]),
            "torch_over_ours": spread(ratios),
        }
    split = {blocks: {who: spread(values) for who, values in both.items()} for blocks, both in split_costs(rounds).items()}
    memory = {
        name: {"measured": peak, "predicted": wanted, "difference": peak / wanted - 1}
        for name, (peak, wanted) in ranks["peaks"].items()
    }
    return {"host_per_chunk_microbatch": host, "split_over_full_backward": split, "activation_bytes": memory}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    found = measure(5 if options.quick else 15)
    if options.json:
        json.dump(found, sys.stdout)
        sys.stdout.write("\n")
        return
    print("host CPU time of a (chunk, microbatch), forward and backward, rank 0 of 2, m = 32")
    for name, row in found["host_per_chunk_microbatch"].items():
        r = row["torch_over_ours"]
        print(
            f"  {name:12s} ours {row['ours_us']:6.0f} us, torch {row['torch_us']:6.0f} us, "
            f"torch / ours {r['median']:.2f} [{r['low']:.2f}-{r['high']:.2f}]"
        )
    print("I + W over a full backward, by blocks in the stage")
    for blocks, row in found["split_over_full_backward"].items():
        texts = [f"{who} {v['median']:.2f} [{v['low']:.2f}-{v['high']:.2f}]" for who, v in row.items()]
        print(f"  {blocks:>3s} blocks: {', '.join(texts)}")
    print("activations kept at the peak, rank 0: measured, predicted by the verifier")
    for name, row in found["activation_bytes"].items():
        print(f"  {name:12s} {row['measured']:,} bytes, {row['predicted']:,.0f}: {100 * row['difference']:+.1f} %")


if __name__ == "__main__":
    main()
