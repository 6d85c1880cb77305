"""Owns the stage that makes the checkpoints of random weights which the engines run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Make those that are not there."""
    from tiny_models.random_models import FAMILIES, HEAD_DIM, make_random_model

    tokenizer = ROOT / "test" / "models" / "tiny-qwen3-moe"
    made = [make_random_model(family, Path(spec["models"]), tokenizer).name for family in FAMILIES]
    return {"remark": f"{', '.join(made)}: heads of {HEAD_DIM} channels"}


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from bringup.stage_result import answer

    answer(run)
