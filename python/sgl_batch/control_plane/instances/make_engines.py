"""Joins a cluster and makes the instances of a server on it."""

from __future__ import annotations

from pathlib import Path

from sgl_batch.api.front_options import FrontOptions
from sgl_batch.api.instance_flags import InstanceOptions
from sgl_batch.control_plane.instances.cluster import Cluster, connect
from sgl_batch.control_plane.instances.engine_needs import EngineNeeds, engine_needs
from sgl_batch.control_plane.instances.engines import InstanceEngines
from sgl_batch.control_plane.instances.placement import Needs
from sgl_batch.control_plane.instances.ray_host import RayHost
from sgl_batch.control_plane.instances.records import InstanceRecords


def namespace_of(service: str) -> str:
    """Return the namespace of Ray in which the instances of a service have their names."""
    return f"sgl_batch-{service}"


def server_instances(options: FrontOptions, directory: Path) -> InstanceEngines:
    """Return the instances of a server, on a cluster that is joined or started here. Blocks for seconds.

    On a cluster of others the instances outlive the server. Raises ConfigError for what cannot work.
    """
    wanted = options.instances
    assert wanted is not None, "the flags ask for instances"
    asked = engine_needs(options.engine_argv)
    records = InstanceRecords(options.service.jobs_dir)
    cluster = connect(wanted.ray_address, directory, namespace_of(records.service))
    host = RayHost(
        cluster,
        records.service,
        asked.argv,
        model=asked.model,
        stall_s=options.stall_s,
        restart_stalled=options.restart_stalled,
        is_detached=not cluster.is_own,
    )
    return InstanceEngines(
        host,
        records,
        needs=instance_needs(cluster, asked, wanted),
        count=wanted.count,
        close=cluster.close,
        outlive=not cluster.is_own,
        depth=options.service.max_in_flight,
    )


def instance_needs(cluster: Cluster, asked: EngineNeeds, wanted: InstanceOptions) -> Needs:
    """Return what an instance takes of a node. Raises ConfigError where a node cannot run one at all."""
    nodes = cluster.nodes(asked.model)
    return Needs(cores=wanted.cpus, gpus=asked.gpus(max((node.gpus for node in nodes), default=0)))
