"""Makes the tiny trained checkpoints; run it through scripts/make_tiny_models.py."""

import importlib.util
from pathlib import Path

import torch


def _name_operators_of_unloadable_torchvision() -> torch.library.Library | None:
    """Lets transformers import beside a torchvision wheel whose compiled part does not fit this torch.

    torchvision registers shape functions for two operators on import and fails if nobody defined them.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    compiled = sorted(Path(spec.origin).parent.glob("_C*.so"))
    try:
        for path in compiled:
            torch.ops.load_library(path)
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


# Kept alive: the definitions go away with the object.
TORCHVISION_OPERATORS = _name_operators_of_unloadable_torchvision()
