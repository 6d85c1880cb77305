"""Reads from the engine's flags what an instance needs of its node, before any engine's parser runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sgl_batch.errors import ConfigError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see --help)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """What the flags ask for.

    Attributes:
        argv: The flags, with the model's directory as an absolute path: an instance runs in another directory. The
            model is served by the name that was given all the same, as it is without instances.
        model: The model's directory; None where it is a name on the hub.
        ranks: Each takes a GPU, unless `on_cpu`.
        on_cpu: Whether --device is cpu.
    """

    argv: tuple[str, ...]
    model: str | None
    ranks: int
    on_cpu: bool

    def gpus(self, most_of_a_node: int) -> int:
        """Return the GPUs of an instance. `most_of_a_node`: of that with the most; without any, instances use CPUs."""
        return 0 if self.on_cpu or not most_of_a_node else self.ranks


def engine_needs(argv: Sequence[str]) -> EngineNeeds:
    """Read the flags. Raises ConfigError for values that are wrong."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--tensor-parallel-size", "--tp-size", "--tp", type=int, default=1, dest="ranks")
    parser.add_argument("--device", default="")
    parser.add_argument("--served-model-name")
    args, others = parser.parse_known_args(list(argv))
    model = args.model_path
    if model is not None and (model.startswith(("/", "./", "../", "~")) or Path(model).exists()):
        name = args.served_model_name or model
        model = str(Path(model).expanduser().absolute())
        rest = ["--tp-size", str(args.ranks)] * (args.ranks != 1) + ["--device", args.device] * bool(args.device)
        argv = ["--model-path", model, "--served-model-name", name, *rest, *others]
        return EngineNeeds(argv=tuple(argv), model=model, ranks=args.ranks, on_cpu=args.device == "cpu")
    return EngineNeeds(argv=tuple(argv), model=None, ranks=args.ranks, on_cpu=args.device == "cpu")
