"""Presets load, describe the published models and survive a round trip through TOML."""

from __future__ import annotations

import pytest

from sennit.models import decoder_config
from sennit.recipe import check_run, load_recipe, parse_recipe, preset_names, preset_text

PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-8b-128k": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
}
"""Trained parameters, as the models' cards on Hugging Face count them."""


@pytest.mark.parametrize("name", preset_names())
def test_preset_survives_a_round_trip(name: str) -> None:
    recipe = load_recipe(name, {})
    assert parse_recipe(recipe.to_toml()) == recipe


@pytest.mark.parametrize("name", preset_names())
def test_preset_runs_on_one_rank_or_a_node(name: str) -> None:
    """A preset fits one rank, or eight; dp_shard is resolved so that the layout is whole."""
    recipe = load_recipe(name, {})
    world = 1 if name.endswith("tiny") or name == "llama-58m" else 8
    world = max(world, recipe.parallel.pp * recipe.parallel.cp)
    resolved = check_run(recipe, world, fast_dtypes=("bf16",))
    p = resolved.parallel
    assert p.pp * p.dp_replicate * p.dp_shard * p.cp * p.tp == world
    assert resolved.precision.dtype == "bf16"
    assert resolved.train.micro_batch_size >= 1


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_full_size_presets_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert decoder_config(load_recipe(name, {}), 0).num_parameters == parameters


def test_every_preset_says_what_it_is_in_its_first_line() -> None:
    for name in preset_names():
        assert preset_text(name).startswith("# ")
