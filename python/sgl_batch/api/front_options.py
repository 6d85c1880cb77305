"""Owns the server's own flags. All other flags belong to the engine, whose process checks them.

It imports nothing slow, so that mistakes are reported at once.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sgl_batch.api.instance_flags import InstanceOptions, add_instance_flags, instance_options
from sgl_batch.api.key_sources import VARIABLES, add_key_file_flags, key_of
from sgl_batch.byte_sizes import HOW_TO_WRITE, parse_bytes
from sgl_batch.errors import ConfigError
from sgl_batch.jobs.batch_service.settings import (
    DEFAULT_MAX_FILE_BYTES,
    DEFAULT_MAX_IN_FLIGHT,
    DEFAULT_MAX_JOB_LINES,
    DEFAULT_MAX_LINE_BYTES,
    ServiceSettings,
)
from sgl_batch.jobs.cost import add_price_flag, parse_price

DEFAULT_JOBS_DIR = "sgl_batch_jobs"
DEFAULT_STALL_S = 300.0
# With this flag SGLang unpickles a function from a request, and calls it.
_RUNS_CODE = "enable_custom_logit_processor"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontOptions:
    """The options of the server. `engine_argv` is the rest of the command line, for the engine's parser.

    `instances`: None: one engine, without Ray.
    `stall_s`: an engine that has work and makes no progress for so many seconds counts as hung (0: never).
    """

    host: str
    port: int
    api_key: str | None
    admin_api_key: str | None
    ssl_certfile: str | None
    ssl_keyfile: str | None
    ssl_keyfile_password: str | None
    ssl_ca_certs: str | None
    log_level: str
    stall_s: float
    restart_stalled: bool
    open_control: bool
    open_metrics: bool
    service: ServiceSettings
    instances: InstanceOptions | None
    engine_argv: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see --help)")


def add_own_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that SGLang does not have."""
    group = parser.add_argument_group("sgl_batch: server", "the Files and Batch API, and the engine's process")
    group.add_argument(
        "--jobs-dir",
        default=DEFAULT_JOBS_DIR,
        metavar="DIR",
        help="directory of files and jobs; after a restart its jobs go on (default: %(default)s)",
    )
    group.add_argument(
        "--max-in-flight",
        type=int,
        default=DEFAULT_MAX_IN_FLIGHT,
        metavar="N",
        help="the most request lines, of all jobs, that an engine has at a time (default: %(default)s)",
    )
    group.add_argument(
        "--max-file-bytes",
        default=DEFAULT_MAX_FILE_BYTES,
        metavar="BYTES",
        help=f"the largest file that may be uploaded; {HOW_TO_WRITE} (default: %(default)s)",
    )
    group.add_argument(
        "--max-job-lines",
        type=int,
        default=DEFAULT_MAX_JOB_LINES,
        metavar="N",
        help="the most request lines of a job (default: %(default)s)",
    )
    group.add_argument(
        "--max-line-bytes",
        default=DEFAULT_MAX_LINE_BYTES,
        metavar="BYTES",
        help="the longest request line of a job; written as --max-file-bytes (default: %(default)s)",
    )
    add_price_flag(group, "jobs then show their cost")
    group.add_argument(
        "--allow-unauthenticated",
        action="store_true",
        help="need no key, although --host is not loopback",
    )
    group.add_argument(
        "--allow-unauthenticated-control",
        action="store_true",
        help="let all users control the engine without an admin key: weights, pauses, aborts, profiles, logs",
    )
    group.add_argument("--open-metrics", action="store_true", help="answer /metrics without a key")
    add_key_file_flags(group)
    _add_stall_flags(group)
    add_instance_flags(group)


def _add_stall_flags(group: Any) -> None:
    group.add_argument(
        "--engine-stall-s",
        type=float,
        default=DEFAULT_STALL_S,
        metavar="SECONDS",
        help="an engine that has work and makes no progress for so long hangs; 0: never (default: %(default)s)",
    )
    group.add_argument(
        "--restart-stalled-engine", action="store_true", help="end a hung engine and start another; jobs go on"
    )


def _add_shared_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that SGLang has too, and that this server reads itself."""
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    for flag in ("--api-key", "--admin-api-key", "--ssl-certfile", "--ssl-keyfile"):
        parser.add_argument(flag)
    for flag in ("--ssl-keyfile-password", "--ssl-ca-certs"):
        parser.add_argument(flag)


def front_flags() -> tuple[str, ...]:
    """Return every flag that this server reads itself."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_own_flags(parser)
    _add_shared_flags(parser)
    return tuple(parser._option_string_actions)


def parse_front_options(argv: Sequence[str]) -> FrontOptions:
    """Parse the command line. Raises ConfigError for bad values."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_own_flags(parser)
    _add_shared_flags(parser)
    in_file = _config_file_values(argv)
    own = {action.dest for action in parser._actions}
    parser.set_defaults(**{name: value for name, value in in_file.items() if name in own})
    args, rest = parser.parse_known_args(list(argv))
    _check(args)
    _check_code_in_requests(args, runs_code=bool(in_file.get(_RUNS_CODE)) or any(map(_is_runs_code, rest)))
    service = ServiceSettings(
        jobs_dir=Path(args.jobs_dir),
        max_file_bytes=_bytes("--max-file-bytes", args.max_file_bytes),
        max_job_lines=args.max_job_lines,
        max_in_flight=args.max_in_flight,
        max_line_bytes=_bytes("--max-line-bytes", args.max_line_bytes),
        price_per_hour=parse_price(args.price_per_hour),
    )
    return FrontOptions(
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        admin_api_key=args.admin_api_key,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        ssl_keyfile_password=args.ssl_keyfile_password,
        ssl_ca_certs=args.ssl_ca_certs,
        log_level=_log_level(rest),
        stall_s=args.engine_stall_s,
        restart_stalled=args.restart_stalled_engine,
        open_control=args.allow_unauthenticated_control,
        open_metrics=args.open_metrics,
        service=service,
        instances=instance_options(args),
        engine_argv=tuple(rest),
    )


def _config_file_values(argv: Sequence[str]) -> dict[str, Any]:
    """Return the values of SGLang's --config FILE, by the names of flags."""
    first = _Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    path = first.parse_known_args(list(argv))[0].config
    if path is None:
        return {}
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from error
    return {str(key).replace("-", "_"): value for key, value in (values or {}).items()}


def _log_level(rest: Sequence[str]) -> str:
    """Return the value of --log-level, which the engine reads too."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--log-level", default="info")
    return str(parser.parse_known_args(list(rest))[0].log_level)


def _bytes(flag: str, value: int | str) -> int:
    size = parse_bytes(flag, value) if isinstance(value, str) else value
    if size < 1:
        raise ConfigError(f"{flag} is {value}; it must be at least 1")
    return size


def _check(args: argparse.Namespace) -> None:
    for flag in ("max_in_flight", "max_job_lines"):
        if getattr(args, flag) < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} is {getattr(args, flag)}; it must be at least 1")
    if not 0 <= args.port < 65536:
        raise ConfigError(f"--port is {args.port}; it must be at least 0 and at most 65535")
    if args.engine_stall_s < 0:
        raise ConfigError(f"--engine-stall-s is {args.engine_stall_s}; it must be at least 0")
    for name in VARIABLES:
        setattr(args, name, key_of(name, args, os.environ))
    if args.allow_unauthenticated_control and args.admin_api_key is not None:
        raise ConfigError(
            "--allow-unauthenticated-control is given, and there is an admin key, which control of the engine needs: "
            "leave one of them out"
        )
    if args.api_key is None and not is_loopback(args.host) and not args.allow_unauthenticated:
        raise ConfigError(
            f"--host is {args.host}, where others reach this server, and there is no key: give one (--api-key-file, "
            f"{VARIABLES['api_key']} or --api-key), or --allow-unauthenticated if everyone who reaches it may use it"
        )


def _is_runs_code(argument: str) -> bool:
    """Return whether an argument is the flag that runs code, or a beginning of it: the engine's parser takes both."""
    flag = f"--{_RUNS_CODE.replace('_', '-')}"
    return argument.startswith("--enable-c") and flag.startswith(argument)


def _check_code_in_requests(args: argparse.Namespace, *, runs_code: bool) -> None:
    if runs_code and args.api_key is None and not args.allow_unauthenticated_control:
        raise ConfigError(
            "--enable-custom-logit-processor lets each request bring a program that the engine runs, and there is no "
            "key: give one (--api-key-file), or --allow-unauthenticated-control if everyone who reaches this server "
            "may run programs as its user"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
