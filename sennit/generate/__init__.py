"""Text from a trained model."""

from sennit.generate.generate import generate, sample_text
from sennit.generate.sampling import Sampler, candidates
from sennit.generate.text import TextStream, decode_after

__all__ = ["Sampler", "TextStream", "candidates", "decode_after", "generate", "sample_text"]
