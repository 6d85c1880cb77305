"""Owns the prompts of the engines' stages, and the making of an engine's or transformers' reference."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bringup.tokens import BEST, Reference

ROOT = Path(__file__).resolve().parents[2]
# Chunks, pages and sub-batches end inside prompts, at their ends and one token off; the longest spans many pages.
PROMPT_LENGTHS = (1, 2, 3, 5, 17, 63, 64, 65, 130, 257, 411, 600)
OUTPUT_LENGTHS = (24, 1, 40, 7, 24, 33, 2, 24, 15, 28, 9, 24)


@dataclass(frozen=True, slots=True)
class Requests:
    """Prompts as token ids, and the number of output tokens of each."""

    input_ids: list[list[int]]
    output_lengths: list[int]

    @property
    def sampling_params(self) -> list[dict[str, Any]]:
        """Return sampling parameters: greedy, with the set length."""
        return [{"temperature": 0, "max_new_tokens": num, "ignore_eos": True} for num in self.output_lengths]


def questions(model: Path) -> Requests:
    """Cut prompts from the tests' questions, with the model's tokenizer."""
    from transformers import PreTrainedTokenizerFast

    lines = (ROOT / "test" / "data" / "gsm8k_sample.jsonl").read_text(encoding="utf-8").splitlines()
    text = " ".join(json.loads(line)["body"]["messages"][-1]["content"] for line in lines)
    # The model's config is not used: transformers does not know all kinds.
    tokens = PreTrainedTokenizerFast.from_pretrained(model)(text)["input_ids"]
    prompts = [tokens[37 * number :][:length] for number, length in enumerate(PROMPT_LENGTHS)]
    return Requests(prompts, list(OUTPUT_LENGTHS))


def generate(engine: Any, requests: Requests) -> list[list[int]]:
    """Generate the tokens of an engine with sglang.Engine's interface."""
    answers = engine.generate(input_ids=requests.input_ids, sampling_params=requests.sampling_params)
    return [answer["output_ids"] for answer in answers]


def reference_of_engine(engine: Any, requests: Requests) -> Reference:
    """Generate stock SGLang's tokens and log probabilities."""
    answers = engine.generate(
        input_ids=requests.input_ids,
        sampling_params=requests.sampling_params,
        return_logprob=True,
        top_logprobs_num=BEST,
    )
    best = [
        [[(token, log) for log, token, *_ in step] for step in answer["meta_info"]["output_top_logprobs"]]
        for answer in answers
    ]
    return Reference([answer["output_ids"] for answer in answers], best)


def reference_of_transformers(model: Path, dtype: str, requests: Requests) -> Reference:
    """Generate Hugging Face's tokens, one prompt at a time without padding, for models that stock SGLang cannot run."""
    import torch

    from sgl_batch.sglang_adapter import bootstrap

    bootstrap.prepare()  # transformers imports torchvision, whose compiled part may not fit this torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    tokens, best = [], []
    for ids, length in zip(requests.input_ids, requests.output_lengths, strict=True):
        with torch.no_grad():
            out = loaded.generate(
                torch.tensor([ids]),
                do_sample=False,
                max_new_tokens=length,
                min_new_tokens=length,
                eos_token_id=-1,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tops = [step[0].float().log_softmax(-1).topk(BEST) for step in out.logits]
        tokens.append(out.sequences[0, len(ids) :].tolist())
        best.append([list(zip(top.indices.tolist(), top.values.tolist(), strict=True)) for top in tops])
    return Reference(tokens, best)
