"""How fast is one training step of a 58 M Llama on this machine, against the peers?

    python benchmarks/train_dense.py --dtype bf16 fp32 --rounds 5

Makes an environment for each peer (benchmarks/.envs/NAME, pinned versions), then runs rounds: in each round every
contestant runs a few steps, one after the other, so that what disturbs the machine disturbs all of them. The figures
are ratios of step times within a round: their median and range over the rounds. Sennit runs as `sennit train` with
the preset llama-58m, a process per round, as any user would run it; its first steps, like the peers' warm-up, are not
counted. MFU is counted against the best matrix-product rate seen in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MODEL = dict(hidden=512, layers=8, heads=8, kv_heads=4, ffn=1536, vocab=32000)
PACKAGES = {
    "hf": ["torch==2.13.0", "transformers==5.24.0"],
    "litgpt": ["torch==2.13.0", "litgpt==0.5.13"],
    "titan": ["torch==2.13.0", "torchtitan==0.3.0", "triton"],
}
SCRIPTS = {"hf": "hf.py", "litgpt": "litgpt_peer.py", "titan": "titan.py"}
CONTESTANTS = ("sennit", "hf", "hf_compile", "litgpt", "litgpt_compile", "titan", "titan_compile")
WARMUP_STEPS = 3


@dataclass
class Result:
    """What a contestant did: step seconds of each round, and its peak memory."""

    rounds: list[list[float]] = field(default_factory=list)
    peak_memory_bytes: int = 0
    error: str = ""

    def medians(self) -> list[float]:
        return [statistics.median(steps) for steps in self.rounds]


def environment(name: str, folder: Path) -> Path:
    """Make (once) the environment of a peer and return its Python."""
    root = folder / name
    python = root / "bin" / "python"
    stamp = root / ".ready"
    wanted = " ".join(PACKAGES[name])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"making the environment of {name}: {wanted}", file=sys.stderr)
    shutil.rmtree(root, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(root)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *PACKAGES[name]], check=True, stdout=sys.stderr)
    stamp.write_text(wanted)
    return python


class Peer:
    """A peer's process, kept alive over the rounds."""

    def __init__(self, name: str, args: argparse.Namespace, dtype: str) -> None:
        base, _, compiled = name.partition("_")
        command = [str(environment(base, args.envs)), str(HERE / "peers" / SCRIPTS[base]), "--dtype", dtype]
        command += ["--seq", str(args.seq), "--batch", str(args.batch), "--threads", str(args.threads)]
        command += ["--matmul", args.matmul]
        for key, value in MODEL.items():
            command += [f"--{key.replace('_', '-')}", str(value)]
        if compiled:
            command.append("--compile")
        self._log = tempfile.TemporaryFile("w+")
        env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=env
        )
        self._read_until("ready")

    def _read_until(self, word: str | None) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if (word is None and line.startswith("{")) or line.strip() == word:
                return line
        self._log.seek(0)
        raise RuntimeError("".join(self._log.readlines()[-12:]))

    def run(self, steps: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"go {steps}\n")
        self._process.stdin.flush()
        return json.loads(self._read_until(None))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Sennit:
    """`sennit train llama-58m`, a process per round."""

    def __init__(self, args: argparse.Namespace, dtype: str) -> None:
        self.args, self.dtype = args, dtype
        self.folder = Path(tempfile.mkdtemp(prefix="sennit-bench-"))
        self.runs = 0

    def run(self, steps: int) -> dict[str, Any]:
        args, run_dir = self.args, self.folder / f"run-{self.runs}"
        self.runs += 1
        count = steps + WARMUP_STEPS
        command = [sys.executable, "-m", "sennit", "train", "llama-58m", "--json", "--run.dir", str(run_dir)]
        command += ["--precision.dtype", self.dtype, "--train.steps", str(count), "--train.seq_len", str(args.seq)]
        command += ["--train.micro_batch_size", str(args.batch), "--train.global_batch_size", str(args.batch)]
        command += ["--log.tensorboard", "false"]
        env = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode != 0:
            raise RuntimeError("".join(done.stderr.splitlines(keepends=True)[-12:]))
        summary = json.loads(done.stdout)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        seconds = [line["step_seconds"] for line in lines if line["kind"] == "step"][WARMUP_STEPS:]
        shutil.rmtree(run_dir)
        return {"seconds": seconds, "loss": summary["loss_last"], "peak_memory_bytes": summary["peak_memory_bytes"]}

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def gemm_rate(dtype: str, threads: int) -> float:
    """Return the best matrix-product rate of a few large shapes, FLOP/s."""
    import torch

    torch.set_num_threads(threads)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    best = 0.0
    for rows, inner, columns in ((2048, 1536, 512), (2048, 512, 3072), (4096, 4096, 1024)):
        a, b = torch.randn(rows, inner).to(kind), torch.randn(columns, inner).to(kind)
        out = torch.empty(rows, columns, dtype=kind)
        for _ in range(12):
            begin = time.perf_counter()
            torch.mm(a, b.mT, out=out)
            best = max(best, 2.0 * rows * inner * columns / (time.perf_counter() - begin))
    return best


def model_flops(args: argparse.Namespace) -> float:
    """Model FLOPs of a step: 6 a weight and token, attention over the visible half; embedding look-up free."""
    h, d = MODEL["hidden"], MODEL["hidden"] // MODEL["heads"]
    per_layer = 2 * h * h + 2 * h * MODEL["kv_heads"] * d + 3 * h * MODEL["ffn"]
    weights = MODEL["layers"] * per_layer + MODEL["vocab"] * h
    per_token = 6.0 * weights + 12.0 * MODEL["layers"] * h * (args.seq + 1) / 2
    return per_token * args.batch * args.seq


def compare(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Run all rounds of one dtype and return the figures."""
    results: dict[str, Result] = {name: Result() for name in args.contestants}
    running: dict[str, Any] = {}
    for name in args.contestants:
        try:
            running[name] = Sennit(args, dtype) if name == "sennit" else Peer(name, args, dtype)
        except Exception as error:
            results[name].error = str(error)
            print(f"{name}: cannot run: {error}", file=sys.stderr)
    peak = 0.0
    for index in range(args.rounds):
        peak = max(peak, gemm_rate(dtype, args.threads))
        for name, contestant in running.items():
            answer = contestant.run(args.steps)
            results[name].rounds.append(answer["seconds"])
            results[name].peak_memory_bytes = max(results[name].peak_memory_bytes, answer["peak_memory_bytes"])
            middle = statistics.median(answer["seconds"])
            print(f"{dtype} round {index + 1}: {name:15s} {middle:.3f} s/step", file=sys.stderr)
    for contestant in running.values():
        contestant.close()
    return figures(results, args, dtype, peak)


def figures(results: dict[str, Result], args: argparse.Namespace, dtype: str, peak: float) -> dict[str, Any]:
    """Turn step times into rates, paired ratios and memory."""
    flops = model_flops(args)
    mine = results.get("sennit")
    rows = {}
    for name, result in results.items():
        if not result.rounds:
            rows[name] = {"error": result.error}
            continue
        medians = result.medians()
        middle = statistics.median(medians)
        row: dict[str, Any] = {
            "seconds_per_step": middle,
            "tokens_per_second": args.batch * args.seq / middle,
            "mfu": flops / middle / peak,
            "peak_memory_bytes": result.peak_memory_bytes,
        }
        if mine is not None and mine.rounds and name != "sennit":
            ratios = [theirs / ours for theirs, ours in zip(medians, mine.medians(), strict=False)]
            row["sennit_is_faster_by"] = [statistics.median(ratios), min(ratios), max(ratios)]
            row["sennit_memory_ratio"] = mine.peak_memory_bytes / result.peak_memory_bytes
        rows[name] = row
    return {
        "dtype": dtype,
        "seq": args.seq,
        "batch": args.batch,
        "matmul": args.matmul,
        "threads": args.threads,
        "gemm_peak_flops": peak,
        "model_flops": flops,
        "rounds": args.rounds,
        "steps": args.steps,
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    lines = [
        f"{result['dtype']}, seq {result['seq']}, batch {result['batch']}, {result['threads']} threads, "
        f"{result['rounds']} rounds of {result['steps']} steps; GEMM peak {result['gemm_peak_flops'] / 1e12:.2f} TFLOP/s",
        "",
        "| contestant | s/step | tokens/s | MFU | peak RSS | Sennit is faster by (paired median [range]) | Sennit's memory |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in result["rows"].items():
        if "error" in row:
            last = row["error"].strip().splitlines()[-1:]
            lines.append(f"| {name} | cannot run: {' '.join(last)} | | | | | |")
            continue
        ratio = memory = ""
        if "sennit_is_faster_by" in row:
            middle, low, high = row["sennit_is_faster_by"]
            ratio, memory = f"**{middle:.2f}** [{low:.2f}-{high:.2f}]", f"{row['sennit_memory_ratio']:.2f} of it"
        lines.append(
            f"| {name} | {row['seconds_per_step']:.3f} | {row['tokens_per_second']:.0f} | {100 * row['mfu']:.1f} % "
            f"| {row['peak_memory_bytes'] / 2**20:.0f} MiB | {ratio} | {memory} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--matmul", choices=("highest", "high", "medium"), default="highest", help="peers' fp32 setting")
    parser.add_argument("--envs", type=Path, default=HERE / ".envs")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    args = parser.parse_args()
    results = [compare(args, dtype) for dtype in args.dtype]
    for result in results:
        print(table(result), end="\n\n")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
