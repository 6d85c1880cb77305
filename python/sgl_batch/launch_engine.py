"""`python -m sgl_batch.launch_engine`: the process that has the engine. Only the server starts it.

Its command line has the engine's flags. The server's own data (ParentLink) comes on standard input.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sgl_batch.api.front_options import front_flags
from sgl_batch.engine.engine_arguments import EngineArguments, build_arguments
from sgl_batch.engine.parent_link import ParentLink, read_link
from sgl_batch.errors import BAD_USAGE, ConfigError, SglBatchError
from sgl_batch.program_end import end_with


def main(argv: Sequence[str] | None = None) -> int:
    """Answer until stopped. Return the exit code: 1 for bad usage, 3 when the engine cannot start."""
    link = read_link()
    try:
        parsed = build_arguments(list(sys.argv[1:] if argv is None else argv), near=front_flags())
        _check(parsed)
        _log_requests_in(parsed.server_args, link.request_logs)
    except ConfigError as error:
        return _complain(link, str(error), 1, BAD_USAGE)
    level = str(parsed.server_args.log_level).upper()
    logging.basicConfig(level=level, format="[%(asctime)s] %(message)s", force=True)
    from sgl_batch.engine.launch import announce
    from sgl_batch.engine.worker_server import WorkerServer
    from sgl_batch.sglang_adapter.processes import kill_process_tree

    announce("plan", parsed.plan.source)
    try:
        WorkerServer(parsed, link).serve()
    except ConfigError as error:
        return _complain(link, str(error), 1, BAD_USAGE)
    except SglBatchError as error:
        return _complain(link, str(error), 3, None)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


def _check(parsed: EngineArguments) -> None:
    """Raise ConfigError for what SGLang's HTTP server cannot do behind ours."""
    if parsed.server_args.enable_http2:
        raise ConfigError("enable_http2 is given; this server speaks HTTP/1.1: leave it out")
    # The server uses these itself. They are here where a --config file names them.
    parsed.server_args.ssl_certfile = parsed.server_args.ssl_keyfile = None


def _log_requests_in(server_args: Any, directory: str) -> None:
    """Log requests to files of bounded size, unless the user says where. SGLang's default is standard output."""
    if not server_args.log_requests_target:
        Path(directory).mkdir(parents=True, exist_ok=True, mode=0o700)
        server_args.log_requests_target = [directory]


def _complain(link: ParentLink, message: str, exit_code: int, code: str | None) -> int:
    sys.stderr.write(f"launch_server: error: {message}\n")
    link.report_failure(message, code)
    return exit_code


if __name__ == "__main__":
    end_with(main)
