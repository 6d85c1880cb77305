"""The table of models agrees with the adapters, and each model and number format has one row."""

from __future__ import annotations

from sgl_batch.core.supported_models import (
    COROUTINE,
    DEVICES,
    FAMILIES,
    FORMATS,
    SGLANG,
    Status,
    format_of,
    forward_text,
    has_adapter,
)
from sgl_batch.model_executor import families


def test_the_table_names_exactly_the_existing_adapters():
    named = {name for row in FAMILIES if row.forward == COROUTINE for name in row.architectures}
    there = {name: adapter for adapter in families.FAMILIES for name in adapter.architectures}
    assert named == set(there)
    for row in FAMILIES:
        for name in row.architectures:
            assert has_adapter(name) == (name in there)
            assert row.forward == SGLANG or row.latent == there[name].latent, f"latent of {name}"


def test_an_architecture_and_a_number_format_have_one_row_each():
    names = [name for row in FAMILIES for name in row.architectures]
    methods = [method for row in FORMATS for method in row.methods]
    assert len(names) == len(set(names))
    assert len(methods) == len(set(methods))


def test_each_refusal_has_a_reason():
    cells = [row.on(device) for row in (*FAMILIES, *FORMATS) for device in DEVICES]
    assert all(cell.note for cell in cells if cell.status is Status.REFUSED)


def test_a_format_without_a_row_counts_as_one_of_the_other_quantised_ones():
    assert format_of("fp8").name.startswith("fp8")
    assert format_of("bitsandbytes") is format_of("foo4") is not format_of("gptq")


def test_the_text_of_a_forward_names_the_architecture_without_an_adapter():
    assert forward_text("MixtralForCausalLM", has_adapter=True) == "coroutine"
    assert forward_text("Phi3ForCausalLM", has_adapter=False) == "sglang (no adapter for Phi3ForCausalLM)"
