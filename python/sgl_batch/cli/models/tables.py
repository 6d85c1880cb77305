"""Owns the table of models and number formats as text, as Markdown and as JSON. Its rows are core's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sgl_batch.core.supported_models import COROUTINE, CPU, FAMILIES, FORMATS, GPU, Cell, ModelFamily

FORMAT = "sgl_batch.models/1"
OTHER = (
    "Any other decoder that SGLang supports runs through SGLang's own forward pass, in groups and with shared "
    "prefixes, on several ranks if it has no experts. With a host KV store its prompts are computed on the device, and "
    "sequences move to the store and back whole. A model whose config shows that its output would be wrong here is "
    "refused."
)
_KINDS_REFUSED = (
    "states in addition to KV (Mamba, linear attention, convolutions: Jamba, Falcon-H1, Nemotron-H, Qwen3-Next, "
    "Kimi-Linear, MiniMax-Text-01, LFM2)",
    "attention to chosen tokens or within chunks (DeepSeek-V3.2 and V4, GLM-5, Llama-4)",
    "latent attention without an adapter (MiniCPM3, GLM-4.7-Flash, LongCat)",
    "sliding windows shorter than the context, layers of unequal KV, ALiBi",
    "images or sound besides text",
    "an encoder, no text (embeddings, rewards, classes), diffusion, drafts for speculative decoding",
    "configs in transformers' form without fields that SGLang's model reads (HunYuan, HY-V3), or with more (DBRX)",
)
_HEAD = ("family", "architectures", "forward", "CPU", "GPU")


def forward_of(family: ModelFamily) -> str:
    """Return the name of the forward pass of a family."""
    return COROUTINE if family.forward == COROUTINE else "SGLang's own"


def _cell(cell: Cell) -> str:
    return f"{cell.status}: {cell.note}" if cell.note else str(cell.status)


def family_rows() -> list[tuple[str, ...]]:
    """Return a row of texts for each family."""
    return [
        (row.name, ", ".join(row.architectures), forward_of(row), _cell(row.cpu), _cell(row.gpu)) for row in FAMILIES
    ]


def format_rows() -> list[tuple[str, ...]]:
    """Return a row of texts for each number format."""
    return [(row.name, _cell(row.cpu), _cell(row.gpu)) for row in FORMATS]


def as_json() -> dict[str, Any]:
    """Return the table as JSON."""

    def cells(row: Any) -> dict[str, dict[str, str]]:
        return {device: {"status": row.on(device).status, "note": row.on(device).note} for device in (CPU, GPU)}

    return {
        "format": FORMAT,
        "families": [
            {"name": row.name, "architectures": list(row.architectures), "forward": row.forward, **cells(row)}
            for row in FAMILIES
        ],
        "number_formats": [{"name": row.name, "methods": list(row.methods), **cells(row)} for row in FORMATS],
        "others": OTHER,
        "refused": list(_KINDS_REFUSED),
    }


def as_text() -> str:
    """Return the table as text for a terminal."""
    families = _columns((_HEAD, *family_rows()))
    formats = _columns((("number format of weights", "CPU", "GPU"), *format_rows()))
    refused = "\n".join(f"  {kind}" for kind in _KINDS_REFUSED)
    return f"{families}\n\n{OTHER}\nRefused at the start, by the config:\n{refused}\n\n{formats}\n"


def as_markdown() -> str:
    """Return the page docs/models.md."""
    refused = "\n".join(f"- {kind}" for kind in _KINDS_REFUSED)
    return f"""\
# Which models run how

Made by `sgl-batch models --markdown`, from the table by which the engine decides (`core/supported_models.py`).
`sgl-batch check --model DIR` checks one model: how it would run, what memory it takes, and with which flags it runs.
*works*: greedy tokens equal Hugging Face's in float32. The coroutine forward splits groups for attention and combines
them for one expert call a layer; SGLang's own forward computes a group unsplit. The start of an engine, the summary
and manifest of a run, `batch_stats` and `/health` name the forward pass.

{_markdown(_HEAD, family_rows())}

{OTHER}
Refused at the start, by the config:

{refused}

{_markdown(("number format of weights", "CPU", "GPU"), format_rows())}
"""


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
