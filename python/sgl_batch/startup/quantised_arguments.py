"""Decides which arguments let an engine on a CPU load a quantised checkpoint as floats."""

from __future__ import annotations

import json
from collections.abc import Mapping

from sgl_batch.checkpoint.model_directory import form_of_weights
from sgl_batch.core.model_refusals import QUANTIZATION_FIELDS

_OVERRIDES = "json_model_override_args"


def quantised_arguments(given: Mapping[str, object], *, on_cpu: bool) -> dict[str, object]:
    """Return the arguments with which SGLang builds a quantised model as one of floats; none on a GPU.

    Its config then says nothing of the quantisation, which `weights.dequantised` takes back as the files are read.
    """
    revision = given.get("revision")
    if not on_cpu or form_of_weights(str(given.get("model_path")), None if revision is None else str(revision)) is None:
        return {}
    overrides = json.loads(str(given.get(_OVERRIDES) or "{}"))
    return {
        _OVERRIDES: json.dumps({**overrides, **dict.fromkeys(QUANTIZATION_FIELDS)}),
        "quantization": None,
    }
