"""Reads the profile of a model that `sgl-batch plan --profile` has kept, with the numbers of the model."""

from __future__ import annotations

from pathlib import Path

from sgl_batch.errors import ConfigError
from sgl_batch.planner.model_layers import ModelLayers
from sgl_batch.planner.samples import Profile
from sgl_batch.startup.kept_profile import profile_path, read_profile
from sgl_batch.startup.planned_model import read_model


def kept_profile(model: Path, file: Path | None) -> tuple[Profile, ModelLayers]:
    """Return the profile in `file`, or the one in the user's cache. Raises ConfigError if there is none."""
    read = read_model(str(model), dtype="auto", weight_dtype="auto")
    path = file or profile_path(model, dtype=read.dtype, weight_dtype=read.weight_dtype)
    profile = read_profile(path)
    if profile is None:
        raise ConfigError(f"there is no profile {path}; make one with sgl-batch plan --profile")
    return profile, read.layers
