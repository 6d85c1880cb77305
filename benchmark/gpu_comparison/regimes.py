"""Owns the list of regimes, and makes a regime from the flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

from comparison.workload import Workload, random_workload

from gpu_comparison import memory_regimes, speed_regimes
from gpu_comparison.cases import Case, Regime, Role
from gpu_comparison.run_setup import RunSetup
from gpu_comparison.shapes import ModelShape, qwen3_30b, tiny
from gpu_comparison.sizes import SCALES, Sizes
from sgl_batch.errors import ConfigError

REGIMES: dict[str, Callable[[Sizes, ModelShape, Workload, RunSetup], Regime]] = {
    "kv": memory_regimes.kv,
    "tight": memory_regimes.tight,
    "weights": memory_regimes.weights,
    "prefill": speed_regimes.prefill,
    "resident": speed_regimes.resident,
    "accumulation": speed_regimes.accumulation,
    "accumulation-graphs": speed_regimes.accumulation_graphs,
}


def names_of(text: str) -> list[str]:
    """Return the regimes that `--cases` names, each once. Raises ConfigError."""
    wanted = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in wanted:
        if name not in REGIMES:
            raise ConfigError(f"--cases has {name!r}; it takes {', '.join(REGIMES)}, with commas between them")
    if not wanted:
        raise ConfigError(f"--cases names none; it takes {', '.join(REGIMES)}, with commas between them")
    return wanted


def build(name: str, setup: RunSetup, options: argparse.Namespace) -> Regime:
    """Make the regime `name` with the sizes of the flags. Raises ConfigError."""
    sizes = SCALES["tiny" if setup.tiny else "full"][name]
    given = {field: getattr(options, field) for field in ("layers", "num_prompts", "input_len", "output_len")}
    for field, value in given.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{field.replace('_', '-')} is {value}; it must be at least 1")
    sizes = replace(sizes, **{field: value for field, value in given.items() if value is not None})
    shape = tiny(sizes.layers) if setup.tiny else qwen3_30b(sizes.layers)
    workload = random_workload(
        num_prompts=sizes.num_prompts,
        input_len=sizes.input_len,
        spread=sizes.input_len // 4 if name in ("kv", "tight") else 0,
        output_len=sizes.output_len,
        vocabulary=shape.vocabulary,
        seed=0,
    )
    longest = max(map(len, workload.prompts)) + sizes.output_len
    most = min(shape.context, sizes.pool_tokens or shape.context)
    if longest > most:
        raise ConfigError(
            f"the longest sequence has {longest} tokens, and {name} has room for {most}: lower --input-len or "
            "--output-len"
        )
    regime = REGIMES[name](sizes, shape, workload, setup)
    return replace(regime, cases=_chosen(regime, options.peers))


def _chosen(regime: Regime, wanted: list[str] | None) -> tuple[Case, ...]:
    """Return our cases, and the peers whose names have one of the words."""
    if wanted is None:
        return regime.cases
    for word in wanted:
        if not any(word in case.name for case in regime.of_role(Role.PEER)):
            known = "; ".join(case.name for case in regime.of_role(Role.PEER))
            raise ConfigError(f"--peers names {word!r}, which is in no peer's name of {regime.name}: {known}")
    return tuple(
        case for case in regime.cases if case.role is not Role.PEER or any(word in case.name for word in wanted)
    )
