"""Owns the cases that are predicted twice, and what each is called in AIConfigurator. It imports nothing of that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from sgl_batch.planner.layouts import Layout

EXPERT, TENSOR, SLICED = "expert", "tensor", "sliced"
LAYOUTS: Final[Mapping[str, str]] = {
    EXPERT: "each rank has attention of its own and a share of the experts",
    TENSOR: "ranks are tensor parallel in all matrices",
    SLICED: "each rank has attention of its own and a slice of every expert",
}
# DeepSeek-V3 has the sizes of DeepSeek-R1, and is not asked for again.
MODELS: Final[Mapping[str, str]] = {
    "deepseek-r1": "deepseek-ai/DeepSeek-R1",
    "kimi-k2": "moonshotai/Kimi-K2-Instruct",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "gpt-oss-120b": "openai/gpt-oss-120b",
}
SYSTEMS: Final[Mapping[str, str]] = {
    "h200": "h200_sxm",
    "h100": "h100_sxm",
    "a100": "a100_sxm",
    "b200": "b200_sxm",
    "l40s": "l40s",
}
BACKENDS: Final = ("sglang", "vllm")
GPUS: Final = (8, 16)
# Tokens of a prompt and of its answer.
WORKLOADS: Final = ((8192, 2048), (2048, 8192), (12288, 4096), (6656, 2867), (1024, 1024))
# Sequences that a GPU decodes, and the tokens that it prefills in a pass, or one longer prompt.
DECODE_ROWS: Final = (16, 128)
PREFILL_TOKENS: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a cluster, as an engine runs it in a layout.

    Attributes:
        model, gpu, engine: By the simulator's names; `engine` is "sglang" or "vllm".
        gpus: Of the one instance.
        layout: A key of LAYOUTS.
    """

    model: str
    gpu: str
    gpus: int
    engine: str
    layout: str

    @property
    def cluster(self) -> str:
        """Return the simulator's name of the cluster."""
        return f"{self.gpu}x{self.gpus}"

    @property
    def settings(self) -> str:
        """Return the simulator's name of the engine with its layout of experts."""
        return f"{self.engine}-sliced" if self.layout == SLICED else self.engine

    @property
    def ranks(self) -> Layout:
        """Return the simulator's layout."""
        return Layout(ranks=self.gpus, tensor=self.layout == TENSOR)

    @property
    def parallel(self) -> dict[str, int]:
        """Return AIConfigurator's sizes of attention and of experts, whose products are equal."""
        tensor, sliced = self.layout == TENSOR, self.layout != EXPERT
        return {
            "tp_size": self.gpus if tensor else 1,
            "attention_dp_size": 1 if tensor else self.gpus,
            "moe_tp_size": self.gpus if sliced else 1,
            "moe_ep_size": 1 if sliced else self.gpus,
        }

    @property
    def shared(self) -> int:
        """Return how many GPUs share each sequence, so that a pass has as many times the sequences of one GPU."""
        return self.gpus if self.layout == TENSOR else 1

    def text(self) -> str:
        """Return the case in a few words."""
        return f"{self.model} on {self.cluster}, {self.engine}, {self.layout}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A pass that both predict: prompts of equal lengths, or sequences with contexts of equal lengths.

    Attributes:
        prompt, output: The workload it belongs to.
        phase: "prefill" or "decode".
        count: Prompts or sequences of a rank; of tensor parallel ranks, of all of them.
        length: Tokens of each prompt or context.
    """

    prompt: int
    output: int
    phase: str
    count: int
    length: int

    @property
    def workload(self) -> str:
        """Return the workload as text."""
        return f"{self.prompt}:{self.output}"


def cases(
    models: Iterable[str] = MODELS,
    gpus: Iterable[str] = SYSTEMS,
    counts: Iterable[int] = GPUS,
    engines: Iterable[str] = BACKENDS,
) -> Iterator[Case]:
    """Yield all cases of these; experts in slices with data-parallel attention are modelled for SGLang alone."""
    for model in models:
        for gpu in gpus:
            for engine in engines:
                for count in counts:
                    for layout in LAYOUTS:
                        if layout != SLICED or engine == "sglang":
                            yield Case(model=model, gpu=gpu, gpus=count, engine=engine, layout=layout)


def passes(case: Case, kv_tokens: int) -> Iterator[Pass]:
    """Yield the passes of a case, with as many sequences as `kv_tokens` of a rank, or of an instance, have room for."""
    for prompt, output in WORKLOADS:
        prompts = max(1, PREFILL_TOKENS // prompt) * case.shared
        yield Pass(prompt=prompt, output=output, phase="prefill", count=prompts, length=prompt)
        context = prompt + output // 2
        fits = kv_tokens // (prompt + output)
        for rows in sorted({min(rows * case.shared, fits) for rows in DECODE_ROWS}):
            if rows:
                yield Pass(prompt=prompt, output=output, phase="decode", count=rows, length=context)
