"""Finds or makes the profile of this machine, and says what it is."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sgl_batch import config as batch_config
from sgl_batch.cli.plan.report import MEASURED
from sgl_batch.cli.plan.subject import Subject
from sgl_batch.errors import ConfigError
from sgl_batch.planner.samples import Profile, check_machine
from sgl_batch.profiler.profile import make_profile
from sgl_batch.startup.kept_profile import keep_profile, machine_facts, profile_path, read_profile

_DISK_BYTES, _DISK_READS = 512 << 20, 2


def profile_here(args: argparse.Namespace, subject: Subject) -> tuple[Profile | None, str]:
    """Return the profile to plan with, or None and why there is none. A file that the user names must be of here."""
    directory, dtype, weight_dtype = subject.directory, subject.dtype, subject.weight_dtype
    path = args.profile_file or profile_path(directory, dtype=dtype, weight_dtype=weight_dtype)
    if args.profile:
        rate = _disk_rate(directory) if args.weights == "streamed" else None
        made = make_profile(
            directory, subject.body, subject.layers, dtype=dtype, weight_dtype=weight_dtype, disk_rate=rate
        )
        keep_profile(path, made)
        return made, ""
    found = read_profile(path)
    if found is None:
        if args.profile_file:
            raise ConfigError(f"there is no profile {path}; make one with sgl-batch plan --profile")
        return None, "none: the engine's conservative defaults hold; --profile makes one in about a minute"
    try:
        check_machine(found, machine_facts(directory, dtype=dtype, weight_dtype=weight_dtype))
    except ConfigError as error:
        if args.profile_file:
            raise
        return None, f"none, the engine's conservative defaults hold: {error}"
    return found, ""


def profile_message(profile: Profile | None, why_none: str) -> dict[str, Any]:
    """Return what a profile is, or why there is none."""
    if profile is None:
        return {"source": None, "text": why_none}
    count, cores = len(profile.passes) + len(profile.steps), profile.machine["cores"]
    busy = ""
    if profile.was_disturbed:
        busy = f"; other programs kept {profile.load:g} of {cores} cores busy then: make it again when they do not run"
    return {
        "source": MEASURED,
        "made": profile.made,
        "samples": count,
        "load": profile.load,
        "rates": dict(profile.rates),
        "text": f"{count} samples, {MEASURED} at {profile.made} in {profile.took_s:.0f} s{busy}",
    }


def _disk_rate(directory: Path) -> float:
    """Return bytes a second of reading the checkpoint again: a batch reads the same experts in pass after pass.

    A storage with a cache of its own gives them more slowly the first time.
    """
    from sgl_batch.weights.disk_rate import disk_rate

    files = sorted(directory.glob("*.safetensors"))
    threads = batch_config.MemoryConfig().weight_read_threads
    try:
        return max(disk_rate(files, threads=threads, most_bytes=_DISK_BYTES) for _ in range(_DISK_READS))
    except OSError as error:
        raise ConfigError(f"the checkpoint in {directory} cannot be read past the page cache: {error}") from error
