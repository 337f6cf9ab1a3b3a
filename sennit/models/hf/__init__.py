"""Exchange with Hugging Face: names, configurations, reading and writing of weights."""

from sennit.models.hf.config import config_from_hf, config_to_hf, hf_family, load_hf_json, model_section
from sennit.models.hf.init import check_same_model, init_weights, is_hf_folder, load_checkpoint_weights
from sennit.models.hf.names import from_hf_name, to_hf_name
from sennit.models.hf.read import HFWeights, check_weights, parameter_shapes, read_into
from sennit.models.hf.write import EXPORT_DTYPES, check_free, write_hf

__all__ = [
    "EXPORT_DTYPES",
    "HFWeights",
    "check_free",
    "check_same_model",
    "check_weights",
    "config_from_hf",
    "config_to_hf",
    "from_hf_name",
    "hf_family",
    "init_weights",
    "is_hf_folder",
    "load_checkpoint_weights",
    "load_hf_json",
    "model_section",
    "parameter_shapes",
    "read_into",
    "to_hf_name",
    "write_hf",
]
