"""Owns the engine's command line: SGLang's flags and ours, parsed and checked together, in a program of ours."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sgl_batch import config as batch_config
from sgl_batch.config import BatchConfig
from sgl_batch.errors import ConfigError
from sgl_batch.sglang_adapter.child_processes import FORK, SPAWN, template

_DESCRIPTION = """\
Serve a mixture-of-experts model over HTTP: OpenAI's Files and Batch API, and SGLang's endpoints, scheduled in groups
for whole batches. The flags of sgl_batch come first; all other flags are SGLang's own and mean what they mean there.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """SGLang's arguments (a ServerArgs), ours, and multiprocessing's start method for the engine's processes."""

    server_args: Any
    config: BatchConfig
    start_method: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see --help)")


def build_parser(
    argv: Sequence[str], add_more: Callable[[argparse.ArgumentParser], None] = lambda _: None
) -> argparse.ArgumentParser:
    """The parser of all flags. Our defaults for SGLang's flags depend on --device, so it looks at `argv`.

    `add_more` adds flags before them.
    """
    from sgl_batch.managers import launch

    known = _what_defaults_depend_on(argv)
    parser = _Parser(
        prog="python -m sgl_batch.launch_server",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_more(parser)
    batch_config.add_cli_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(**launch.default_arguments({"device": known.device}, known.b_moe_decode))
    return parser


def _what_defaults_depend_on(argv: Sequence[str]) -> argparse.Namespace:
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--device")
    first.add_argument("--b-moe-decode", type=int, default=None)
    return first.parse_known_args(list(argv))[0]


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add SGLang's own flags."""
    from sgl_batch.sglang_adapter.processes import ServerArgs

    ServerArgs.add_cli_args(parser)


def build_arguments(argv: Sequence[str]) -> EngineArguments:
    """Parse and check all flags, in a program of ours. Raises ConfigError for a bad one; --help exits."""
    ours = _Parser(add_help=False, allow_abbrev=False)
    batch_config.add_cli_flags(ours)
    batch_config.from_args(
        ours.parse_known_args(list(argv))[0]
    )  # our mistakes are answered before SGLang's slow import
    with template(_what_defaults_depend_on(argv).device) as can_fork:
        from sgl_batch.engine import make_server_args
        from sgl_batch.sglang_adapter.processes import argument_names, merge_config_file

        parser = build_parser(argv)
        args = parser.parse_args(merge_config_file(parser, list(argv)))
        config = batch_config.from_args(args)
        kwargs = {name: getattr(args, name) for name in argument_names() if hasattr(args, name)}
        server_args = make_server_args(kwargs, config)
    return EngineArguments(server_args=server_args, config=config, start_method=FORK if can_fork else SPAWN)
