"""The protocol between `train_dense.py` and a contestant, and the workload all of them share.

A contestant is started once, builds its model, warms up, prints `ready` and then answers each line `go N` on stdin
with one JSON line: the seconds of N steps. It computes only when asked, so contestants interleave in one run.
Only the standard library and torch are imported here.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable

import torch


def arguments() -> argparse.Namespace:
    """Parse what `train_dense.py` passes to every contestant."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=("bf16", "fp32"), required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--matmul", choices=("highest", "high", "medium"), default="highest")
    for name in ("hidden", "layers", "heads", "kv-heads", "ffn", "vocab"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision(args.matmul)
    torch.manual_seed(0)
    return args


def batches(args: argparse.Namespace) -> Callable[[], torch.Tensor]:
    """Return a function that draws random tokens [b, s + 1]."""
    generator = torch.Generator().manual_seed(1)
    return lambda: torch.randint(0, args.vocab, (args.batch, args.seq + 1), generator=generator)


def serve(step: Callable[[], float], *, warmup: int = 3) -> None:
    """Warm up, then answer requests until stdin ends. `step` runs one whole optimizer step and returns its loss."""
    out = sys.stdout
    for _ in range(warmup):
        loss = step()
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        count = int(line.split()[1])
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            loss = step()
            seconds.append(time.perf_counter() - begin)
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "loss": loss, "peak_memory_bytes": rss}), file=out, flush=True)
