"""Starting a run from the weights of a Hugging Face model or of another run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sennit.errors import CheckpointError, ConfigError
from sennit.models.hf.config import config_from_hf, load_hf_json
from sennit.models.hf.read import HFWeights, read_into
from sennit.nn.config import DecoderConfig

if TYPE_CHECKING:
    from sennit.train.trainer import Trainer

logger = logging.getLogger(__name__)

_MUST_AGREE = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "ffn_size",
    "vocab_size",
    "tie_embeddings",
    "qkv_bias",
    "qk_norm",
)
_SHOULD_AGREE = ("norm_eps", "rope_theta", "rope_scaling", "sliding_window")


def is_hf_folder(path: Path) -> bool:
    """Tell whether `path` looks like a Hugging Face model folder (it has a config.json)."""
    return (path / "config.json").is_file()


def init_weights(trainer: Trainer, path: str | Path) -> None:
    """Load the weights at `path` into the trainer's masters and refresh its compute copies; nothing else is loaded.

    `path`: a Hugging Face folder, a checkpoint or a run directory. Works under every layout: a rank reads its own part.
    Collective for a checkpoint. Raises ConfigError if the model at `path` has other sizes than the recipe's,
    CheckpointError if its files are missing or damaged.
    """
    folder = Path(path).expanduser()
    masters = {slot.name: slot.master for slot in trainer.slots}
    if is_hf_folder(folder):
        theirs = config_from_hf(load_hf_json(folder), where=str(folder / "config.json"))
        check_same_model(trainer.config, theirs, str(folder))
        with HFWeights(folder) as weights:
            read_into(weights, masters, trainer.config.vocab_size)
    elif folder.is_dir():
        load_checkpoint_weights(folder, masters, trainer.config)
    else:
        raise CheckpointError(
            f"model.init_from: there is no folder {folder}. Give a Hugging Face model folder, a run directory or a "
            f"folder checkpoints/step-N."
        )
    trainer.optimizer.refresh()


def load_checkpoint_weights(folder: Path, parameters: dict[str, Tensor], config: DecoderConfig) -> Path:
    """Load the weights of a checkpoint, or of the newest of a run, into `parameters` in place; return its folder.

    Values are converted to the parameters' dtype. Collective over all ranks, which share the verification and read
    their own parts. Raises ConfigError if the model has other sizes than `config`, CheckpointError if it is damaged.
    """
    from sennit import checkpoint
    from sennit.checkpoint.storage import read_state
    from sennit.models.build import decoder_config
    from sennit.recipe import parse_recipe

    group = checkpoint.new_checkpoint_group()
    try:
        path = checkpoint.resolve(folder, group)
        if path == folder:  # `resolve` has verified one that it found itself
            checkpoint.verify(path, group=group)
    finally:
        if group is not None:
            torch.distributed.destroy_process_group(group)
    meta = checkpoint.read_meta(path)
    theirs = decoder_config(parse_recipe(meta["recipe"], str(path)), int(meta["vocab_size"]))
    check_same_model(config, theirs, str(path))
    if config.padded_vocab_size != theirs.padded_vocab_size:
        raise ConfigError(
            f"The checkpoint {path} has {theirs.padded_vocab_size} vocabulary rows, padding included, and the recipe's "
            f"model {config.padded_vocab_size}. Set model.vocab_multiple to the value there."
        )
    read_state({f"model.{name}": parameter.detach() for name, parameter in parameters.items()}, path, None)
    return path


def check_same_model(ours: DecoderConfig, theirs: DecoderConfig, where: str) -> None:
    """Raise ConfigError where weights of `theirs` do not fit `ours`; warn where they fit but compute something else."""
    wrong = [
        f"model.{name} is {getattr(ours, name)} here and {getattr(theirs, name)} there"
        for name in _MUST_AGREE
        if getattr(ours, name) != getattr(theirs, name)
    ]
    if wrong:
        raise ConfigError(
            f"The weights at {where} do not fit the recipe's model: {'; '.join(wrong)}. Set these fields to the values "
            f"there, or write a fitting recipe with `sennit import`."
        )
    for name in _SHOULD_AGREE:
        if getattr(ours, name) != getattr(theirs, name):
            logger.warning(
                "model.%s is %s here and %s at %s", name, getattr(ours, name), getattr(theirs, name), where
            )


__all__ = ["check_same_model", "init_weights", "is_hf_folder", "load_checkpoint_weights"]
