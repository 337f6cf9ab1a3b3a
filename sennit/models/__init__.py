"""Model families and their assembly from layers."""

from sennit.models.build import DTYPES, build_decoder, build_parts, decoder_config, gradient_leaves, hold_in
from sennit.models.decoder import Decoder, Part
from sennit.models.staged import StagedDecoder

__all__ = [
    "DTYPES",
    "Decoder",
    "Part",
    "StagedDecoder",
    "build_decoder",
    "build_parts",
    "decoder_config",
    "gradient_leaves",
    "hold_in",
]
