"""Owns checking an answer against Hugging Face's model, which computes the whole sequence in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pybase64
import torch
from transformers import AutoModelForCausalLM


class WholeSequences:
    """Hugging Face's model of a checkpoint, in float32, and the experts that it chooses for a whole sequence."""

    def __init__(self, path: str, **options: Any) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()
        self._chosen: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self._model.model.layers):
            if hasattr(layer.mlp, "experts"):
                layer.mlp.experts.register_forward_pre_hook(self._recorder(index))

    @property
    def router_and_head_outputs(self) -> tuple[int, int]:
        config = self._model.config
        return getattr(config, "num_experts", None) or config.num_local_experts, config.vocab_size

    def _recorder(self, layer: int) -> Any:
        def record(_: Any, arguments: tuple[Any, ...]) -> None:
            self._chosen[layer] = arguments[1]

        return record

    def check(self, prompt: list[int], answer: dict[str, Any], *, start: int = 0, greedy: bool = True) -> None:
        """Check that an answer has the model's likeliest tokens and, if it reports experts, those from `start` on."""
        output = answer["output_ids"]
        tokens = [*prompt, *output][:-1]
        with torch.no_grad():
            logits = self._model(torch.tensor([tokens])).logits[0]
        if greedy:
            assert output == logits[len(prompt) - 1 :].argmax(-1).tolist()
        if "routed_experts" in answer["meta_info"]:
            expected = self._choices(len(tokens))[start:]
            assert (reported_experts(answer, expected) == expected).all()

    def _choices(self, num_tokens: int) -> np.ndarray:
        """Return the experts of the last pass [T, L, K], in ascending order; 0 where a layer has no experts."""
        layers, top_k = len(self._model.model.layers), self._model.config.num_experts_per_tok
        chosen = torch.zeros(num_tokens, layers, top_k, dtype=torch.int64)
        for layer, ids in self._chosen.items():
            chosen[:, layer] = ids
        return np.sort(chosen.numpy(), axis=-1)


def reported_experts(answer: dict[str, Any], like: np.ndarray) -> np.ndarray:
    """Return the experts that an answer reports, in the shape of `like`, in ascending order."""
    ids = np.frombuffer(pybase64.b64decode(answer["meta_info"]["routed_experts"]), dtype=np.int32)
    assert ids.size == like.size, f"{ids.size} choices for {like.shape}"
    return np.sort(ids.reshape(like.shape), axis=-1)
