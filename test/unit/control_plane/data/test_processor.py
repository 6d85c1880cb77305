"""The processor that Ray's builder makes of our config: what it asks of Ray, and what it refuses. No Ray runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pytest
import ray
from ray.data.llm import build_processor
from scripted_engine import ScriptedEngine

import sgl_batch.ray
from sgl_batch.control_plane.data import cluster, ray_parts
from sgl_batch.control_plane.data.engine_thread import EngineThread
from sgl_batch.control_plane.data.processor import build, map_batches_arguments
from sgl_batch.control_plane.data.row_engine import RowEngine
from sgl_batch.errors import ConfigError, RequestError
from sgl_batch.ray import SglBatchEngineProcessorConfig, SglBatchPredictor

ENGINE = {"b_moe_decode": 64, "device": "cpu"}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """The nodes of a cluster that is not there: 4 CPUs, unless a test changes them."""
    found: list[dict[str, float]] = [{"CPU": 4.0}]
    monkeypatch.setattr(cluster, "nodes", lambda: found)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    return found


def config(**fields: Any) -> SglBatchEngineProcessorConfig:
    return SglBatchEngineProcessorConfig(**{"model_source": "model", "engine_kwargs": ENGINE, **fields})


@pytest.mark.usefixtures("nodes")
def test_ray_s_builder_accepts_the_config_and_options_of_the_template() -> None:
    made = build_processor(config(), builder_kwargs={"chat_template_kwargs": {"enable_thinking": False}})
    arguments = map_batches_arguments(made.config)
    assert arguments["fn_constructor_kwargs"]["chat_template_kwargs"] == {"enable_thinking": False}


def test_registering_a_second_time_replaces_the_first() -> None:
    ray_parts.register(SglBatchEngineProcessorConfig, build)
    ray_parts.register(SglBatchEngineProcessorConfig, build)


def test_another_version_of_ray_is_refused_with_both_versions() -> None:
    ray_parts.check_version(ray_parts.RAY_VERSION)
    with pytest.raises(ConfigError, match=r"Ray 2\.61\.0 is installed.*Ray 2\.60\.0: install ray\[data\]==2\.60\.0"):
        ray_parts.check_version("2.61.0")


@pytest.mark.usefixtures("nodes")
def test_rows_in_flight_fill_the_engine_s_group_and_cpus_are_left_to_read_and_write() -> None:
    arguments = map_batches_arguments(config())
    assert arguments["batch_size"] * arguments["compute"].max_concurrent_calls_per_actor == 2 * 64
    assert arguments["num_cpus"] == 3
    assert "num_gpus" not in arguments
    assert map_batches_arguments(config(), resumes=True)["num_cpus"] == 2


def test_gpus_are_those_of_the_tensor_parallel_ranks(nodes: list[dict[str, float]]) -> None:
    nodes[:] = [{"CPU": 16.0, "GPU": 4.0}]
    engine = {"tp_size": 4, "dp_size": 4, "ep_size": 4, "enable_dp_attention": True}
    arguments = map_batches_arguments(config(engine_kwargs=engine))
    assert (arguments["num_gpus"], arguments["num_cpus"]) == (4, 1)


def test_a_number_of_engines_is_a_fixed_pool_and_a_pair_one_that_grows(nodes: list[dict[str, float]]) -> None:
    nodes.append({"CPU": 4.0})
    fixed = map_batches_arguments(config(concurrency=2))["compute"]
    growing = map_batches_arguments(config(concurrency=(1, 2)))["compute"]
    assert (fixed.min_size, fixed.max_size) == (2, 2)
    assert (growing.min_size, growing.max_size) == (1, 2)


@pytest.mark.usefixtures("nodes")
def test_a_run_that_would_wait_for_ever_is_refused_unless_nodes_come_on_demand() -> None:
    with pytest.raises(ConfigError, match="wait for ever"):
        map_batches_arguments(config(num_cpus=4))
    assert map_batches_arguments(config(num_cpus=4, check_resources=False))["num_cpus"] == 4


@pytest.mark.usefixtures("nodes")
def test_ray_s_own_stages_for_tokens_and_templates_are_refused() -> None:
    with pytest.raises(ConfigError, match="chat_template_stage: the engine does this itself"):
        build_processor(config(chat_template_stage=True))


def predictor(*, continues: bool = True) -> SglBatchPredictor:
    made = SglBatchPredictor("model", should_continue_on_error=continues)
    made._engine = RowEngine(lambda: EngineThread(ScriptedEngine))
    return made


def test_rows_keep_their_order_and_an_error_of_an_earlier_stage() -> None:
    made = predictor()
    table = pa.table({"prompt": ["a", None, "refuse", "d"], "__inference_error__": ["", "", "", "no image"]})
    answered = asyncio.run(made(table))
    made.close()
    assert answered.column("generated_text").to_pylist() == ["a", "", "", ""]
    errors = answered.column("__inference_error__").to_pylist()
    assert errors[0] == ""
    assert "no prompt" in errors[1]
    assert errors[2:] == ["the prompt is too long", "no image"]


def test_a_failed_row_ends_the_run_where_the_user_wants_that() -> None:
    made = predictor(continues=False)
    with pytest.raises(RequestError, match="the prompt is too long"):
        asyncio.run(made(pa.table({"prompt": ["a", "refuse"]})))
    made.close()


def test_the_names_for_users_are_there_and_others_are_not() -> None:
    assert all(getattr(sgl_batch.ray, name) is not None for name in sgl_batch.ray.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = sgl_batch.ray.Nothing
