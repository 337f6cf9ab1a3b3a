"""Contradictory recipes and layouts are refused with their values, the rule and sizes that would work."""

from __future__ import annotations

import pytest

from sennit.errors import ConfigError
from sennit.recipe import check_run, load_recipe

REFUSED = {
    "world does not fit": (3, {"parallel.tp": "2"}, ["3 ranks", "multiple of 2"]),
    "product is not the world": (4, {"parallel.dp_shard": "2"}, ["4 ranks", "exactly 2", "--nproc 2"]),
    "heads over tp": (3, {"parallel.tp": "3"}, ["model.num_heads=4", "parallel.tp=3", "{1, 2, 4}"]),
    "kv heads over tp": (
        3,
        {"parallel.tp": "3", "model.num_heads": "6", "model.num_kv_heads": "2", "model.hidden_size": "384"},
        ["model.num_kv_heads=2", "{1, 2, 6}"],
    ),
    "ffn over tp": (4, {"parallel.tp": "4", "model.ffn_size": "702"}, ["model.ffn_size=702", "700 or 704"]),
    "vocabulary over tp": (4, {"parallel.tp": "4", "model.vocab_multiple": "2"}, ["model.vocab_multiple=2", "4"]),
    "sequence over tp": (4, {"parallel.tp": "4", "train.seq_len": "254"}, ["train.seq_len=254", "252 or 256"]),
    "batch over data ranks": (3, {}, ["train.global_batch_size=16", "15 or 18"]),
    "batch over micro batches": (1, {"train.micro_batch_size": "3"}, ["micro_batch_size", "15 or 18"]),
    "head size": (1, {"model.hidden_size": "254"}, ["model.hidden_size=254", "252 or 256"]),
    "odd head size": (1, {"model.head_size": "33"}, ["even", "34"]),
    "heads over kv heads": (1, {"model.num_kv_heads": "3"}, ["model.num_kv_heads=3", "{1, 2, 4}"]),
    "experts": (2, {"parallel.ep": "2"}, ["parallel.ep=2", "not available"]),
    "more stages than layers": (7, {"parallel.pp": "7"}, ["pp=7", "6 layers", "pp=6 or fewer"]),
    "more chunks than layers": (
        4,
        {"parallel.pp": "4", "parallel.schedule": "zb-v", "train.micro_batch_size": "1"},
        ["pp=4 x 2 virtual stages", "8 stages", "6 layers", "pp=3 or fewer"],
    ),
    "too few microbatches": (
        2,
        {"parallel.pp": "2", "parallel.schedule": "zb-v", "train.micro_batch_size": "8"},
        ["2 microbatches", "zb-v", "at least 3 (2 pp - 1)", "use 3"],
    ),
    "odd number of ranks for DualPipe": (
        3,
        {"parallel.pp": "3", "parallel.schedule": "dualpipe", "train.micro_batch_size": "1"},
        ["pp=3", "even", "pp=2 or 4", "dualpipev"],
    ),
    "odd number of microbatches for DualPipe": (
        2,
        {
            "parallel.pp": "2",
            "parallel.schedule": "dualpipe",
            "train.global_batch_size": "7",
            "train.micro_batch_size": "1",
        },
        ["7 microbatches", "multiple of 2", "use 6 or 8"],
    ),
    "interleaved microbatches": (
        3,
        {"parallel.pp": "3", "parallel.schedule": "interleaved", "train.micro_batch_size": "4"},
        ["4 microbatches", "multiple of pp = 3", "use 3 or 6"],
    ),
    "no division into microbatches fits": (
        3,
        {"parallel.pp": "3", "parallel.schedule": "interleaved"},
        ["train.global_batch_size=16", "interleaved", "multiple of pp = 3", "15 or 18"],
    ),
    "layers that do not add up": (
        2,
        {"parallel.pp": "2", "parallel.layers_per_stage": "3,2"},
        ["adds up to 5", "model.num_layers=6", "[3, 3]"],
    ),
    "layers for another number of stages": (
        2,
        {"parallel.pp": "2", "parallel.layers_per_stage": "2,2,2"},
        ["3 numbers", "2 stages", "[3, 3]"],
    ),
    "heads over Ulysses": (
        3,
        {"parallel.cp": "3", "parallel.cp_kind": "ulysses", "train.seq_len": "258"},
        ["parallel.cp=3", "4 heads", "{1, 2, 4}", "cp_kind=ring"],
    ),
    "sequence over a ring": (2, {"parallel.cp": "2", "train.seq_len": "254"}, ["train.seq_len=254", "252 or 256"]),
    "ring and Ulysses": (
        4,
        {"parallel.cp": "4", "parallel.cp_kind": "both", "parallel.cp_ulysses": "3"},
        ["cp_ulysses=3", "cp=4", "{1, 2, 4}"],
    ),
    "segments without selective": (1, {"recompute.segments": "mlp"}, ["recompute.segments", "selective"]),
    "unknown segment": (
        1,
        {"recompute.mode": "selective", "recompute.segments": "mlb"},
        ["recompute.segments", "mlb", "mlp"],
    ),
    "selective without segments": (1, {"recompute.mode": "selective"}, ["recompute.mode=selective"]),
    "yarn without length": (1, {"model.rope_scaling.kind": "yarn"}, ["original_max_position"]),
    "position": (1, {"model.max_position": "128"}, ["model.max_position=128", "train.seq_len=256"]),
    "vocabulary below the tokenizer's": (1, {"model.vocab_size": "1000"}, ["model.vocab_size=1000", "bpe:4096"]),
    "evaluation without data": (1, {"data.validation_fraction": "0"}, ["data.validation_fraction=0"]),
    "profile": (1, {"log.profile_steps": "5,3"}, ["log.profile_steps"]),
    "bpe": (1, {"data.tokenizer": "bpe:12"}, ["data.tokenizer", "260"]),
}


@pytest.mark.parametrize(("world", "overrides", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(world: int, overrides: dict[str, str], words: list[str]) -> None:
    recipe = load_recipe("tiny", overrides)
    with pytest.raises(ConfigError) as caught:
        check_run(recipe, world, fast_dtypes=())
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_all_problems_are_reported_at_once() -> None:
    recipe = load_recipe("tiny", {"model.num_kv_heads": "3", "model.head_size": "33", "parallel.pp": "7"})
    with pytest.raises(ConfigError) as caught:
        check_run(recipe, 7, fast_dtypes=())
    for part in ("model.num_kv_heads=3", "33", "pp=7", "(3)"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("world", "overrides", "shard", "micro"),
    [
        (1, {}, 1, 16),
        (4, {}, 4, 4),
        (4, {"parallel.tp": "2"}, 2, 8),
        (4, {"parallel.dp_replicate": "2"}, 2, 4),
        (2, {"train.micro_batch_size": "4"}, 2, 4),
    ],
)
def test_zeros_are_resolved(world: int, overrides: dict[str, str], shard: int, micro: int) -> None:
    resolved = check_run(load_recipe("tiny", overrides), world, fast_dtypes=())
    assert (resolved.parallel.dp_shard, resolved.train.micro_batch_size) == (shard, micro)
    assert resolved.precision.dtype == "fp32"


def test_a_short_trial_of_a_preset_needs_no_other_change() -> None:
    """`--train.steps 5` is enough to try a recipe whose warm-up is longer."""
    check_run(load_recipe("tiny", {"train.steps": "5"}), 1, fast_dtypes=())
