"""Owns starting and calling vLLM: vllm.LLM, offline, with its own scheduling."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_KV_CACHE_GIB = "4"
# The settings that decide vLLM's speed on a CPU.
_TELLING = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU", "LD_PRELOAD")


class VllmRunner:
    """vllm.LLM, which generates exact numbers of tokens: greedy ones, or by `sampling`, SamplingParams' fields."""

    def __init__(self, llm: Any, sampling: Mapping[str, Any] | None = None) -> None:
        self._llm, self._sampling = llm, {"temperature": 0.0, **(sampling or {})}

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        from vllm import SamplingParams

        sampling = [SamplingParams(**self._sampling, max_tokens=n, ignore_eos=True) for n in output_lens]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self._llm.generate(requests, sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def details(self) -> dict[str, Any]:
        """Return the variables that control vLLM on a CPU; None if vLLM chooses itself."""
        return {name: os.environ.get(name) for name in _TELLING}


def start(spec: dict[str, Any]) -> VllmRunner:
    """Start vLLM; on a CPU with the settings below, unless the environment sets them."""
    set_up_cpu()
    from vllm import LLM

    llm = LLM(model=spec["model"], dtype=spec["dtype"], **spec["arguments"])
    return VllmRunner(llm, sampling_of(spec))


def sampling_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of SamplingParams that a spec asks for."""
    scored = {"prompt_logprobs": 0} if spec.get("scores_prompts") else {}  # of each token alone, and of no other ones
    return {**(spec.get("sampling") or {}), **scored}


def set_up_cpu() -> None:
    """Set the variables with which vLLM's CPU build is fast; a GPU build does not read them.

    Its KV cache takes 4 GiB. Its threads get every core that we may use, as those of the other engines do (or
    OMP_NUM_THREADS of them): by itself it keeps one core free for its scheduler, half of a machine of two. Where
    Intel's OpenMP is installed beside it, it is preloaded, as vLLM's manual advises.
    """
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _KV_CACHE_GIB)
    if "VLLM_CPU_NUM_OF_RESERVED_CPU" not in os.environ:
        cores = sorted(os.sched_getaffinity(0))
        threads = int(os.environ.get("OMP_NUM_THREADS") or len(cores))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores[:threads])))
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():
        os.environ.setdefault("LD_PRELOAD", str(openmp))
