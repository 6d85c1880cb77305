"""Profiles of a machine that is made up: its seconds follow simple laws, so that tests know what a fit should say."""

from __future__ import annotations

from sgl_batch.planner.model_layers import MOE, ModelLayers
from sgl_batch.planner.samples import PassSample, Profile, StepSample

PASS_S, SEQUENCE_S, GROUP_S = 0.0004, 0.001, 0.003
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = (16, 64, 256, 1024, 4096)
MACHINE = {"processor": "made up", "cores": 4, "gpu": None}


def layers(kind: str = MOE, count: int = 8) -> ModelLayers:
    """A model of `count` layers of one kind."""
    return ModelLayers(
        layers={kind: count},
        attention_bytes=4e6,
        dense_bytes=20e6,
        expert_bytes_each=2e6,
        experts=64 if kind == MOE else 0,
        top_k=8 if kind == MOE else 0,
        kv_layer_bytes=1024,
        hidden_bytes=2048,
    )


def attention_s(rows: float, looked_at: float) -> float:
    """Seconds of a layer's attention: launches, rows, and KV that is read."""
    return 0.0002 + 2e-6 * rows + 3e-9 * looked_at


def experts_s(rows: float) -> float:
    """Seconds of a layer's experts: all weights are read from some tens of rows on."""
    return 0.0005 + 0.004 * (1 - 0.875**rows) + 8e-6 * rows


def router_s(rows: float) -> float:
    return 0.0001 + 1e-7 * rows


def step_s(rows: float) -> float:
    return 0.002 + 5e-6 * rows


def sample(*, decode: bool, sequences: int, tokens: int, count: int, kind: str = MOE) -> PassSample:
    """A sample of a pass through `count` layers."""
    rows = sequences if decode else sequences * tokens
    looked_at = sequences * (tokens + 1) if decode else sequences * tokens * (tokens + 1) / 2
    return PassSample(
        decode=decode,
        sequences=sequences,
        tokens=tokens,
        kind=kind,
        layers=count,
        attention_s=PASS_S + count * attention_s(rows, looked_at),
        router_s=count * router_s(rows),
        experts_s=count * experts_s(rows),
        rest_s=0.001,
    )


def profile(kind: str = MOE, *, steps: bool = True, rates: dict[str, float] | None = None) -> Profile:
    """A profile with one and with three layers, as the profiler makes it."""
    passes = [
        sample(decode=True, sequences=rows, tokens=tokens, count=count, kind=kind)
        for rows in ROWS
        for tokens in (32, 1023)
        for count in (1, 3)
    ]
    passes += [
        sample(decode=False, sequences=sequences, tokens=tokens // sequences, count=count, kind=kind)
        for tokens in TOKENS
        for sequences in (1, 8)
        for count in (1, 3)
    ]
    around = [StepSample(decode=True, rows=rows, tokens=0, seconds=step_s(rows)) for rows in (1, 16, 256)]
    around += [
        StepSample(decode=False, rows=rows, tokens=16 * rows, seconds=GROUP_S + rows * SEQUENCE_S) for rows in (1, 256)
    ]
    return Profile(
        machine=MACHINE,
        made="2026-01-01T00:00:00+00:00",
        took_s=50.0,
        load=0.1,
        passes=tuple(passes),
        steps=tuple(around) if steps else (),
        rates={"copy": 8e9, **(rates or {})},
    )
