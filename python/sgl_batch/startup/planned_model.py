"""Reads what the planner needs of a model, from its config and the headers of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sgl_batch.checkpoint.model_directory import cached_directory, model_config
from sgl_batch.checkpoint.tensors import tensors_of
from sgl_batch.core.model_refusals import Config, number_type, text_part
from sgl_batch.errors import ConfigError
from sgl_batch.planner.model_layers import ModelLayers, model_layers
from sgl_batch.planner.needs import ITEM_BYTES, Model


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model for the planner.

    Attributes:
        directory: Where it is.
        text: The text part of its config.
        dtype: The number type in which an engine loads it.
        weight_dtype: That of its weights, as --cpu-weight-dtype has it.
    """

    directory: Path
    text: Config
    dtype: str
    weight_dtype: str

    @cached_property
    def layers(self) -> ModelLayers:
        """The numbers on which costs depend. Raises ConfigError for a config that lacks them."""
        item_bytes = ITEM_BYTES[self.dtype]
        weight_bytes = 1 if self.weight_dtype == "int8" else item_bytes
        return model_layers(self.text, item_bytes=item_bytes, weight_bytes=weight_bytes, stored_bytes=item_bytes)

    @cached_property
    def files(self) -> Model:
        """The sizes of its tensors. Raises ConfigError where its weights have no headers."""
        tensors = tensors_of(self.directory, self.layers.num_layers, cpu_weights=self.weight_dtype)
        return Model(config=self.text, tensors=tensors, dtype=self.dtype)


def model_directory(name: str, revision: str | None = None) -> Path:
    """Return the directory of a model that is named by it, or is in the hub's cache. Raises ConfigError."""
    directory = Path(name) if Path(name).is_dir() else cached_directory(name, revision)
    if directory is None:
        raise ConfigError(f"there is no model directory {name}, and no model of that name in the hub's cache here")
    return directory


def whole_config(directory: Path) -> Config:
    """Return a model's config. Raises ConfigError."""
    config = model_config(str(directory))
    if config is None:
        raise ConfigError(f"{directory} has no config.json that can be read; name a model's directory")
    return config


def read_model(name: str, *, dtype: str, weight_dtype: str, revision: str | None = None) -> PlannedModel:
    """Read a model in a directory, or in the hub's cache. Raises ConfigError where it is not here.

    `dtype`: as --dtype has it.
    """
    directory = model_directory(name, revision)
    whole = whole_config(directory)
    return PlannedModel(
        directory=directory, text=text_part(whole), dtype=number_type(whole, dtype), weight_dtype=weight_dtype
    )
