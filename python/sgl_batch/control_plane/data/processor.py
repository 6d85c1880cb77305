"""Owns the config of a processor that `ray.data.llm.build_processor` accepts, and how a dataset goes through it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ray
from pydantic import Field
from ray.data import ActorPoolStrategy, Dataset

from sgl_batch.control_plane.data import cluster
from sgl_batch.control_plane.data.flow import Flow, Need, check_fits, cpus_for, flow_for, gpus_of
from sgl_batch.control_plane.data.predictor import SglBatchPredictor
from sgl_batch.control_plane.data.ray_parts import OfflineProcessorConfig, RayProcessor, register
from sgl_batch.control_plane.data.row_requests import MESSAGES, PROMPT, SAMPLING, TOKENS
from sgl_batch.control_plane.data.user_functions import UserFunction, with_added, with_error
from sgl_batch.errors import ConfigError

logger = logging.getLogger(__name__)

# Ray's stages that the engine does itself.
_STAGES = ("chat_template_stage", "tokenize_stage", "detokenize_stage", "prepare_multimodal_stage")


class SglBatchEngineProcessorConfig(OfflineProcessorConfig):  # type: ignore[misc]
    """The config of a processor whose engine is `sgl_batch.Engine`.

    It has the fields of Ray's `SGLangEngineProcessorConfig`, with these differences. `batch_size` and
    `max_concurrent_batches` follow from the engine's plan unless they are given, so that its decode group is full.
    `should_continue_on_error` is True. A number for `concurrency` is that many engines from the start. The engine
    applies the chat template and makes tokens of text and text of tokens itself: Ray's stages for that stay off.
    """

    engine_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of sgl_batch.Engine besides the model."
    )
    sampling_params: dict[str, Any] = Field(
        default_factory=dict, description="Sampling parameters for all rows. A row's own come before them."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the model's chat template."
    )
    num_cpus: float | None = Field(
        default=None,
        description="CPUs of one engine. By default, on CPUs as many as fit and leave enough for reading and writing; "
        "beside GPUs one.",
    )
    should_continue_on_error: bool = Field(
        default=True, description="Whether a row that cannot be answered gets an error; without it, it ends the run."
    )
    check_resources: bool = Field(
        default=True,
        description="Whether a run that would wait for ever on the nodes there are is refused. Turn it off where nodes "
        "are added on demand.",
    )
    chat_template_stage: Any = Field(default=False, description="Off: the engine applies the chat template.")
    tokenize_stage: Any = Field(default=False, description="Off: the engine makes tokens of text.")
    detokenize_stage: Any = Field(default=False, description="Off: the engine makes text of tokens.")

    def given(self, name: str) -> Any:
        """Return a field's value if the user gave it, else None."""
        return getattr(self, name) if name in self.model_fields_set else None


class SglBatchProcessor(RayProcessor):  # type: ignore[misc]
    """A processor of Ray Data: the user's `preprocess`, the engine, the user's `postprocess`."""

    def __init__(
        self,
        config: SglBatchEngineProcessorConfig,
        preprocess: UserFunction | None,
        postprocess: UserFunction | None,
        preprocess_map_kwargs: Mapping[str, Any] | None,
        postprocess_map_kwargs: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(config, [])
        self._before = None if preprocess is None else with_added(preprocess)
        self._after = None if postprocess is None else with_error(postprocess)
        self._before_kwargs = dict(preprocess_map_kwargs or {})
        self._after_kwargs = dict(postprocess_map_kwargs or {})

    def __call__(self, dataset: Dataset) -> Dataset:
        """Return the dataset with answers. Nothing runs until the result is consumed.

        Each block has the rows of one batch: a checkpoint is written for each block, and small files make one block.

        Raises:
            ConfigError: The run would wait for ever on this cluster, or the config cannot work.
        """
        arguments = map_batches_arguments(self.config, resumes=dataset.context.checkpoint_config is not None)
        if self._before is not None:
            dataset = dataset.map_batches(self._before, batch_format="pyarrow", **self._before_kwargs)
        dataset = dataset.repartition(target_num_rows_per_block=arguments["batch_size"])
        dataset = dataset.map_batches(SglBatchPredictor, **arguments)
        if self._after is None:
            return dataset
        return dataset.map_batches(self._after, batch_format="pyarrow", **self._after_kwargs)

    def log_input_column_names(self) -> None:
        """Log which columns the engine reads."""
        logger.info("Columns read: one of %s, %s, %s; optional: %s", PROMPT, MESSAGES, TOKENS, SAMPLING)


def map_batches_arguments(config: SglBatchEngineProcessorConfig, *, resumes: bool = False) -> dict[str, Any]:
    """Return the arguments for `dataset.map_batches(SglBatchPredictor, **arguments)`.

    Args:
        config: The model, its engine and its resources.
        resumes: Whether the run has a checkpoint, which takes a CPU when it is read.

    Raises:
        ConfigError: The run would wait for ever on this cluster, or the config cannot work.
    """
    engine = {**config.engine_kwargs, "model_path": config.model_source}
    nodes = cluster.nodes()
    on_gpu = _on_gpu(config, nodes)
    pool = config.get_concurrency(autoscaling_enabled=False)
    engines = int(pool.get("size") or pool["min_size"])
    gpus = gpus_of(engine, on_gpu=on_gpu)
    cpus = config.num_cpus
    if cpus is None:
        cpus = 1 if on_gpu else cpus_for(nodes, engines, resumes=resumes)
    if config.check_resources:
        check_fits(nodes, Need(engines=engines, cpus=cpus, gpus=gpus, resumes=resumes))
    flow = _flow(config, engine, cpus, on_gpu=on_gpu)
    arguments = {
        "batch_format": "pyarrow",
        "batch_size": flow.batch_size,
        "zero_copy_batch": True,
        "compute": ActorPoolStrategy(
            **pool,
            max_concurrent_calls_per_actor=flow.batches,
            max_tasks_in_flight_per_actor=config.max_tasks_in_flight_per_actor,
        ),
        "num_cpus": cpus,
        "fn_constructor_kwargs": {
            "model_source": config.model_source,
            "engine_kwargs": config.engine_kwargs,
            "sampling_params": config.sampling_params,
            "chat_template_kwargs": config.chat_template_kwargs,
            "should_continue_on_error": config.should_continue_on_error,
        },
    }
    optional = {"num_gpus": gpus, "accelerator_type": config.accelerator_type, "runtime_env": config.runtime_env}
    return {**arguments, **{name: value for name, value in optional.items() if value}}


def _flow(config: SglBatchEngineProcessorConfig, engine: Mapping[str, Any], cpus: float, *, on_gpu: bool) -> Flow:
    group = cluster.decode_group(engine, cpus, on_gpu=on_gpu)
    flow = flow_for(group, config.given("batch_size"), config.given("max_concurrent_batches"))
    logger.info("%d batches of %d rows at once, for groups of %d", flow.batches, flow.batch_size, group)
    return flow


def _on_gpu(config: SglBatchEngineProcessorConfig, nodes: list[dict[str, float]]) -> bool:
    device = config.engine_kwargs.get("device")
    if device is not None:
        return bool(device != "cpu")
    return config.accelerator_type is not None or any(node.get("GPU") for node in nodes)


def build(
    config: SglBatchEngineProcessorConfig,
    preprocess: UserFunction | None = None,
    postprocess: UserFunction | None = None,
    preprocess_map_kwargs: Mapping[str, Any] | None = None,
    postprocess_map_kwargs: Mapping[str, Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> SglBatchProcessor:
    """Return the processor of a config, as `ray.data.llm.build_processor` asks for it. Raises ConfigError."""
    asked = [name for name in _STAGES if getattr(config, name)]
    if asked:
        raise ConfigError(
            f"{', '.join(asked)}: the engine does this itself, and reads no images; leave it out, and give the rows "
            "messages or a prompt"
        )
    if not ray.is_initialized():
        ray.init(runtime_env=config.runtime_env)
    if chat_template_kwargs:
        config = config.model_copy(
            update={"chat_template_kwargs": {**config.chat_template_kwargs, **chat_template_kwargs}}
        )
    return SglBatchProcessor(config, preprocess, postprocess, preprocess_map_kwargs, postprocess_map_kwargs)


register(SglBatchEngineProcessorConfig, build)
