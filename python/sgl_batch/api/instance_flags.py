"""Owns the flags of many instances, which the server and `sgl-batch run` share. It imports nothing slow."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from sgl_batch.errors import ConfigError

_AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceOptions:
    """How many instances run, and where.

    Attributes:
        count: None: as many as the nodes are for.
        ray_address: HOST:PORT of a Ray cluster; None: one of our own on this machine.
        cpus: Cores of each instance; None: an even part of its node's.
    """

    count: int | None
    ray_address: str | None = None
    cpus: int | None = None


def add_instance_flags(group: Any) -> None:
    """Add the flags to a parser, or to a group of one."""
    group.add_argument(
        "--instances",
        metavar="N",
        help="N engines, here or on a Ray cluster; auto: as many as fit (default: one, without Ray)",
    )
    group.add_argument(
        "--ray-address",
        metavar="ADDR",
        help="HOST:PORT of the Ray cluster of the instances (default: this machine alone)",
    )
    group.add_argument(
        "--cpus-per-instance",
        type=int,
        metavar="K",
        help="cores of each instance (default: an even part of its node's)",
    )


def instance_options(args: argparse.Namespace) -> InstanceOptions | None:
    """Return what the flags say; None: one engine, without Ray. Raises ConfigError for bad values."""
    count, address, cpus = args.instances, args.ray_address, args.cpus_per_instance
    if cpus is not None and cpus < 1:
        raise ConfigError(f"--cpus-per-instance is {cpus}; it must be at least 1")
    if count is None and address is None:
        if cpus is not None:
            raise ConfigError("--cpus-per-instance is given without --instances; give --instances N or auto too")
        return None
    return InstanceOptions(count=_count(count), ray_address=address, cpus=cpus)


def _count(value: object) -> int | None:
    if value in (None, _AUTO):
        return None
    try:
        count = int(str(value))
    except ValueError:
        count = 0
    if count < 1:
        raise ConfigError(f"--instances is {value}; it must be {_AUTO}, or a number of at least 1")
    return count
