"""Owns the command line flags that are generated from the configuration."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from sgl_batch.byte_sizes import HOW_TO_WRITE
from sgl_batch.config import SECTIONS, BatchConfig, field_names, from_mapping

# By section, the title and the text of its flags in the help.
_HEADINGS = {
    "forward": ("forward pass", "How a group is cut for attention and combined for experts."),
    "schedule": ("scheduling", "When sequences are prefilled, decoded and refilled."),
    "memory": ("memory", "Where KV and weights lie for which the device has no room."),
    "ranks": (
        "several ranks",
        "How ranks (--tp N --dp N --enable-dp-attention --ep N) share sequences and watch each other.",
    ),
    "trace": ("trace", None),
}


def add_cli_flags(parser: argparse.ArgumentParser) -> None:
    """Add one argument group per owner, generated from the dataclasses above. Flags not given leave no attribute."""
    for name, section in SECTIONS.items():
        title, text = _HEADINGS[name]
        group = parser.add_argument_group(f"sgl_batch: {title}", text)
        for field in dataclasses.fields(section):
            _add_flag(group, field, default=argparse.SUPPRESS)


def add_some_flags(group: Any, names: Sequence[str], *, briefly: bool = False) -> None:
    """Add the flags of these names to an argument group. `briefly`: the group's heading says how sizes are written."""
    fields = {field.name: field for section in SECTIONS.values() for field in dataclasses.fields(section)}
    for name in names:
        _add_flag(group, fields[name], briefly=briefly, default=fields[name].default)


def _add_flag(group: Any, field: dataclasses.Field[Any], *, default: Any, briefly: bool = False) -> None:
    name = "--" + field.name.replace("_", "-")
    text: str = field.metadata["help"] + ("" if field.default is None else f" (default: {field.default})")
    text = text.replace("%", "%%")
    if field.metadata["kind"] is bool:
        action = argparse.BooleanOptionalAction
        group.add_argument(name, dest=field.name, action=action, default=default, help=text)
    elif field.metadata["in_bytes"]:
        # Sizes are parsed in from_mapping, as those given by keyword are, so that the error message is the same.
        text = text if briefly else f"{text}; it takes {HOW_TO_WRITE}"
        group.add_argument(name, dest=field.name, metavar="BYTES", default=default, help=text)
    else:
        kind = field.metadata["kind"]
        group.add_argument(name, dest=field.name, type=kind, metavar=_metavar(field), default=default, help=text)


def _metavar(field: dataclasses.Field[Any]) -> str:
    choices: tuple[str, ...] | None = field.metadata["choices"]
    if choices is not None:
        return f"{{{','.join(choices)}}}"
    given: str | None = field.metadata["metavar"]
    return given or "N"


def from_args(args: argparse.Namespace) -> BatchConfig:
    """Read our flags from parsed arguments. Raises ConfigError."""
    return from_mapping({name: getattr(args, name) for name in given_in(args)})


def given_in(args: argparse.Namespace) -> frozenset[str]:
    """Return the names of our flags that parsed arguments have: of `add_cli_flags`, those that the user gave."""
    return frozenset(vars(args)) & field_names()
