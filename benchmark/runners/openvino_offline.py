"""Owns starting and calling OpenVINO GenAI: its pipeline of continuous batching on a CPU."""

from __future__ import annotations

from typing import Any

_CACHE_GIB = 4


class OpenVinoRunner:
    """ContinuousBatchingPipeline, which generates exact numbers of greedy tokens."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        import numpy
        import openvino
        import openvino_genai

        configs = []
        for count in output_lens:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.min_new_tokens, config.ignore_eos = count, count, True
            config.do_sample = False
            configs.append(config)
        inputs = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        answers = self._pipeline.generate(inputs, configs)
        return [list(answer.m_generation_ids[0]) for answer in answers]

    def details(self) -> dict[str, Any]:
        """Return nothing: it chooses everything itself."""
        return {}


def start(spec: dict[str, Any]) -> OpenVinoRunner:
    """Start it on the model that `converted` among the arguments names; the other arguments are its scheduler's."""
    import openvino_genai

    arguments = dict(spec["arguments"])
    converted = arguments.pop("converted", None)
    if converted is None:
        raise ValueError(
            "openvino needs the model in its own format: benchmark/peers/openvino.sh ENVIRONMENT MODEL CONVERTED makes "
            "it, and --engine-arg openvino:converted=CONVERTED names it"
        )
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = _CACHE_GIB, max(256, len(spec["prompts"]))
    for name, value in arguments.items():
        setattr(scheduler, name, value)
    hint = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[spec["dtype"]]
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(converted), scheduler, "CPU", {"INFERENCE_PRECISION_HINT": hint}
    )
    return OpenVinoRunner(pipeline)
