"""Sennit: hybrid-parallel training of large transformers on CPU, CUDA and MUSA devices."""

__version__ = "0.1.0"
