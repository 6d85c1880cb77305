"""Owns how vLLM is started and asked: vllm.LLM, offline, with its own scheduling."""

from __future__ import annotations

import os
from typing import Any

_KV_CACHE_GIB = "4"


class VllmRunner:
    """vllm.LLM, asked for exact numbers of greedy tokens."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        from vllm import SamplingParams

        sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in output_lens]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self._llm.generate(requests, sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def details(self) -> dict[str, Any]:
        return {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE")}


def start(spec: dict[str, Any]) -> VllmRunner:
    """Start vLLM; on a CPU its KV cache takes 4 GiB unless VLLM_CPU_KVCACHE_SPACE says otherwise."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _KV_CACHE_GIB)
    from vllm import LLM

    return VllmRunner(LLM(model=spec["model"], dtype=spec["dtype"], **spec["arguments"]))
