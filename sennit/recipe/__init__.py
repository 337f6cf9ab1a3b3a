"""Recipes: a run as one frozen, validated value. Nothing here imports torch."""

from sennit.recipe.check import check_run
from sennit.recipe.layout import ParallelSection, Precision, RecomputeMode
from sennit.recipe.load import DEFAULT_PRESET, load_recipe, parse_recipe, preset_names, preset_text
from sennit.recipe.model import DataSection, Family, ModelSection, RopeScalingKind
from sennit.recipe.recipe import Recipe
from sennit.recipe.training import OptimizerKind, Schedule, TrainSection

__all__ = [
    "DEFAULT_PRESET",
    "DataSection",
    "Family",
    "ModelSection",
    "OptimizerKind",
    "ParallelSection",
    "Precision",
    "Recipe",
    "RecomputeMode",
    "RopeScalingKind",
    "Schedule",
    "TrainSection",
    "check_run",
    "load_recipe",
    "parse_recipe",
    "preset_names",
    "preset_text",
]
