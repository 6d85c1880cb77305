"""Owns the cache that keeps the choices of self-checks between starts: a file for each, in the user's cache.

core/decode_choice and core/expert_runner_choice make the choices.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sgl_batch.core.start_choices import Choice, choice_of
from sgl_batch.installed_versions import versions_of
from sgl_batch.kernel_loader import kernel_interface
from sgl_batch.user_cache import cache_directory, hashed_name, write_json

logger = logging.getLogger(__name__)

FORMAT = "sgl_batch.start_choice/1"
_PACKAGES = ("sgl-batch", "sglang", "torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceKey:
    """What a choice is valid for. `option`: the option that it settles; `model`: a hash of the model's configuration.

    `settings`: flags on which the measurement depends.
    """

    option: str
    device: str
    model: str
    versions: Mapping[str, str | None]
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """The name of the choice's file, the same for equal keys."""
        return hashed_name(asdict(self))


def versions() -> dict[str, str | None]:
    """Return the versions of the packages on which a choice depends, and of the kernels, which change more often."""
    return {**versions_of(_PACKAGES), "kernels": str(kernel_interface())}


def model_hash(model: str) -> str:
    """Return a hash of a model's config.json, or of its name where it is no local directory."""
    try:
        content = (Path(model) / "config.json").read_bytes()
    except OSError:
        content = model.encode()
    return hashlib.sha256(content).hexdigest()


def choice_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of this user's choices."""
    return cache_directory(environment) / "start_choices"


class ChoiceCache:
    """Choices in a directory. A file that holds no choice is skipped, with a warning."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find(self, key: ChoiceKey) -> Choice | None:
        """Return the choice of this key, or None."""
        path = self._directory / key.file_name
        found = self._read(path)
        return None if found is None or found[0] != key else found[1]

    def kept(self) -> list[tuple[ChoiceKey, Choice]]:
        """Return all choices, of any machine and model."""
        try:
            paths = sorted(self._directory.glob("*.json"))
        except OSError:
            return []
        return [found for path in paths if (found := self._read(path)) is not None]

    def keep(self, key: ChoiceKey, choice: Choice) -> None:
        """Write a choice in one step. A write that fails is only a warning."""
        path = self._directory / key.file_name
        content = {"format": FORMAT, "key": asdict(key), "choice": asdict(choice)}
        try:
            write_json(path, content)
        except OSError as error:
            logger.warning("the choice of %s is not kept, and is measured again: %s: %s", key.option, path, error)

    def _read(self, path: Path) -> tuple[ChoiceKey, Choice] | None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}, not {FORMAT!r}")
            return ChoiceKey(**content["key"]), choice_of(content["choice"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError) as error:
            logger.warning("%s holds no choice of a self-check, which is measured again: %s", path, error)
            return None
