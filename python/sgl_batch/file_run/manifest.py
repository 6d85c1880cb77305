"""Owns the manifest beside an output: what is needed to repeat the run, and its result."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sgl_batch.core.answers import EngineStats
from sgl_batch.errors import ConfigError
from sgl_batch.file_run.model_hash import MODEL_HASH_RULE, model_hash
from sgl_batch.file_run.run_cost import RunCost
from sgl_batch.file_run.run_result import RunResult, RunStatus
from sgl_batch.installed_versions import versions_of
from sgl_batch.jobs.line_reader import InputScan
from sgl_batch.jobs.scratch import storage_errors
from sgl_batch.jobs.seeds import SEED_RULE

FORMAT = "sgl_batch.manifest/1"
_PACKAGES = ("sgl-batch", "sglang", "torch", "transformers")
_SECRET_FLAGS = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known about a run at its start."""

    run_id: str
    argv: Sequence[str]
    options: Mapping[str, object]
    input_path: str
    scan: InputScan
    model_path: str
    served_model_names: Sequence[str]
    job_seed: int
    plan: Mapping[str, Any]
    resumed: Sequence[object] = ()
    cost: RunCost | None = None


class Manifest:
    """The manifest file of one run, written whole at each change."""

    def __init__(self, path: Path, facts: RunFacts) -> None:
        self.path = path
        self._content: dict[str, object] = {
            "format": FORMAT,
            "run_id": facts.run_id,
            "status": "running",
            "started_at": _now(),
            "command": {"argv": redacted(facts.argv), "cwd": str(Path.cwd()), "options": dict(facts.options)},
            "input": {"path": facts.input_path, **asdict(facts.scan)},
            "model": _describe_model(facts.model_path, facts.served_model_names),
            "versions": versions(),
            "machine": {"platform": platform.platform(), "cpu_count": os.cpu_count()},
            "seeds": {"job_seed": facts.job_seed, "rule": SEED_RULE},
            "plan": dict(facts.plan),
            **({"resumed": list(facts.resumed)} if facts.resumed else {}),
            **({"cost": facts.cost.as_dict()} if facts.cost is not None else {}),
        }

    def write(self) -> None:
        """Write the manifest in one step: a reader sees the whole old one or the whole new one."""
        draft = self.path.with_name(f".{self.path.name}.draft")
        with storage_errors(f"writing the manifest {self.path}"):
            draft.write_text(json.dumps(self._content, indent=2, default=str) + "\n", encoding="utf-8")
            draft.replace(self.path)

    def abort(self, message: str) -> None:
        """Note that the run ended without a result, and write."""
        self._content |= {"status": RunStatus.FAILED.value, "message": message, "finished_at": _now()}
        self.write()

    def finish(self, result: RunResult) -> None:
        """Add the run's result and write."""
        self._content |= {
            "status": result.status.value,
            "message": result.message,
            "exit_code": result.exit_code,
            "finished_at": _now(),
            "wall_s": round(result.wall_s, 3),
            "counts": {
                "total": result.total,
                "ok": result.ok,
                "failed": result.failed,
                "missing": result.missing,
                "failed_by_code": {code: kind.count for code, kind in result.failures.items()},
            },
            "usage": {
                "prompt_tokens": result.tokens_in,
                "completion_tokens": result.tokens_out,
                "total_tokens": result.tokens_in + result.tokens_out,
            },
            "engine": None if result.stats is None else _describe_stats(result.stats),
            **({"prediction": result.plan.as_dict()} if result.plan is not None and result.plan.measured else {}),
            **({"cost": result.cost.as_dict()} if result.cost is not None else {}),
            **({"refinements": [dict(one) for one in result.refinements]} if result.refinements else {}),
        }
        self.write()


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of an earlier run. Raises ConfigError for a file that is not one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the manifest {path} cannot be read ({error}); start anew with --overwrite") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(f"{path} is not a manifest of this program ({FORMAT}); start anew with --overwrite")
    return found


def differences(earlier: Mapping[str, Any], scan: InputScan, model_path: str, job_seed: int) -> dict[str, str]:
    """Return what decides the outputs and has changed: by name, a text of what it was and is."""
    found: dict[str, str] = {}
    if earlier["input"]["sha256"] != scan.sha256:
        was = earlier["input"]
        found["input"] = f"{was['num_lines']:,} lines, {was['num_bytes']:,} bytes, other contents than now"
    model = _describe_model(model_path, ())
    was = earlier["model"]
    if (was["hash"], was["hash_rule"]) != (model["hash"], model["hash_rule"]) or (
        was["hash"] is None and was["path"] != model_path
    ):
        found["model"] = f"{was['path']} (hash {was['hash']}), now {model_path} (hash {model['hash']})"
    if earlier["seeds"]["job_seed"] != job_seed:
        found["seed"] = f"{earlier['seeds']['job_seed']}, now {job_seed}"
    return found


def redacted(argv: Sequence[str]) -> list[str]:
    """Return the arguments with the values of secret flags replaced."""
    shown: list[str] = []
    for argument in argv:
        flag, equals, _ = argument.partition("=")
        if shown and shown[-1] in _SECRET_FLAGS:
            shown.append("(secret)")
        elif flag in _SECRET_FLAGS and equals:
            shown.append(f"{flag}=(secret)")
        else:
            shown.append(argument)
    return shown


def versions() -> dict[str, str | None]:
    """Return the versions of the packages that decide the outputs; None for one that is not installed."""
    return {"python": platform.python_version(), **versions_of(_PACKAGES)}


def _describe_model(model_path: str, served_model_names: Sequence[str]) -> dict[str, object]:
    directory = Path(model_path)
    is_local = directory.is_dir()
    return {
        "path": model_path,
        "served_names": list(served_model_names),
        "hash": model_hash(directory) if is_local else None,
        "hash_rule": MODEL_HASH_RULE if is_local else "not hashed: the model is not a local directory",
    }


def _describe_stats(stats: EngineStats) -> dict[str, object]:
    return {
        "counters": dict(stats.counters),
        "part_s": dict(stats.part_s),
        "tokens_per_expert": list(stats.tokens_per_expert),
        "memory": {"peak_bytes": stats.peak_memory_bytes, "budget_bytes": stats.memory_budget_bytes},
        **({"overflow": _describe_overflow(stats)} if stats.overflow_directory else {}),
        **({"ranks": [_describe_stats(rank) for rank in stats.ranks]} if stats.ranks else {}),
    }


def _describe_overflow(stats: EngineStats) -> dict[str, object]:
    """Return where sequences waited that had outgrown the device's pages, and how often one went there."""
    counters = stats.counters
    return {
        "directory": stats.overflow_directory,
        "bytes": counters.get("overflow_bytes", 0),
        "times": counters.get("sequences_overflowed", 0),
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
