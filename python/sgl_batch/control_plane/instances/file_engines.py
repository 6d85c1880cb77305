"""Several instances as the engine of one run of a file. They end with the run."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from sgl_batch.api.instance_flags import InstanceOptions
from sgl_batch.control_plane.instances.cluster import check_ray, connect
from sgl_batch.control_plane.instances.engine_needs import EngineNeeds, engine_needs
from sgl_batch.control_plane.instances.engines import InstanceEngines
from sgl_batch.control_plane.instances.forecast import OWN_PLANS, Forecast, forecast_of
from sgl_batch.control_plane.instances.make_engines import instance_needs, namespace_of
from sgl_batch.control_plane.instances.pool import InstancePool
from sgl_batch.control_plane.instances.ray_host import RayHost
from sgl_batch.control_plane.instances.records import InstanceRecords
from sgl_batch.errors import ConfigError, EngineError
from sgl_batch.owned_directory import OwnedDirectory, remove_abandoned
from sgl_batch.planner.refinement import PlanBasis
from sgl_batch.planner.schedule import Prediction
from sgl_batch.planner.workload import Workload

_LOOK_EVERY_S = 0.2

Estimate = Callable[[Path | None], Workload | None]


def prepare_instances(
    options: InstanceOptions, engine_argv: Sequence[str], max_in_flight: int, workload: Estimate
) -> Callable[[], FileEngines]:
    """Check what can be checked without a cluster; return the function that starts the instances.

    Args:
        options: How many there are, and where.
        engine_argv: The flags of each engine, which checks them itself.
        max_in_flight: The most lines that an instance has at a time.
        workload: Estimates the batch; it gets the directory of the tokenizer, where that is known.
    """
    check_ray()
    asked = engine_needs(engine_argv)
    tokenizer = Path(asked.model) if asked.model is not None else None
    return lambda: FileEngines.start(options, asked, max_in_flight, lambda: workload(tokenizer))


class FileEngines:
    """The instances of one run, as `sgl-batch run` uses an engine. `num_engines`: how many took part at the start."""

    def __init__(
        self, engines: InstanceEngines, directory: OwnedDirectory, workload: Callable[[], Workload | None]
    ) -> None:
        self._engines, self._directory, self._workload = engines, directory, workload
        self._forecast: Forecast | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._pool: InstancePool | None = None
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self.num_engines = 1

    @classmethod
    def start(
        cls,
        options: InstanceOptions,
        asked: EngineNeeds,
        max_in_flight: int,
        workload: Callable[[], Workload | None] = lambda: None,
    ) -> FileEngines:
        """Join a cluster or start one, and wait until an instance is ready. Raises ConfigError, or EngineError."""
        remove_abandoned("sgl-batch-run-")
        directory = OwnedDirectory.make("sgl-batch-run-")
        with contextlib.ExitStack() as undo:
            undo.callback(directory.remove)
            records = InstanceRecords(directory.path)
            cluster = connect(options.ray_address, directory.path, namespace_of(records.service))
            undo.callback(cluster.close)
            needs = instance_needs(cluster, asked, options)
            host = RayHost(cluster, records.service, asked.argv, model=asked.model, is_detached=False)
            made = cls(
                InstanceEngines(
                    host,
                    records,
                    needs=needs,
                    count=options.count,
                    close=cluster.close,
                    outlive=False,
                    depth=max_in_flight,
                    is_run=True,
                ),
                directory,
                workload,
            )
            undo.pop_all()
        try:
            made.loop.run_until_complete(made._until_ready())
        except BaseException:
            made.shutdown()
            raise
        return made

    async def _until_ready(self) -> None:
        self._keeping = self._engines.start()
        while (pool := self._engines.current()) is None:
            await asyncio.wait({self._keeping}, timeout=_LOOK_EVERY_S)
            state = self._engines.state
            if self._keeping.done():
                self._keeping.result()
                raise ConfigError(f"no instance can start: {state.message}")
            if state.phase == "failed":
                raise EngineError(f"no instance can start: {state.message}")
        self._pool = pool
        self.num_engines = max(1, len(self._engines.rows()))
        gc.freeze()  # else the collector searches what was imported again and again, which costs more than a line

    def line_engine(self) -> InstancePool:
        """Return the instances as one engine."""
        assert self._pool is not None, "an instance was ready"
        return self._pool

    def plan_manifest(self) -> Mapping[str, Any]:
        """Return the instances for the manifest. Each plans for itself, with all flags alike."""
        pool = self.line_engine()
        self._forecast = forecast_of(pool.plan_rates, len(pool.loads()), self.num_engines)
        workload = self._workload() if self._forecast is not None else None
        planned: Mapping[str, Any] = {"source": OWN_PLANS, "chosen": {}}
        if self._forecast is not None and workload is not None:
            planned = self._forecast.planned(workload)
        names = ("name", "node", "cores", "gpus")
        rows = [{name: getattr(row, name) for name in names} for row in self._engines.rows()]
        return {"planned": planned, "choices": {}, "instances": rows}

    def predict(self, workload: Workload) -> Prediction | None:
        """Return the predicted run of a batch, without its parts; None where the instances' plans predict nothing."""
        return None if self._forecast is None else self._forecast.predict(workload)

    def plan_basis(self) -> PlanBasis | None:
        """Return None: the plan of an instance is not refined during a run."""

    async def refine_plan(self, values: Mapping[str, Any], why: str) -> None:
        """Raise ConfigError: there is no basis for it."""
        raise ConfigError("the plan of several instances cannot be changed during a run")

    def shutdown(self) -> None:
        """End the instances."""
        try:
            self.loop.run_until_complete(self._engines.stop())
        finally:
            self.loop.close()
            self._directory.remove()
