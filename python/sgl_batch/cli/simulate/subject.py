"""Reads what is simulated: the model, the cluster, the batch, and cells of measured runs. It simulates nothing."""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sgl_batch.byte_sizes import parse_bytes
from sgl_batch.cli.simulate.options import DEFAULT_NUM, DEFAULT_WORKLOAD
from sgl_batch.errors import ConfigError
from sgl_batch.planner.workload import Workload, parse_lengths, parse_workload
from sgl_batch.simulator.calibration import Cell
from sgl_batch.simulator.cluster.hardware import Cluster, cluster_named
from sgl_batch.simulator.cluster.models import ClusterModel, model_named, model_of
from sgl_batch.simulator.lengths import requests_like
from sgl_batch.simulator.policies import policies_named
from sgl_batch.simulator.requests import Requests

COLUMNS = ("hardware", "model", "engine", "workload", "seconds")
_CONFIG = "config.json"
_CV = re.compile(r"cv=(\d+(?:\.\d+)?)", re.ASCII)
_MOST_NUM, _MOST_CV = 1_000_000, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, a cluster, and the lengths of a batch. `spread`: the cv of lengths, 0 for those that are given."""

    model: ClusterModel
    cluster: Cluster
    requests: Requests
    spread: float


def read_subject(args: argparse.Namespace) -> Subject:
    """Return what the command line names. Raises ConfigError for what the user can mend."""
    requests, spread = read_requests(args, workload=DEFAULT_WORKLOAD, num=DEFAULT_NUM)
    cluster = cluster_named(args.hardware)
    if args.host_memory is not None:
        size = parse_bytes("--host-memory", args.host_memory)
        if size <= 0:
            raise ConfigError(f"--host-memory is {args.host_memory!r}; a node has more than 0")
        cluster = replace(cluster, host_memory_bytes=float(size))
    return Subject(
        model=read_model(args.model),
        cluster=cluster,
        requests=requests,
        spread=spread,
    )


def read_requests(args: argparse.Namespace, *, workload: str, num: int) -> tuple[Requests, float]:
    """Return the batch, and the cv of its lengths. Raises ConfigError for what the user can mend.

    `workload`, `num`: what holds where nothing is given.
    """
    batch, spread = _workload(args, workload)
    count = args.num if args.num is not None else _count(args, batch, num)
    if args.num is None and count > _MOST_NUM:
        raise ConfigError(
            f"--workload is {args.workload}, of {count:,} requests; give at most {_MOST_NUM:,}, or fewer of the same "
            "mix with --num"
        )
    if not 1 <= count <= _MOST_NUM:
        raise ConfigError(f"--num is {count}; it takes 1 to {_MOST_NUM:,} requests")
    return requests_like(batch, count, cv=spread), spread


def _count(args: argparse.Namespace, workload: Workload, default: int) -> int:
    """Return how many requests there are where --num does not say it."""
    given = args.workload is not None and "x" in args.workload
    from_file = args.lengths is not None and not _CV.fullmatch(args.lengths)
    return workload.count if given or from_file else default


def _workload(args: argparse.Namespace, default: str) -> tuple[Workload, float]:
    """Return the mix of lengths, and their cv."""
    found = None if args.lengths is None else _CV.fullmatch(args.lengths)
    if args.lengths is None or found:
        spread = float(found[1]) if found else 0.0
        if spread > _MOST_CV:
            raise ConfigError(f"--lengths is {args.lengths}; the standard deviation is at most {_MOST_CV} of the mean")
        return parse_workload(args.workload or default), spread
    if args.lengths.startswith("cv="):
        raise ConfigError(f"--lengths is {args.lengths!r}; it takes cv=SHARE, as in cv=0.3, or a file")
    if args.workload is not None:
        raise ConfigError("--lengths names a file, which has all lengths; leave --workload out")
    try:
        return parse_lengths(Path(args.lengths).read_text(encoding="utf-8").splitlines(), args.lengths), 0.0
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the lengths in {args.lengths} cannot be read: {error}") from error


def read_model(name: str) -> ClusterModel:
    """Return a model by its name, or by the configuration in a directory. Raises ConfigError."""
    path = Path(name)
    if path.is_dir():
        path /= _CONFIG
    if not path.is_file():
        return model_named(name)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"{path} is no configuration of a model: it has no fields")
    try:
        return model_of(config.get("text_config") or config, name=path.parent.resolve().name, source=str(path))
    except KeyError as error:
        raise ConfigError(f"{path} has no field {error}, which the model's costs depend on") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a number in {path} cannot be read: {error}") from error


def read_cells(path: Path) -> list[Cell]:
    """Return the cells of a CSV file. Raises ConfigError with the line of what is wrong."""
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            reader = csv.DictReader(lines)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or [])]
            if missing:
                raise ConfigError(f"{path} has no column {missing[0]!r}; its first line is {','.join(COLUMNS)}")
            cells = [_cell(row, f"line {reader.line_num} of {path}") for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"the cells in {path} cannot be read: {error}") from error
    if not cells:
        raise ConfigError(f"{path} has no cells; each line takes {','.join(COLUMNS)}")
    return cells


def _cell(row: Mapping[str, str | None], where: str) -> Cell:
    values = {name: (row.get(name) or "").strip() for name in COLUMNS}
    for name, value in values.items():
        if not value:
            raise ConfigError(f"{where} has no {name}; each line takes {','.join(COLUMNS)}")
    try:
        seconds = float(values["seconds"])
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{where} has {values['seconds']!r} seconds; a run takes more than 0")
    try:
        workload = parse_workload(values["workload"])
        policies = policies_named(values["engine"])
        if len(policies) > 1:
            raise ConfigError(f"the engine is {values['engine']!r}; a cell is of one policy")
        return Cell(
            name=f"{values['hardware']} {values['model']} {values['workload']}",
            cluster=cluster_named(values["hardware"]),
            model=read_model(values["model"]),
            policy=policies[0],
            requests=requests_like(workload, workload.count),
            seconds=seconds,
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
