"""Requests for checkpoints of random float32 weights, and the proof by Hugging Face's model that tokens are greedy."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from bringup.prompts import Requests

# Rounding in float32 may change the order of two logits nearer than this: choose a `seed` that has none so near.
LEAST_GAP = 1e-4


def make_requests(page: int) -> Requests:
    """Return prompts of random tokens, of one to several pages. Every other one begins with the same three pages."""
    draw = random.Random(0)
    common = [draw.randrange(5, 3000) for _ in range(3 * page)]
    own = (1, 2, page, page + 1, 3 * page - 1, 1, 5 * page, 9 * page + 3, 4, 2 * page)
    prompts = [
        [*(common if index % 2 else []), *(draw.randrange(5, 3000) for _ in range(length))]
        for index, length in enumerate(own)
    ]
    return Requests(prompts, [24, 20, 1, 17, 9, 24, 2, 16, 12, 20])


def check_greedy(path: str, requests: Requests, outputs: Sequence[Sequence[int]]) -> None:
    """Check that the outputs are those of Hugging Face's model under greedy decoding.

    Each token must have the largest logit after the tokens before it, so the model would have chosen the same.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    distinct = set()
    for prompt, length, output in zip(requests.input_ids, requests.output_lengths, outputs, strict=True):
        assert len(output) == length
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0, len(prompt) - 1 :]
        best = logits.topk(2)
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        expected = best.indices[:, 0].tolist()
        wrong = next((index for index, token in enumerate(output) if token != expected[index]), None)
        assert wrong is None, (
            f"prompt of {len(prompt)} tokens: output {wrong} is {output[wrong]}, not {expected[wrong]}, "
            f"of which the logit is {gaps[wrong]:.1e} larger than the next"
        )
        assert min(gaps) > LEAST_GAP, f"two logits lie {min(gaps):.1e} apart: take another seed"
        distinct.update(output)
    assert len(distinct) > sum(requests.output_lengths) / 2, (
        "the model repeats itself, which hides errors: take other scales"
    )
