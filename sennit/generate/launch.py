"""`sennit generate` on several ranks of this machine."""

from __future__ import annotations

from sennit.device import Device
from sennit.generate.job import GenerateSettings, run_generate
from sennit.launch.local import launch


def launch_generate(settings: GenerateSettings, nproc: int, *, device: Device) -> None:
    """Run `run_generate` on `nproc` ranks and return when all have ended well. Raises as `sennit.launch.local.launch`."""
    launch(run_generate, settings, nproc=nproc, device=device)


__all__ = ["launch_generate"]
