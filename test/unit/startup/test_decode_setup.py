"""How a start chooses the forward pass of decode: as asked for, by default, or by a measurement."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sgl_batch.config import from_mapping
from sgl_batch.core.decode_choice import DEFAULT, EAGER, SGLANG, Measured
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.core.start_choices import Choice
from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.errors import ConfigError
from sgl_batch.model_executor.run_context import RunContext
from sgl_batch.startup import decode_setup
from sgl_batch.startup.decode_setup import settle_decode


@pytest.fixture
def settled(tmp_path, monkeypatch):
    """Return the choice with these flags, and the mode that the runner then computes by."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(decode_setup, "choice_directory", lambda: tmp_path / "choices")

    def settle(*, has_adapter=True, latent=False, deterministic=False, on_cpu=True, **flags) -> tuple[Choice, str]:
        in_force = PlanInForce(from_mapping(flags))
        in_force.fit(page_size=64, max_running=32, can_reenter=True)
        context = RunContext(
            in_force=in_force, rendezvous=Rendezvous(Path(tmp_path)), cpu_operators=object() if on_cpu else None
        )
        modes = []
        runner = SimpleNamespace(
            device="cpu",
            layer_runner=SimpleNamespace(layer_graphs=None) if has_adapter else None,
            use_mla_backend=latent,
            expert_runner="native",
            compute_decode_by=modes.append,
            model_config=SimpleNamespace(vocab_size=64, dtype=torch.float32),
            server_args=SimpleNamespace(
                page_size=64,
                model_path="tiny",
                attention_backend="x",
                kv_cache_dtype="auto",
                quantization=None,
                enable_deterministic_inference=deterministic,
                enable_return_routed_experts=False,
            ),
        )
        return settle_decode(runner, context), modes[-1]

    return settle


@pytest.fixture
def measured(monkeypatch):
    """Collect the modes that are run. In SGLang's own forward a step takes half the time."""
    modes: list[str] = []

    class FastSglang:
        def __init__(self, runner, sizes, **_):
            self.sizes = sizes

        def graph_serves(self):
            return False

        def run_steps(self, mode, _):
            modes.append(mode)
            return Measured(seconds=(1.0 if mode == SGLANG else 2.0,) * 2, tokens=(1,))

    monkeypatch.setattr(decode_setup, "DecodeTrial", FastSglang)
    return modes


def test_a_cpu_measures_only_when_asked_and_a_gpu_by_default(settled, measured):
    choice, mode = settled()
    assert (choice.mode, mode, measured) == (DEFAULT, DEFAULT, [])
    choice, mode = settled(decode_forward="measure")
    assert (choice.mode, mode, set(measured)) == (SGLANG, SGLANG, {DEFAULT, SGLANG})
    measured.clear()
    choice, mode = settled(on_cpu=False)
    assert (choice.mode, mode, measured) == (SGLANG, SGLANG, [])
    assert choice.why.endswith("(settled at an earlier start)")
    choice, mode = settled(on_cpu=False, b_moe_decode=16, b_attn_decode=16)
    assert (mode, set(measured)) == (SGLANG, {DEFAULT, SGLANG}), "other groups are measured by themselves"


def test_a_batch_that_sglangs_graphs_refuse_does_not_end_the_start(settled, measured, monkeypatch, caplog):
    def fails(_):
        raise AttributeError("no such field")

    monkeypatch.setattr(decode_setup.DecodeTrial, "graph_serves", fails)
    with caplog.at_level("WARNING", decode_setup.__name__):
        choice, _ = settled(decode_forward="measure")
    assert choice.mode == SGLANG
    assert "SGLang's own decode graphs are not measured: AttributeError: no such field" in caplog.text


def test_the_deterministic_mode_and_engines_with_one_mode_measure_nothing(settled, measured):
    for flags in ({"deterministic": True}, {"has_adapter": False}, {"latent": True}, {"mix_prefill": 64}):
        choice, mode = settled(decode_forward="measure", **flags)
        assert (choice.mode, mode, measured) == (DEFAULT, DEFAULT, [])


def test_a_requested_mode_is_used_or_refused(settled):
    choice, mode = settled(decode_forward="sglang")
    assert (choice.mode, mode, choice.why) == (SGLANG, SGLANG, "sglang: asked for by decode_forward")
    with pytest.raises(ConfigError, match=r"decode_forward is 'sglang', and prompts run with decode rows .*'auto'"):
        settled(decode_forward="sglang", mix_prefill=64)
    with pytest.raises(ConfigError, match=r"decode_forward is 'sglang', and decode KV may be streamed \(decode_kv\)"):
        settled(decode_forward="sglang", kv_store_bytes="1M")
    assert settled(decode_forward="sglang", kv_store_bytes="1M", has_adapter=False)[1] == SGLANG
    with pytest.raises(ConfigError, match="'eager', and this model has no family adapter"):
        settled(decode_forward="eager", has_adapter=False)


def test_the_mode_of_an_earlier_start_is_taken_over_where_this_engine_can_compute_it(settled, measured):
    def earlier(mode):
        return json.dumps({"decode_forward": {"mode": mode, "why": f"{mode}: faster", "numbers": {mode: [0.01]}}})

    choice, mode = settled(on_cpu=False, start_choices=earlier(EAGER))
    assert (choice.mode, mode, measured) == (EAGER, EAGER, [])
    assert (choice.why, choice.numbers) == ("eager: faster (settled at an earlier start)", {EAGER: (0.01,)})
    choice, _ = settled(decode_forward="default", start_choices=earlier(EAGER))
    assert choice.mode == DEFAULT, "the requested mode is kept"
    choice, _ = settled(decode_forward="measure", start_choices=earlier(SGLANG), mix_prefill=64)
    assert choice.mode == DEFAULT, "SGLang's own forward mixes no prompts in"
    with pytest.raises(ConfigError, match=r"start_choices .* \(KeyError: 'numbers'\): leave it out"):
        settled(on_cpu=False, start_choices='{"decode_forward": {}}')
