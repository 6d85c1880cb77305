"""`python -m sgl_batch.launch_server`: the server. It reads its own flags; the others go to the engine's process.

It imports the engine's libraries only for --help-all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sgl_batch.api.front_options import add_own_flags, parse_front_options
from sgl_batch.api.server_help import HELP_ALL, PROGRAM, short_help
from sgl_batch.errors import ConfigError, SglBatchError
from sgl_batch.program_end import end_with


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Serve until stopped. Return the exit code: 1 for bad usage, 3 when the server cannot run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if HELP_ALL in arguments:
        return _print_all_help(arguments, program)
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write(short_help(program))
        return 0
    try:
        options = parse_front_options(arguments)
        from sgl_batch.api.front import serve

        if options.instances is not None:
            from sgl_batch.control_plane.instances.make_engines import server_instances

            return serve(options, server_instances)
        return serve(options)
    except SglBatchError as error:
        sys.stderr.write(f"launch_server: error: {error}\n")
        return 1 if isinstance(error, ConfigError) else 3


def _print_all_help(arguments: Sequence[str], program: str) -> int:
    from sgl_batch.engine.engine_arguments import build_parser
    from sgl_batch.sglang_adapter.child_processes import template

    with template("cpu"):
        parser = build_parser(arguments, add_own_flags)
        parser.prog = program
        parser.print_help()
    return 0


if __name__ == "__main__":
    end_with(main)
