"""Reads the profile of a model that `sgl-batch plan --profile` has kept, with the numbers of the model."""

from __future__ import annotations

from pathlib import Path

from sgl_batch.checkpoint.model_directory import model_config
from sgl_batch.core.model_refusals import number_type, text_part
from sgl_batch.errors import ConfigError
from sgl_batch.planner.model_layers import ModelLayers, model_layers
from sgl_batch.planner.samples import Profile
from sgl_batch.startup.kept_profile import profile_path, read_profile


def kept_profile(model: Path, file: Path | None) -> tuple[Profile, ModelLayers]:
    """Return the profile in `file`, or the one in the user's cache. Raises ConfigError if there is none."""
    whole = model_config(str(model))
    if whole is None:
        raise ConfigError(f"{model} has no config.json")
    dtype = number_type(whole, "auto")
    path = file or profile_path(model, dtype=dtype, weight_dtype="auto")
    profile = read_profile(path)
    if profile is None:
        raise ConfigError(f"there is no profile {path}; make one with sgl-batch plan --profile")
    item_bytes = 4 if dtype == "float32" else 2
    return profile, model_layers(text_part(whole), item_bytes=item_bytes, weight_bytes=item_bytes)
