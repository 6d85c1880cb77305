"""Owns starting and calling Hugging Face transformers: generate() over static, left-padded batches."""

from __future__ import annotations

from typing import Any

from sgl_batch.sglang_adapter import bootstrap

bootstrap.prepare()  # transformers imports torchvision, whose wheel does not load with a CPU torch

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402


class HuggingFaceRunner:
    """Calls AutoModelForCausalLM.generate for batches of at most `batch_size` prompts, in the given order.

    A static batch runs until its longest output is done; shorter ones are cut afterwards.
    """

    def __init__(self, model: Any, batch_size: int) -> None:
        self._model = model
        self._batch_size = batch_size
        # No token ends a sequence, as with ignore_eos elsewhere. min_new_tokens only would forbid that token, which
        # changes the outputs.
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        outputs: list[list[int]] = []
        for first in range(0, len(prompts), self._batch_size):
            last = first + self._batch_size
            outputs += self._batch(prompts[first:last], output_lens[first:last])
        return outputs

    def _batch(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        longest, device = max(output_lens), self._model.device
        with torch.inference_mode():
            tokens = self._model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                do_sample=False,
                min_new_tokens=longest,
                max_new_tokens=longest,
            )
        answers: list[list[int]] = tokens[:, width:].tolist()
        return [answer[:n] for answer, n in zip(answers, output_lens, strict=True)]

    def details(self) -> dict[str, Any]:
        config = self._model.config
        return {
            "device": str(self._model.device),
            "threads": torch.get_num_threads(),
            "attention": getattr(config, "_attn_implementation", None),
            "experts": getattr(config, "_experts_implementation", None),
            "batch_size": self._batch_size,
        }


def start(spec: dict[str, Any]) -> HuggingFaceRunner:
    """Load the model in the requested dtype, on a GPU if there is one."""
    model = AutoModelForCausalLM.from_pretrained(
        spec["model"], dtype=getattr(torch, spec["dtype"]), **spec["arguments"]
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return HuggingFaceRunner(model.to(device).eval(), spec["hf_batch"])
