"""Model families and their assembly from layers."""

from sennit.models.build import DTYPES, build_decoder, decoder_config, hold_in
from sennit.models.decoder import Decoder

__all__ = ["DTYPES", "Decoder", "build_decoder", "decoder_config", "hold_in"]
