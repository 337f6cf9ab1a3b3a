"""How fast are the operators, provider against provider, on this machine?

    python benchmarks/ops.py [--dtype bf16 fp32] [--rounds 9]

For each operator, all usable providers run interleaved, forward and backward, at the shapes of the 58 M Llama
(2048 tokens, hidden 512, ffn 1536, 8 heads on 4, vocabulary 32,000). Prints the median and the range of the time, and
the speed against the reference.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from sennit import ops

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def cases(dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Return the work of each operator: forward and backward once."""
    b, s, h, f, n, g, d, v = 4, 512, 512, 1536, 8, 4, 64, 32_000

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype).requires_grad_()

    x, delta, weight = new(b, s, h), new(b, s, h), torch.ones(h, dtype=dtype).requires_grad_()
    gate, up = new(b, s, f), new(b, s, f)
    q, k, value = new(b, s, n, d), new(b, s, g, d), new(b, s, g, d)
    angles = torch.rand(s, d // 2)
    cos, sin = angles.cos(), angles.sin()
    w1, w2 = new(f, h), new(f, h)
    head, labels = new(v, h), torch.randint(0, v, (b * s,))
    masters = [torch.randn(4 << 20) for _ in range(4)]
    grads = [torch.randn(4 << 20).to(dtype) for _ in range(4)]
    moments = [torch.zeros(4 << 20) for _ in range(8)]
    shadows: list[torch.Tensor | None] = [m.to(dtype) if dtype != torch.float32 else None for m in masters]

    def both(fn: Callable[[], torch.Tensor]) -> Callable[[], None]:
        out = fn()
        gradient = torch.randn_like(out)
        return lambda: fn().backward(gradient)

    def adamw() -> None:
        ops.adamw_(
            masters,
            grads,
            moments[:4],
            moments[4:],
            shadows,
            lr=1e-4,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decays=[0.1] * 4,
            step=2,
            grad_scale=0.5,
        )

    return {
        "rms_norm": both(lambda: ops.rms_norm(x, weight, 1e-5)),
        "add_rms_norm": both(lambda: ops.add_rms_norm(x, delta, weight, 1e-5)[1]),
        "swiglu": both(lambda: ops.swiglu(gate, up)),
        "rope_attention": both(lambda: ops.rope_attention(q, k, value, cos, sin)),
        "linears": both(lambda: torch.cat(ops.linears(x, (w1, w2), (None, None)), -1)),
        "linear_cross_entropy": both(lambda: ops.linear_cross_entropy(x.flatten(0, 1), head, labels, vocab_size=v)),
        "adamw_": adamw,
        "sum_of_squares": lambda: ops.sum_of_squares(grads),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    print("| operator | dtype | provider | ms median [range] | times the reference's speed |\n| --- | --- | --- | --- | --- |")
    for name in args.dtype:
        for op, work in cases(DTYPES[name]).items():
            usable = [row for row, fits, _ in ops.explain(op, "cpu", DTYPES[name]) if fits]
            times: dict[str, list[float]] = {provider: [] for provider in usable}
            for turn in range(args.rounds + 1):
                for provider in usable:
                    with ops.force({op: provider}):
                        begin = time.perf_counter()
                        work()
                        if turn:  # the first round warms up
                            times[provider].append(1e3 * (time.perf_counter() - begin))
            base = statistics.median(times["reference"])
            for provider, seconds in times.items():
                middle = statistics.median(seconds)
                spread = f"{middle:.2f} [{min(seconds):.2f}-{max(seconds):.2f}]"
                print(f"| {op} | {name} | {provider} | {spread} | {base / middle:.2f} |")


if __name__ == "__main__":
    main()
