"""Values from the command line are read with the type of the field they replace."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sennit.errors import ConfigError
from sennit.recipe import load_recipe, parse_recipe


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("train.steps", "7", 7),
        ("lr.peak", "1e-3", 1e-3),
        ("lr.peak", "1", 1.0),
        ("model.tie_embeddings", "true", True),
        ("model.tie_embeddings", "off", False),
        ("run.dir", "a b/c", "a b/c"),
        ("log.profile_steps", "3,5", (3, 5)),
        ("log.profile_steps", "[3, 5]", (3, 5)),
        ("recompute.segments", "attention,mlp", ("attention", "mlp")),
        ("recompute.segments", "", ()),
        ("model.rope_scaling.kind", "yarn", "yarn"),
        ("data.source", "one/file.txt", "one/file.txt"),
        ("data.source", '["a", "b"]', ("a", "b")),
        ("precision.dtype", "fp64", "fp64"),
    ],
)
def test_text_becomes_a_value_of_the_field(path: str, text: str, value: object) -> None:
    found: object = load_recipe("tiny", {path: text})
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value


def test_entries_of_a_table() -> None:
    recipe = load_recipe("tiny", {"ops.provider.rms_norm": "reference", "ops.provider.swiglu": "torch"})
    assert recipe.ops.provider == {"rms_norm": "reference", "swiglu": "torch"}


def test_blend_is_a_list_of_tables() -> None:
    text = '[{path = "a", weight = 0.25}, {path = "b", weight = 0.75}]'
    assert [(e.path, e.weight) for e in load_recipe("tiny", {"data.blend": text}).data.blend] == [("a", 0.25), ("b", 0.75)]


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("train.stepz", "3", ["train.stepz", "train.steps"]),
        ("trian.steps", "3", ["trian.steps", "train.steps"]),
        ("steps", "3", ["train.steps"]),
        ("train.steps", "many", ["train.steps", "many", "whole number"]),
        ("train.steps", "1.5", ["train.steps", "1.5"]),
        ("train.steps", "0", ["train.steps", ">= 1"]),
        ("lr.peak", "nan", ["lr.peak"]),
        ("lr.schedule", "cosin", ["lr.schedule", "cosine"]),
        ("model.tie_embeddings", "maybe", ["model.tie_embeddings", "true or false"]),
        ("log.profile_steps", "a,b", ["log.profile_steps"]),
        ("model.rope_scaling.kin", "yarn", ["model.rope_scaling.kind"]),
    ],
)
def test_mistakes_name_the_field_and_the_fix(path: str, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("tiny", {path: text})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_several_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("tiny", {"train.stepz": "3", "lr.peak": "high"})
    assert "train.stepz" in str(caught.value) and "lr.peak" in str(caught.value)


@given(st.text(alphabet=string.printable, max_size=30), st.floats(1e-6, 1.0), st.integers(0, 2**63 - 1))
def test_any_text_and_number_survives_a_round_trip(text: str, rate: float, seed: int) -> None:
    recipe = load_recipe("tiny", {}).replace(log__sample_prompt=text, lr__peak=rate, run__seed=seed)
    assert parse_recipe(recipe.to_toml()) == recipe
