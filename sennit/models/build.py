"""From a recipe to a model on a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sennit.mesh import Mesh
from sennit.models.decoder import Decoder, Part
from sennit.nn import DecoderConfig, Recompute, RopeScaling, leaf_of

if TYPE_CHECKING:
    from sennit.recipe import Recipe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def decoder_config(recipe: Recipe, vocab_size: int) -> DecoderConfig:
    """Resolve the recipe's model section; `vocab_size` is used where the recipe leaves it to the tokenizer."""
    model = recipe.model
    vocab = model.vocab_size or vocab_size
    multiple = model.vocab_multiple
    return DecoderConfig(
        family=str(model.family),
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_size=model.head_size or model.hidden_size // model.num_heads,
        ffn_size=model.ffn_size,
        vocab_size=vocab,
        padded_vocab_size=-(-vocab // multiple) * multiple,
        max_position=model.max_position or recipe.train.seq_len,
        norm_eps=model.norm_eps,
        rope_theta=model.rope_theta,
        rope_scaling=RopeScaling(**_plain(model.rope_scaling)),
        tie_embeddings=model.tie_embeddings,
        qkv_bias=model.qkv_bias,
        qk_norm=model.qk_norm,
        sliding_window=model.sliding_window,
        init_std=model.init_std,
        dropout=getattr(model, "dropout", 0.0),
    )


def _plain(section: Any) -> dict[str, Any]:
    return {key: str(value) if key == "kind" else value for key, value in section.model_dump().items()}


def build_decoder(
    config: DecoderConfig,
    mesh: Mesh,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int | None,
    recompute: Recompute = Recompute(),
    reshard_after_forward: bool = True,
) -> Decoder:
    """Build a decoder on `mesh`, shard it, allocate it on `device` and initialise it from `seed`.

    Parameters come in float32 (float64 for `dtype` float64), the precision they are trained in. With dp_shard > 1
    FSDP2 gathers and uses them in `dtype`; otherwise `hold_in` makes the compute copies. `seed` None leaves the
    values undefined for a load.
    """
    (model,) = build_parts(
        config,
        mesh,
        [Part.whole(config)],
        device=device,
        dtype=dtype,
        seed=seed,
        recompute=recompute,
        reshard_after_forward=reshard_after_forward,
    )
    return model


def build_parts(
    config: DecoderConfig,
    mesh: Mesh,
    parts: Sequence[Part],
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int | None,
    recompute: Recompute = Recompute(),
    reshard_after_forward: bool = True,
) -> list[Decoder]:
    """Build `parts` of a decoder, as `build_decoder` does the whole.

    Of tied embeddings a rank has one copy, that of its first part with one.
    """
    models: list[Decoder] = []
    for part in parts:
        tied = next((model.embedding for model in models if model.embedding is not None), None)
        model = Decoder(mesh, config, part, tied=tied if config.tie_embeddings else None)
        model.to(torch.float64 if dtype == torch.float64 else torch.float32)
        model.set_recompute(recompute)
        if mesh.shard.size > 1:
            shard_parameters(model, mesh, dtype=dtype, reshard_after_forward=reshard_after_forward)
        model.materialise(device, seed=seed)
        models.append(model)
    return models


def hold_in(model: Decoder, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Convert the parameters to `dtype` for compute and return the tensors they had before, by name: the masters.

    Under FSDP, or when the dtype is already right, parameters stay and are their own masters.
    """
    masters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if model.mesh.shard.size == 1:
        model.to(dtype)
    return masters


def shard_parameters(model: Decoder, mesh: Mesh, *, dtype: torch.dtype, reshard_after_forward: bool) -> None:
    """Apply FSDP2 to each layer and to the rest (embedding, norm, head), over the axis `mesh.shard`, with replicas of
    the shards over dp_replicate.

    Gradients are summed, not averaged: the loss is already divided by the token count of the global batch.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dims = (mesh.shard.name,) if mesh.dp_replicate.size == 1 else ("dp_replicate", mesh.shard.name)
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype in (torch.float32, torch.float64) else dtype,
        reduce_dtype=None if dtype in (torch.float32, torch.float64) else torch.float32,
        cast_forward_inputs=False,
    )
    data = mesh.submesh(*dims)
    layers = list(model.decoder_layers())
    for layer in layers:
        fully_shard(layer, mesh=data, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=data, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    for module in (*layers, model):
        module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
        module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]


def gradient_leaves(models: Sequence[Decoder]) -> dict[str, list[torch.Tensor]]:
    """Return, by parameter name, the plain tensors that collect this rank's gradients, for models without FSDP hooks.

    A tied embedding has one for each use: the sum over microbatches is then taken use by use, in every layout alike.
    """
    found: dict[str, list[torch.Tensor]] = {}
    for model in models:
        copies = not model.part.embeds and model.embedding is not None  # used as a head only
        for name, parameter in model.named_parameters():
            if not (copies and name == "embedding.weight"):
                found[name] = [leaf_of(parameter)]
    for model in models:
        if model.part.ends and model.head is None:
            leaf = leaf_of(model.tied_embedding.weight)
            model.tied_leaf = leaf.detach().requires_grad_(leaf.requires_grad)
            found.setdefault("embedding.weight", []).append(model.tied_leaf)
    return found


__all__ = [
    "DTYPES",
    "build_decoder",
    "build_parts",
    "decoder_config",
    "gradient_leaves",
    "hold_in",
    "shard_parameters",
]
