"""Asks an installed aiconfigurator-core (Apache-2.0) what a pass and a batch take. Nothing of it is kept here.

It is imported when it is first asked. It never fetches a configuration: a model without one in the package is not
covered.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

from beside.cases import MODELS, SYSTEMS, Case, Pass
from sgl_batch.errors import ConfigError

PACKAGE: Final = "aiconfigurator_core"
REMEDY: Final = "install it with pip install '.[aic]'"
# Choices of experts: the package's default is a power law.
DEFAULT, EVEN = "power_law", "balanced"
# Numbers of KV and of attention, which are bfloat16 in the simulator's cost model.
_TYPES: Final = {"kvcache_quant_mode": "bfloat16", "fmha_quant_mode": "bfloat16"}
_MEASURED: Final = "silicon"
# What the package raises for what it has no data of, or cannot be laid out so.
_LACKS: Final = (ValueError, RuntimeError, KeyError, AssertionError, TypeError, AttributeError)
_PLACE: Final = re.compile(r" at /\S+")
_LONGEST: Final = 200
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Milliseconds of a pass by operation, and the share of them that is from tables of measured kernels alone."""

    milliseconds: Mapping[str, float]
    measured: float


class NotCovered(Exception):  # noqa: N818 - an answer, no fault
    """The package has no prediction of a case; the text says why, in its words."""


class Asked:
    """AIConfigurator's model of one case. Raises NotCovered where it has none.

    `choices`: of experts, DEFAULT or EVEN.
    """

    def __init__(self, case: Case, choices: str, folder: Path) -> None:
        config, version = _config_of(case, choices), version_of(case)
        self.version = version
        self._engine = _answered(lambda: _compiled(case, config, version, folder))

    def of_pass(self, work: Pass) -> Answer:
        """Return the milliseconds of a pass by operation."""
        return _answered(lambda: self._of_pass(work))

    def of_batch(self, count: int, prompt: int, output: int) -> tuple[float, float]:
        """Return the seconds of the prompts and of all steps of so many sequences of a rank, started together."""
        prompts, steps, _ = _answered(lambda: self._engine.run_static(batch_size=count, isl=prompt, osl=output))
        return prompts / 1e3, steps / 1e3

    def _of_pass(self, work: Pass) -> Answer:
        if work.phase == "prefill":
            operations, _ = self._engine.run_static_per_op(
                batch_size=work.count, isl=work.length, osl=2, mode="static_ctx"
            )
        else:
            operations = self._engine.decode_step_per_op(work.count, work.length, 2)
        times: dict[str, float] = {}
        measured = 0.0
        for name, milliseconds, _, source in operations:
            times[name] = times.get(name, 0.0) + milliseconds
            measured += milliseconds if source == _MEASURED else 0.0
        whole = sum(times.values())
        if not whole > 0:
            raise NotCovered("it predicts no time")
        return Answer(milliseconds=times, measured=measured / whole)


def need_package() -> None:
    """Raise ConfigError where the package is not installed. Of what it logs, errors alone are shown from here on."""
    if find_spec(PACKAGE) is None:
        raise ConfigError(f"the package aiconfigurator-core is not installed, whose predictions are asked; {REMEDY}")
    logging.getLogger(PACKAGE).setLevel(logging.CRITICAL)


def version_of(case: Case) -> str:
    """Return the version of the engine whose kernels the package has measured last on a GPU."""
    slots = import_module(f"{PACKAGE}.sdk.perf_database").get_version_slots(SYSTEMS[case.gpu], case.engine)
    if not slots:
        raise NotCovered(f"it has no tables of {case.engine} on {SYSTEMS[case.gpu]}")
    return str(slots["current"])


def _config_of(case: Case, choices: str) -> Any:
    builders = import_module(f"{PACKAGE}.sdk.config_builders")
    config = builders.build_model_config(pp_size=1, **case.parallel, **_TYPES)
    config.workload_distribution = choices
    return config


def _compiled(case: Case, config: Any, version: str, folder: Path) -> Any:
    """Return the package's compiled engine of a case, which answers within milliseconds."""
    core = import_module(PACKAGE)
    engine, database = import_module(f"{PACKAGE}.sdk.engine"), import_module(f"{PACKAGE}.sdk.perf_database")
    path, system = _model_path(case.model, folder), SYSTEMS[case.gpu]
    model = import_module(f"{PACKAGE}.sdk.models").get_model(path, config, case.engine)
    specification = engine.build_engine_spec_json(
        model,
        model_path=path,
        system=system,
        backend=case.engine,
        backend_version=version,
        kv_block_size=None,
        systems_path=None,
        nextn=0,
        database=database.get_database(system, case.engine, version),
    )
    return engine.EngineHandle(bytes(core.engine_spec_bincode_from_json(specification)))


def _model_path(model: str, folder: Path) -> str:
    """Return the model by the package's name; one that it does not list, in a folder with the package's own config."""
    name = MODELS[model]
    if name in import_module(f"{PACKAGE}.sdk.common").DefaultHFModels:
        return name
    found = find_spec(PACKAGE)
    assert found is not None, "need_package() is called first"
    assert found.origin is not None, "a package has a file"
    config = Path(found.origin).parent / "model_configs" / f"{name.replace('/', '--')}_config.json"
    if not config.is_file():
        raise NotCovered(f"it has no configuration of {name}")
    target = folder / model
    target.mkdir(exist_ok=True)
    (target / "config.json").write_bytes(config.read_bytes())
    return str(target)


def _answered(ask: Callable[[], _Found]) -> _Found:
    """Return what the package answers; where it raises that it has no data, raise NotCovered with its words."""
    try:
        return ask()
    except _LACKS as error:
        raise NotCovered(reason_of(f"{type(error).__name__}: {error}")) from error


def reason_of(text: str) -> str:
    """Return the first line of the package's words, without paths of this machine, and not too long."""
    first = _PLACE.sub("", text.strip().splitlines()[0])
    return first if len(first) <= _LONGEST else f"{first[:_LONGEST]}..."
