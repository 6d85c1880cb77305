"""Owns the checkpoints of random weights for tests on GPUs, which are made where they are needed.

SGLang's kernels for GPUs write KV of heads of 64 channels and more; those of the trained models have 32.
"""

from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .families import build_model, save_checkpoint

FAMILIES = ("qwen3-moe", "mixtral")
HEAD_DIM = 64
# Standard deviations by which a token depends on what came before it (as well as on the token before it), and rounding
# to bfloat16 moves logits by some hundredths, a tenth of the usual gap between the best two.
LAYERS, EMBEDDING, OUTPUT = 0.03, 0.1, 0.15
# Scores of experts lie far apart: where rounding changes a choice, the expert at its edge has little weight.
ROUTER = 0.5


def make_random_model(family: str, directory: Path, tokenizer_from: Path) -> Path:
    """Write `directory`/random-FAMILY with the tokenizer of another checkpoint, and return its path.

    It is the same each time; one that is there already is kept.
    """
    path = directory / f"random-{family}"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_from)
        torch.manual_seed(0)
        model = build_model(family, tokenizer, head_dim=HEAD_DIM, initializer_range=LAYERS)
        _spread(model)
        save_checkpoint(model, tokenizer, family, path)
    return path


def _spread(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0.0, EMBEDDING)
        model.lm_head.weight.normal_(0.0, OUTPUT)
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_(0.0, ROUTER)
