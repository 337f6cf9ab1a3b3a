"""Layers: tensor-parallel linear maps, embedding, norm, attention, mlp, and the decoder layer made of segments."""

from sennit.nn.attention import Attention, Context, LayerCache
from sennit.nn.config import DecoderConfig, RopeScaling
from sennit.nn.dropout import DropoutKey
from sennit.nn.layer import DecoderLayer
from sennit.nn.linear import ColumnLinear, Head, ReplicatedHeadsLinear, RowLinear, VocabEmbedding
from sennit.nn.mlp import SwiGLU
from sennit.nn.norm import RMSNorm
from sennit.nn.parameter import Init, initialise, leaf_of, local, new_parameter, parameter_inits
from sennit.nn.rope import Rope, rope_frequencies
from sennit.nn.segments import Recompute, Segment, State, regions, run_segments

__all__ = [
    "Attention",
    "ColumnLinear",
    "Context",
    "DecoderConfig",
    "DecoderLayer",
    "DropoutKey",
    "Head",
    "Init",
    "LayerCache",
    "RMSNorm",
    "Recompute",
    "ReplicatedHeadsLinear",
    "Rope",
    "RopeScaling",
    "RowLinear",
    "Segment",
    "State",
    "SwiGLU",
    "VocabEmbedding",
    "initialise",
    "leaf_of",
    "local",
    "new_parameter",
    "parameter_inits",
    "regions",
    "rope_frequencies",
    "run_segments",
]
