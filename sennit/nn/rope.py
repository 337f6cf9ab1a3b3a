"""Rotary position embedding: frequencies and the cos/sin tables that attention uses."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sennit.nn.config import DecoderConfig, RopeScaling


def rope_frequencies(head_size: int, theta: float, scaling: RopeScaling, max_position: int = 0) -> tuple[Tensor, float]:
    """Return (inverse frequencies [head_size / 2] float32, factor on cos and sin).

    Source: RoFormer (arXiv 2104.09864); Llama 3.1 scaling as published with its weights; YaRN (arXiv 2309.00071,
    eq. 14-23, with the ramp between the dimensions that turn beta_fast and beta_slow times). `max_position` is the
    fallback for `original_max_position` = 0.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
    frequencies = 1.0 / (theta**exponents)
    original = scaling.original_max_position or max_position
    if scaling.kind == "linear":
        return frequencies / scaling.factor, scaling.attention_factor or 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling, original), scaling.attention_factor or 1.0
    if scaling.kind == "yarn":
        derived = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1.0 else 1.0
        return _yarn(frequencies, theta, head_size, scaling, original), scaling.attention_factor or derived
    return frequencies, 1.0


def _llama3(frequencies: Tensor, scaling: RopeScaling, original: int) -> Tensor:
    wavelength = 2 * math.pi / frequencies
    low = original / scaling.low_freq_factor
    high = original / scaling.high_freq_factor
    smooth = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    scaled = torch.where(wavelength > low, frequencies / scaling.factor, frequencies)
    between = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    return torch.where((wavelength >= high) & (wavelength <= low), between, scaled)


def _yarn(frequencies: Tensor, theta: float, head_size: int, scaling: RopeScaling, original: int) -> Tensor:
    def dimension(turns: float) -> float:
        return head_size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), head_size - 1)
    span = max(high - low, 0.001)
    ramp = ((torch.arange(head_size // 2).float() - low) / span).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


class Rope:
    """cos and sin tables for a decoder, grown on demand and kept per device.

    Tables are float32, or float64 for a float64 model, whatever the activations' dtype.
    """

    def __init__(self, config: DecoderConfig) -> None:
        self._frequencies, self._factor = rope_frequencies(
            config.head_size, config.rope_theta, config.rope_scaling, config.max_position
        )
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(
        self, length: int, *, device: torch.device, dtype: torch.dtype, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cos, sin: [s, d/2] for positions 0..length-1, or [b, s, d/2] for `positions` [b, s] < length."""
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        tables = self._tables.get((device, dtype))
        if tables is None or tables[0].shape[0] < length:
            size = 1 << max(length - 1, 1).bit_length()
            angles = torch.outer(torch.arange(size).float(), self._frequencies)
            tables = tuple((fn(angles) * self._factor).to(device, dtype) for fn in (torch.cos, torch.sin))
            self._tables[device, dtype] = tables  # type: ignore[assignment]
        cos, sin = tables  # type: ignore[misc]
        if positions is None:
            return cos[:length], sin[:length]
        return cos[positions], sin[positions]


__all__ = ["Rope", "rope_frequencies"]
