"""Recipe files: inheritance, and what is wrong with a file is said with its name and place."""

from __future__ import annotations

from pathlib import Path

import pytest

from sennit.errors import ConfigError
from sennit.recipe import load_recipe, parse_recipe


def test_a_file_may_build_on_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "tiny"\n[train]\nsteps = 7\n')
    recipe = load_recipe(str(path), {"lr.peak": "1e-4"})
    assert (recipe.train.steps, recipe.lr.peak, recipe.model.hidden_size) == (7, 1e-4, 256)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train\nsteps = 3", ["line 1"]),
        ('base = "tiny"\n[train]\nstepz = 3', ["train.stepz", "train.steps"]),
        ('base = "tiny"\n[trains]\nsteps = 3', ["trains"]),
        ('base = "tiny"\n[train]\nsteps = "3"', ["train.steps", "wrong type"]),
        ('base = "tiniest"', ["tiniest", "tiny"]),
        ("[train]\nsteps = 3", ["model"]),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path), {})
    for word in [*words, "mine.toml"]:
        assert word in str(caught.value), str(caught.value)


def test_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="llama3-8b"):
        load_recipe("llama3-9b", {})


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.toml"):
        load_recipe(str(tmp_path / "nowhere.toml"), {})


def test_recipes_are_values() -> None:
    recipe = load_recipe("tiny", {})
    assert recipe == parse_recipe(recipe.to_toml())
    assert recipe.replace(train__steps=3).train.steps == 3
    assert recipe.train.steps == 300
