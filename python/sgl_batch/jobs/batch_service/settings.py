"""Owns the settings of the batch service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_MAX_FILE_BYTES = 200 << 20
DEFAULT_MAX_JOB_LINES = 50_000
DEFAULT_MAX_IN_FLIGHT = 2048
DEFAULT_MAX_IN_FLIGHT_BYTES = 64 << 20  # of input lines; their parsed bodies take several times as much
DEFAULT_MAX_LINE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Where jobs lie, the limits of files, jobs, lines and lines in flight, and the price of the engine for an hour."""

    jobs_dir: Path
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
    max_job_lines: int = DEFAULT_MAX_JOB_LINES
    max_in_flight: int = DEFAULT_MAX_IN_FLIGHT
    max_in_flight_bytes: int = DEFAULT_MAX_IN_FLIGHT_BYTES
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES
    price_per_hour: float | None = None
