"""Reads what a plan is for: the model's directory, the number types, and the batch. It starts nothing."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_batch.checkpoint.tensors import tensors_of
from sgl_batch.config import MODEL_WEIGHTS, BatchConfig
from sgl_batch.core.model_refusals import QUANTIZATION_FIELDS, number_type, text_part
from sgl_batch.errors import ConfigError
from sgl_batch.planner.data_sheets import HERE
from sgl_batch.planner.model_layers import ModelLayers, model_layers
from sgl_batch.planner.needs import ITEM_BYTES, Model
from sgl_batch.planner.workload import DEFAULT, Workload, parse_lengths, parse_workload
from sgl_batch.startup.argument_checks import check_weights
from sgl_batch.startup.fit_checks import check_asked, check_context
from sgl_batch.startup.plan_inputs import PAGE_SIZE
from sgl_batch.startup.planned_model import model_directory, whole_config

_FP8 = "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model and a batch. `body`: the text part of the model's config; `weight_dtype`: of --cpu-weight-dtype."""

    directory: Path
    body: Mapping[str, Any]
    dtype: str
    weight_dtype: str
    layers: ModelLayers
    model: Model
    workload: Workload


def read_subject(args: argparse.Namespace, config: BatchConfig) -> Subject:
    """Return what the command line names. Raises ConfigError for what the user can mend, and a run would refuse."""
    on_sheet = args.hardware.lower() != HERE
    weight_dtype = config.forward.cpu_weight_dtype
    subject = subject_of(args.model, _workload(args), dtype=args.dtype, weight_dtype=weight_dtype, on_sheet=on_sheet)
    check_subject(subject, config, on_sheet=on_sheet)
    return subject


def check_subject(subject: Subject, config: BatchConfig, *, on_sheet: bool = False) -> None:
    """Raise ConfigError for what no run takes: a model, a batch and settings. `on_sheet`: as in `subject_of`."""
    check_weights(config.forward, config.memory, on_cpu=not on_sheet)
    check_asked(subject.model, config, page_size=PAGE_SIZE, here=not on_sheet)
    check_context(subject.body, subject.workload.longest, "the longest request of the batch")


def subject_of(name: str, workload: Workload, *, dtype: str, weight_dtype: str, on_sheet: bool = False) -> Subject:
    """Return a model, by its directory, with a batch. Raises ConfigError for what the user can mend.

    `dtype`, `weight_dtype`: as --dtype and --cpu-weight-dtype have them. `on_sheet`: whether it is for GPUs of a data
    sheet.
    """
    directory = model_directory(name)
    whole = whole_config(directory)
    body, dtype = text_part(whole), number_type(whole, dtype)
    item_bytes = ITEM_BYTES[dtype]
    weight_bytes = _bytes_on_gpu(whole, dtype) if on_sheet else 1 if weight_dtype == "int8" else item_bytes
    if on_sheet and weight_dtype not in MODEL_WEIGHTS:
        raise ConfigError(f"--cpu-weight-dtype {weight_dtype} is for CPUs; leave it out with --hardware")
    try:
        stored_bytes = None if on_sheet else item_bytes
        layers = model_layers(body, item_bytes=item_bytes, weight_bytes=weight_bytes, stored_bytes=stored_bytes)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a number in {directory / 'config.json'} cannot be read: {error}") from error
    tensors = tensors_of(directory, layers.num_layers, cpu_weights=None if on_sheet else weight_dtype)
    model = Model(config=body, tensors=tensors, dtype=dtype)
    return Subject(
        directory=directory,
        body=body,
        dtype=dtype,
        weight_dtype=weight_dtype,
        layers=layers,
        model=model,
        workload=workload,
    )


def _bytes_on_gpu(whole: Mapping[str, Any], dtype: str) -> int:
    """Return the bytes of a number of the weights. Data sheets have products of 16-bit floats and of FP8."""
    quantised = next((found for name in QUANTIZATION_FIELDS if (found := whole.get(name))), None)
    method = str(quantised.get("quant_method", "unknown")) if isinstance(quantised, Mapping) else None
    if method not in (None, _FP8):
        raise ConfigError(
            f"the model's weights are quantised by {method}, and --hardware predicts bfloat16, float16 and {_FP8} alone"
        )
    if dtype == "float32":
        raise ConfigError("--hardware predicts no float32, which data sheets of GPUs leave out; give --dtype bfloat16")
    return 1 if method == _FP8 else ITEM_BYTES[dtype]


def _workload(args: argparse.Namespace) -> Workload:
    if args.lengths is None:
        return parse_workload(args.workload or DEFAULT)
    try:
        return parse_lengths(args.lengths.read_text(encoding="utf-8").splitlines(), str(args.lengths))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the lengths in {args.lengths} cannot be read: {error}") from error
