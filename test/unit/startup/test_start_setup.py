"""The choices of a start that follow from its measured decode steps, and those that are given or follow from a rule."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_batch.config import from_mapping
from sgl_batch.core.decode_choice import DEFAULT, SGLANG, Measured, choose
from sgl_batch.core.plan_in_force import PlanInForce
from sgl_batch.distributed.rendezvous import Rendezvous
from sgl_batch.kv_offload.store_errors import CopyError
from sgl_batch.model_executor.run_context import RunContext
from sgl_batch.startup import start_setup
from sgl_batch.startup.gpu_arguments import MachineFacts, ModelFacts
from sgl_batch.startup.start_setup import attention_of, settle_decode_kv, settle_overlap


def decode(mode=DEFAULT):
    measured = Measured(seconds=(0.020,), tokens=(1,), host_seconds=(0.002,))
    return choose((mode, "other"), {mode: measured})


def context_of(*, on_cpu=False, rank_context=None, **flags):
    in_force = PlanInForce(from_mapping(flags))
    in_force.fit(page_size=64, max_running=32, can_reenter=True)
    operators = object() if on_cpu else None
    return RunContext(
        in_force=in_force, rendezvous=Rendezvous(Path("x")), cpu_operators=operators, rank_context=rank_context
    )


def earlier(**modes):
    return json.dumps({option: {"mode": mode, "why": "before", "numbers": {}} for option, mode in modes.items()})


def overlap(*, deterministic=False, **how):
    return settle_overlap(context_of(**how), decode(), deterministic=deterministic)


def test_on_a_gpu_overlap_follows_from_measured_steps():
    assert overlap().mode == "on"
    assert overlap().why.startswith("on: the host has launched a step of 20.00 ms after 2.00 ms")
    assert overlap(start_choices=earlier(overlap="off")).why == "before (settled at an earlier start)"
    assert settle_overlap(context_of(), choose((DEFAULT,), {}), deterministic=False).mode == "off"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"overlap": "on", "on_cpu": True}, "on: asked for by overlap"),
        ({"overlap": "off"}, "off: asked for by overlap"),
        ({"on_cpu": True}, "off: a CPU computes results and steps itself, and gains nothing"),
        ({"rank_context": object()}, "off: several ranks process each step's results before they agree on the next"),
        ({"mix_prefill": 64}, "off: the prompts in a step follow from the results before it (mix_prefill)"),
        ({"deterministic": True}, "off: the deterministic mode never switches by time"),
    ],
)
def test_overlap_is_not_measured_where_it_is_given_or_impossible(how, why):
    assert overlap(**{"start_choices": earlier(overlap="on"), **how}).why == why


class Tiers:
    def __init__(self, *, exclusive=False, stages_prompts=True, bytes_per_s=50e9, fails=False):
        self.stages_prompts = stages_prompts
        self.stored, self.pool_bytes = SimpleNamespace(exclusive=exclusive), 2_000_000_000
        self._bytes_per_s, self._fails = bytes_per_s, fails

    def copy_rate(self):
        if self._fails:
            raise CopyError("the GPU refuses a copy")
        return self._bytes_per_s


def decode_kv(tiers=None, *, mode=DEFAULT, deterministic=False, **how):
    return settle_decode_kv(context_of(**how), tiers or Tiers(), decode(mode), deterministic=deterministic)


def test_on_a_gpu_decode_kv_follows_from_the_rate_of_copies_and_the_steps():
    slow, fast = decode_kv(), decode_kv(Tiers(bytes_per_s=500e9))
    assert (slow.mode, fast.mode) == ("resident", "auto")
    assert slow.numbers == {"step": (0.02,), "copied bytes per second": (50e9,), "bytes of pages": (2e9,)}
    assert decode_kv(start_choices=earlier(decode_kv="auto")).why == "before (settled at an earlier start)"


def test_a_copy_that_fails_leaves_kv_on_the_device_with_a_warning(caplog):
    with caplog.at_level("WARNING"):
        assert decode_kv(Tiers(fails=True)).mode == "resident"
    assert "decode KV stays on the device" in caplog.text


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"decode_kv": "streamed"}, "streamed: asked for by decode_kv"),
        ({"tiers": Tiers(exclusive=True)}, "resident: an exclusive store holds no KV that is on the device"),
        ({"on_cpu": True}, "auto: a CPU measures both, an interval each"),
        ({"rank_context": object(), "on_cpu": True}, "resident: several ranks do not choose"),
        ({"deterministic": True}, "resident: the deterministic mode never switches by time"),
        ({"mode": SGLANG}, "resident: SGLang's own forward, which computes decode, streams none"),
    ],
)
def test_decode_kv_is_not_measured_where_it_is_given_or_impossible(how, why):
    tiers = {"tiers": Tiers(fails=True), **how}
    assert decode_kv(**tiers, start_choices=earlier(decode_kv="auto")).why == why


def test_a_model_whose_prompts_are_not_staged_has_an_exclusive_store_with_a_warning(caplog):
    with caplog.at_level("WARNING"):
        choice = decode_kv(Tiers(exclusive=True, stages_prompts=False), on_cpu=True)
    why = "this model has no family adapter, so sequences move to the store and back whole"
    assert (choice.mode, choice.why) == ("resident", f"resident: {why}")
    assert caplog.messages == [f"the host KV store is exclusive, and prompts are computed on the device alone: {why}"]


def test_without_a_store_decode_kv_is_on_the_device():
    choice = settle_decode_kv(context_of(), None, decode(), deterministic=False)
    assert (choice.mode, choice.why) == ("resident", "resident: there is no host KV store")


@pytest.mark.parametrize(
    ("device", "flash_attention_3", "backend", "why"),
    [
        ("cpu", False, "sgl_batch_cpu", "sgl_batch_cpu: a CPU has one attention backend"),
        ("cuda", True, "fa3", "fa3: SGLang's own choice, or asked for; not measured, because "),
        ("cuda", False, "triton", "triton, because sglang-kernel lacks flash_ops"),
        ("cuda", False, "torch_native", "torch_native: asked for"),
    ],
)
def test_the_attention_backend_follows_from_a_reported_rule(monkeypatch, device, flash_attention_3, backend, why):
    facts = MachineFacts(capability=(9, 0), flash_attention_3=flash_attention_3, flashinfer=True, xgrammar=True)
    monkeypatch.setattr(start_setup, "machine_facts", lambda **_: facts)
    monkeypatch.setattr(start_setup, "model_facts", lambda *_: ModelFacts(is_split=True, is_latent=False))
    args = SimpleNamespace(model_path="x", revision=None, get_attention_backends=lambda: (backend, backend))
    choice = attention_of(SimpleNamespace(device=device, server_args=args))
    assert choice.mode == backend
    assert choice.why.startswith(why)
