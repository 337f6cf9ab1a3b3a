"""The device table and its CPU entry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sennit.device import DEVICES, get_device, load_device
from sennit.device import cpu as cpu_module
from sennit.device.base import AcceleratorDevice
from sennit.device.cores import available_cores, threads_per_rank
from sennit.device.cuda import Cuda
from sennit.device.musa import Musa
from sennit.errors import DeviceError


def test_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(DeviceError, match="cpu, cuda, musa.*Did you mean cuda"):
        get_device("cudda")


def test_absent_device_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    with pytest.raises(DeviceError, match="cuda cannot be used here: this PyTorch .* sees no cuda device"):
        get_device("cuda")
    assert get_device().name == "cpu"


def test_device_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENNIT_DEVICE", "cpu")
    assert get_device().name == "cpu"


@pytest.mark.parametrize("name", DEVICES)
def test_entries_are_complete(name: str) -> None:
    device = load_device(name)
    assert device.name == device.torch_type == name
    assert device.comm_backend in ("gloo", "nccl", "mccl")
    assert set(device.fast_dtypes) <= {"bf16", "fp32"} and device.fast_dtypes
    assert device.resolve_dtype("fp64") == "fp64"
    assert device.resolve_dtype("auto") == ("bf16" if "bf16" in device.fast_dtypes else "fp32")


@pytest.mark.parametrize(
    ("entry", "model", "tflops"),
    [
        (Cuda(), "NVIDIA A100-SXM4-80GB", 312.0),
        (Cuda(), "NVIDIA H100 80GB HBM3", 989.4),
        (Cuda(), "NVIDIA H100 PCIe", 756.0),
        (Cuda(), "NVIDIA H200", 989.4),
        (Cuda(), "NVIDIA H20", 148.0),
        (Cuda(), "NVIDIA B200", 2250.0),
        (Cuda(), "Some Other GPU", None),
        (Musa(), "MTT S4000", 98.0),
        (Musa(), "MTT S5000", None),
    ],
)
def test_peak_rate_by_model(
    entry: AcceleratorDevice, model: str, tflops: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(entry), "description", lambda self: model)
    assert entry.peak_flops("bf16") == (None if tflops is None else tflops * 1e12)
    assert entry.peak_flops("int3") is None


def test_more_local_ranks_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match="--nproc 2"):
        Cuda().check_local_ranks(3)
    get_device("cpu").check_local_ranks(64)


def test_cpu_peak_is_the_best_of_a_few_measurements_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENNIT_CACHE", str(tmp_path))
    rates = iter([2.0, 5.0, 3.0])
    monkeypatch.setattr(cpu_module, "measure_gemm_rate", lambda dtype, threads: next(rates))
    assert [get_device("cpu").peak_flops("fp32") for _ in range(5)] == [2.0, 5.0, 5.0, 5.0, 5.0]
    (tmp_path / "cpu-peak.json").write_text("damaged")
    monkeypatch.setattr(cpu_module, "measure_gemm_rate", lambda dtype, threads: 7.0)
    assert get_device("cpu").peak_flops("fp32") == 7.0
    with pytest.raises(DeviceError, match="int3"):
        get_device("cpu").peak_flops("int3")


def test_cpu_rate_is_measured_and_threads_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_module, "SHAPES", ((64, 64, 64),))
    before = torch.get_num_threads()
    assert cpu_module.measure_gemm_rate(torch.float32, threads=1) > 1e6
    assert torch.get_num_threads() == before


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_cpu_memory_peak_follows_and_starts_again() -> None:
    code = (
        "import json; from sennit.device import get_device; d = get_device('cpu'); a = d.peak_memory_bytes(); "
        "x = bytearray(2**28); b = d.peak_memory_bytes(); del x; c = d.peak_memory_bytes(); d.reset_peak_memory(); "
        "print(json.dumps([a, b, c, d.peak_memory_bytes(), d.memory_total_bytes()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, held, freed, again, total = json.loads(done.stdout)
    assert before + 2**28 - 2**24 <= held < total and abs(freed - held) < 2**22  # the kernel counts in batches
    assert again < held - 2**27 or abs(again - held) < 2**22, "where the kernel cannot reset, the peak stays"


def test_a_rank_flushes_denormals_and_takes_its_share_of_the_cores() -> None:
    code = (
        "import torch; from sennit.device import get_device; get_device('cpu').prepare_rank(local_rank=0); "
        "print(torch.get_num_threads(), float((torch.full((4,), 1e-30) * 1e-10).sum()))"
    )
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | {"LOCAL_WORLD_SIZE": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(threads_per_rank(2)), "0.0"]


def test_cores() -> None:
    assert available_cores() >= 1
    assert threads_per_rank(1) == available_cores() and threads_per_rank(10**6) == 1


def test_control_groups_limit_cores_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sennit.device import cores

    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    monkeypatch.setattr(cores, "_cgroup_folders", lambda controller: [tmp_path / controller])
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("1000000\n")
    assert cores.available_cores() == 1 and cores.memory_limit_bytes() == 1000000
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert cores.memory_limit_bytes() > 2**28
