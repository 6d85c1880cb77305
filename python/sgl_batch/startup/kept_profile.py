"""Owns the profiles that are kept in the user's cache: where each lies, what it holds for, and how it is read.

The room `profiler` makes them.
"""

from __future__ import annotations

import json
from pathlib import Path

from sgl_batch.errors import ConfigError
from sgl_batch.planner.samples import Profile, check_machine, profile_of
from sgl_batch.startup.choice_cache import model_hash, versions
from sgl_batch.startup.hardware import hardware
from sgl_batch.user_cache import cache_directory, hashed_name, write_json


def machine_facts(model: Path, *, dtype: str, weight_dtype: str) -> dict[str, object]:
    """Return what a profile of a model holds for: this machine, the model's config, number types and versions."""
    facts = {**hardware(), "model_config": model_hash(str(model)), "dtype": dtype, "weight_dtype": weight_dtype}
    return {**facts, **{f"version_of_{name}": version for name, version in versions().items()}}


def profile_path(model: Path, *, dtype: str, weight_dtype: str) -> Path:
    """Return where the profile of a model is kept. The file says of which machine it is."""
    return cache_directory() / "profiles" / hashed_name([model_hash(str(model)), dtype, weight_dtype])


def read_profile(path: Path) -> Profile | None:
    """Return the profile of a file, or None where there is no file. Raises ConfigError for what is no profile."""
    try:
        return profile_of(json.loads(path.read_text(encoding="utf-8")), str(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = f"{path} cannot be read as a profile: {error}; make one with sgl-batch plan --profile"
        raise ConfigError(why) from error


def profile_that_holds(model: Path, *, dtype: str, weight_dtype: str, again: str) -> Profile:
    """Return the kept profile. Raises ConfigError with the reason why there is none that holds here.

    `again`: the command that makes one.
    """
    kinds = {"dtype": dtype, "weight_dtype": weight_dtype}
    profile = read_profile(profile_path(model, **kinds))
    if profile is None:
        rounded = "" if weight_dtype == "auto" else f" with {weight_dtype} weights"
        rounded_flag = "" if weight_dtype == "auto" else f" --cpu-weight-dtype {weight_dtype}"
        raise ConfigError(
            f"there is no profile of this model in {dtype}{rounded} on this machine; {again}{rounded_flag} makes one "
            "in about a minute"
        )
    check_machine(profile, machine_facts(model, **kinds))
    return profile


def keep_profile(path: Path, profile: Profile) -> None:
    """Write the file in one step. Raises ConfigError where it cannot be written."""
    try:
        write_json(path, profile.as_dict())
    except OSError as error:
        raise ConfigError(f"the profile cannot be kept in {path}: {error}") from error
