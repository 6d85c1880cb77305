"""A user's program: Parquet to Parquet through the processor, on one raylet of its own. Arguments: model, in, out."""

from __future__ import annotations

import sys

import ray
from ray.data.llm import build_processor

from ray_cluster import SYSTEM_CONFIG
from sgl_batch.control_plane.data.batches import ADDED
from sgl_batch.ray import SglBatchEngineProcessorConfig

SMALL = {"dtype": "float32", "page_size": 16, "b_moe_prefill": 700, "b_moe_decode": 8, "max_total_tokens": 4096}


def main(model: str, source: str, result: str) -> None:
    """Answer the rows of `source`, two in each block."""
    ray.init(
        num_cpus=3,
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        object_store_memory=80 << 20,
        _system_config=SYSTEM_CONFIG,
    )
    config = SglBatchEngineProcessorConfig(
        model_source=model,
        engine_kwargs=SMALL,
        sampling_params={"temperature": 0, "max_new_tokens": 300, "ignore_eos": True},
        batch_size=2,
        num_cpus=1,
    )
    processor = build_processor(
        config, postprocess=lambda row: {"custom_id": row["custom_id"], **{name: row[name] for name in ADDED.names}}
    )
    processor(ray.data.read_parquet(source)).write_parquet(result)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
