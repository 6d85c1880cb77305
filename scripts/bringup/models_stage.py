"""Owns the stage that makes the checkpoints of random weights which the engines run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Make the checkpoints; those of the first families only if they do not exist."""
    import torch

    from bringup.engine_stages import FAMILIES_BESIDE
    from tiny_models.random_checkpoints import FORMS, make_checkpoint
    from tiny_models.random_families import for_gpu
    from tiny_models.random_models import FAMILIES, HEAD_DIM, make_random_model

    models, tokenizer = Path(spec["models"]), ROOT / "test" / "models" / "tiny-qwen3-moe"
    for family in FAMILIES:
        make_random_model(family, models, tokenizer)
    for name in FAMILIES_BESIDE:
        for form in FORMS:
            make_checkpoint(for_gpu(name), form, models, tokenizer, dtype=torch.bfloat16)
    return {"remark": f"{', '.join((*FAMILIES, *FAMILIES_BESIDE))}: heads of {HEAD_DIM} channels or more"}


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from bringup.stage_result import answer

    answer(run)
