"""Owns the engine's command line: SGLang's flags and ours, parsed and checked together."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sgl_batch import config_flags
from sgl_batch.checkpoint.model_directory import ModelSource
from sgl_batch.checkpoint.read_ahead import ReadAhead
from sgl_batch.config import BatchConfig
from sgl_batch.errors import ConfigError
from sgl_batch.memory.memory_holder import MemoryHolder
from sgl_batch.planner.workload import Workload
from sgl_batch.sglang_adapter.child_processes import FORK, SPAWN, template
from sgl_batch.startup.argument_checks import did_you_mean
from sgl_batch.startup.memory_ahead import bytes_ahead
from sgl_batch.startup.model_checks import check_any_device
from sgl_batch.startup.start_plan import StartPlan, asked_workload
from sgl_batch.startup.weights_ahead import resident_files, weights_ahead

_CONFIG_FILE = "--config"
_UNRECOGNIZED = "unrecognized arguments: "
_DESCRIPTION = """\
Serve a mixture-of-experts model over HTTP, with OpenAI's Files and Batch API and SGLang's endpoints. Requests run in
groups, scheduled for the throughput of the whole batch. The flags of sgl_batch come first. All other flags are
SGLang's, and mean what they mean in SGLang.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """SGLang's arguments (a ServerArgs), multiprocessing's start method for the engine's processes, and the plan.

    `memory`: what has taken memory for the engine. Whoever starts the engine enters it until the engine is ready.
    """

    server_args: Any
    start_method: str
    plan: StartPlan
    memory: MemoryHolder

    @property
    def config(self) -> BatchConfig:
        """Our arguments, with the sizes that were planned."""
        return self.plan.config


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ConfigErrors. `near`: other flags of the program, for suggestions."""

    near: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        unknown, _, _ = message.removeprefix(_UNRECOGNIZED).partition(" ")
        if message.startswith(_UNRECOGNIZED):
            message += did_you_mean(unknown.partition("=")[0], [*self._option_string_actions, *self.near])
        raise ConfigError(f"{message} (see --help)")


def build_parser(argv: Sequence[str], add_more: Callable[[argparse.ArgumentParser], None] = lambda _: None) -> _Parser:
    """Return the parser of all flags. It looks at `argv`, because our defaults for SGLang's flags depend on --device.

    `add_more` adds flags before the others.
    """
    from sgl_batch.engine import launch

    known = _what_defaults_depend_on(argv)
    parser = _Parser(
        prog="python -m sgl_batch.launch_server",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_more(parser)
    config_flags.add_cli_flags(parser)
    add_engine_flags(parser)
    defaults = launch.default_arguments({"device": known.device}, known.b_moe_decode, known.b_moe_prefill)
    # It follows from b_moe_decode, which may still be planned (launch.sglang_arguments).
    del defaults["max_running_requests"]
    parser.set_defaults(**defaults)
    return parser


def _check_early(argv: Sequence[str]) -> tuple[ReadAhead, int]:
    """Find mistakes in our flags and in the model's files before SGLang's slow import. Raises ConfigError.

    Returns what reads the weights ahead during that import, and how many bytes of memory to take in it. The flags
    themselves are not used: `build_arguments` reads all of them again, with a --config file and abbreviated flags.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    config_flags.add_cli_flags(parser)
    for flag in ("--tokenizer-path", "--load-format", "--revision", "--json-model-override-args"):
        parser.add_argument(flag)
    parser.add_argument("--model-path", "--model", dest="model")
    parser.add_argument("--device")
    parser.add_argument("--dp-size", "--data-parallel-size", type=int, default=1)
    parser.add_argument("--skip-tokenizer-init", action="store_true")
    args = parser.parse_known_args(list(argv))[0]
    config = config_flags.from_args(args)
    asked_workload(config)
    if _CONFIG_FILE in argv or {"-h", "--help"} & set(argv):
        return weights_ahead([]), 0
    if args.model is None:
        raise ConfigError("no model is given; name its directory, or its name on the hub, with --model-path")
    source = ModelSource(
        model=args.model,
        tokenizer=args.tokenizer_path,
        load_format=args.load_format,
        revision=args.revision,
        needs_tokenizer=not args.skip_tokenizer_init,
        is_overridden=args.json_model_override_args is not None,
    )
    check_any_device(source)
    files = resident_files(
        args.model, revision=args.revision, load_format=args.load_format, weights=config.memory.weights
    )
    return weights_ahead(files, num_ranks=args.dp_size), bytes_ahead(files, on_cpu=args.device == "cpu")


def _what_defaults_depend_on(argv: Sequence[str]) -> argparse.Namespace:
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--device")
    for flag in ("--b-moe-decode", "--b-moe-prefill"):
        first.add_argument(flag, type=int, default=None)
    return first.parse_known_args(list(argv))[0]


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add SGLang's own flags."""
    from sgl_batch.sglang_adapter.processes import ServerArgs

    ServerArgs.add_cli_args(parser)


def build_arguments(
    argv: Sequence[str], near: Sequence[str] = (), workload: Callable[[Path | None], Workload | None] = lambda _: None
) -> EngineArguments:
    """Parse and check all flags, and plan sizes that are not given. Raises ConfigError for a bad flag; --help exits.

    `near`: other flags of the program, which an unknown flag may mean. `workload` returns the batch for which sizes are
    planned, or None where it is not known; it gets the directory of the tokenizer, where that is here.
    """
    # It ends with the imports, because a process with a thread cannot be forked. The scheduler process goes on with it.
    ahead, memory_bytes = _check_early(argv)
    with ExitStack() as on_error:
        memory = on_error.enter_context(MemoryHolder(memory_bytes))
        with ahead, template(_what_defaults_depend_on(argv).device) as can_fork:
            from sgl_batch.engine import launch
            from sgl_batch.engine.engine import make_server_args, model_source
            from sgl_batch.sglang_adapter.processes import argument_names, merge_config_file
            from sgl_batch.startup.plan_inputs import plan_start

            parser = build_parser(argv)
            parser.near = near
            args = parser.parse_args(merge_config_file(parser, list(argv)))
            config = config_flags.from_args(args)
            kwargs = {name: getattr(args, name) for name in argument_names() if hasattr(args, name)}
            if _CONFIG_FILE in argv:
                check_any_device(model_source(kwargs))
            plan = plan_start(config, config_flags.given_in(args), kwargs, workload, on_cpu=launch.on_cpu(kwargs))
            server_args = make_server_args(kwargs, plan.config)
        on_error.pop_all()
    memory.hand_over()
    return EngineArguments(server_args=server_args, plan=plan, start_method=FORK if can_fork else SPAWN, memory=memory)
