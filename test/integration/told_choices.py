"""Owns what Hugging Face's model says of a whole sequence at once, and reading the choice that an answer tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pybase64
import torch
from transformers import AutoModelForCausalLM


class WholeSequences:
    """Hugging Face's model of a checkpoint, in float32: what it says of an answer that is there already."""

    def __init__(self, path: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._chosen: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self._model.model.layers):
            if hasattr(layer.mlp, "experts"):
                layer.mlp.experts.register_forward_pre_hook(self._noting(index))

    def _noting(self, layer: int) -> Any:
        def note(_: Any, arguments: tuple[Any, ...]) -> None:
            self._chosen[layer] = arguments[1]

        return note

    def check(self, prompt: list[int], answer: dict[str, Any], *, start: int = 0, greedy: bool = True) -> None:
        """The answer tells the model's choice of experts from a position on, and has its likeliest tokens."""
        output = answer["output_ids"]
        tokens = [*prompt, *output][:-1]
        with torch.no_grad():
            logits = self._model(torch.tensor([tokens])).logits[0]
        if greedy:
            assert output == logits[len(prompt) - 1 :].argmax(-1).tolist()
        if "routed_experts" in answer["meta_info"]:
            expected = self._choices(len(tokens))[start:]
            assert (told(answer, expected) == expected).all()

    def _choices(self, num_tokens: int) -> np.ndarray:
        """Of the last pass, by token and layer, in ascending order; 0 where a layer has no experts [T, L, K]."""
        layers, top_k = len(self._model.model.layers), self._model.config.num_experts_per_tok
        chosen = torch.zeros(num_tokens, layers, top_k, dtype=torch.int64)
        for layer, ids in self._chosen.items():
            chosen[:, layer] = ids
        return np.sort(chosen.numpy(), axis=-1)


def told(answer: dict[str, Any], like: np.ndarray) -> np.ndarray:
    """The choice of experts that an answer tells, in the shape of `like`, in ascending order."""
    ids = np.frombuffer(pybase64.b64decode(answer["meta_info"]["routed_experts"]), dtype=np.int32)
    assert ids.size == like.size, f"{ids.size} choices for {like.shape}"
    return np.sort(ids.reshape(like.shape), axis=-1)
