"""Owns how the message of a plan is laid out for a terminal. It has no numbers of its own."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from sgl_batch.byte_sizes import format_bytes
from sgl_batch.cli.plan.durations import in_words

Rows = list[tuple[str, str]]
_WIDTH, _NAME_WIDTH = 112, 12
_SHARE_SHOWN = 0.0005


def text(message: Mapping[str, Any]) -> str:
    """Return the message of a plan for a terminal."""
    work, plan = message["workload"], message.get("plan")
    rows = [
        ("model", message["model"]),
        (
            "workload",
            f"{work['requests']:,} requests, {work['prompt_tokens']:,} prompt and {work['output_tokens']:,} output "
            f"tokens, the longest {work['longest']:,} ({work['source']})",
        ),
        *_hardware(message),
    ]
    if plan is None:
        return _table([*rows, ("plan", message["why"]), *_layouts(message), *_not_implemented(message)])
    rows.append(("plan", " ".join(plan["flags"]) or "no flags: the engine's defaults"))
    rows += _layouts(message)
    if "seconds" in plan:
        rows += _times(message, plan, work["output_tokens"])
    rows += _memory(message["memory"], "one GPU" if "hardware" in message else "")
    if "host_memory" in message:
        host = message["host_memory"]
        uses = ", ".join(f"{name} {format_bytes(size)}" for name, size in host.items() if name != "source")
        rows.append(("host memory", f"of the machine of an instance: {uses} ({host['source']})"))
    if "picture" in message:
        rows.append(("picture", message["picture"]))
    return _table(rows) + f"\nRun it with: sgl-batch run -i INPUT -o OUTPUT {' '.join(message['run_flags'])}\n"


def _hardware(message: Mapping[str, Any]) -> Rows:
    if "hardware" not in message:
        return [("profile", message["profile"]["text"])]
    found = message["hardware"]
    figures, assumed = found["figures"], found["assumptions"]
    products = [f"bfloat16 {figures['bf16_flop_per_s'] / 1e12:,.0f}"]
    products += [f"FP8 {figures['fp8_flop_per_s'] / 1e12:,.0f}"] if figures["fp8_flop_per_s"] else []
    links = [f"PCIe {figures['pcie_bytes_per_s'] / 1e9:,.0f}"]
    links += [f"NVLink {figures['nvlink_bytes_per_s'] / 1e9:,.0f}"] if figures["nvlink_bytes_per_s"] else []
    shares = ", ".join(f"{share:.0%} with {rows:,.0f}" for rows, share in assumed["products_share"])
    return [
        (
            "hardware",
            f"{found['gpus']} {found['title']}: {figures['memory_bytes'] / 1e9:,.0f} GB at "
            f"{figures['memory_bytes_per_s'] / 1e9:,.0f} GB/s; dense products in {' and '.join(products)} TFLOP/s; "
            f"{' and '.join(links)} GB/s each way ({found['source']}: {found['document']})",
        ),
        (
            "assumed",
            f"{assumed['memory_share']:.0%} of the memory's rate; of products {shares} rows of a matrix, and "
            f"{assumed['attention_share']:.0%} in attention; {assumed['copy_share']:.0%} of PCIe, "
            f"{assumed['exchange_share']:.0%} between GPUs; {in_words(assumed['launch_s'])} to launch a module, "
            f"{in_words(assumed['step_s'])} of the host in each step; --json lists the rest. Nothing here was measured "
            "on a GPU, or compared with a run on one",
        ),
    ]


def _layouts(message: Mapping[str, Any]) -> Rows:
    plan, listed = message.get("plan"), message.get("layouts", [])
    rows: Rows = []
    if "hardware" in message and plan is not None:
        split = "; the batch is split evenly among all" if message["hardware"]["gpus"] > 1 else ""
        rows.append(("GPUs", plan["layout"]["text"] + split))
        if "exchange" in message:
            rows.append(("exchange", message["exchange"]["text"]))
    for index, one in enumerate(listed):
        lacks = one.get("lacks", "").partition(":")[0]
        found = f"{in_words(one['seconds'])} ({one['source']})" if "seconds" in one else f"does not fit: {lacks}"
        label = f" ({one['label']})" if "label" in one else ""
        rows.append(("compared" if index == 0 else "", f"{one['text']}{label}: {found}"))
    return rows


def _times(message: Mapping[str, Any], plan: Mapping[str, Any], output_tokens: int) -> Rows:
    total, source = plan["seconds"], plan["source"]
    parts = sorted(plan["parts_s"].items(), key=lambda item: -item[1])
    each = " on each GPU" if "hardware" in message and message["hardware"]["gpus"] > 1 else ""
    bounds = ", ".join(f"{name} {share:.1%}" for name, share in plan["bound_shares"].items() if share >= _SHARE_SHOWN)
    rows = [
        (
            "time",
            f"{in_words(total)} ({source}): prefill {in_words(plan['prefill_s'])} in {plan['prefill_groups']:,} groups"
            f", decode {in_words(plan['decode_s'])} in {plan['decode_steps']:,} steps of {plan['mean_rows']:,.0f} "
            f"sequences on average{each}; {output_tokens / max(total, 1e-9):,.0f} output tokens a second. The start of "
            "the engine comes on top",
        ),
        ("by part", ", ".join(f"{name} {in_words(s)} ({s / max(total, 1e-9):.0%})" for name, s in parts)),
        ("bottleneck", f"{plan['bottleneck']} ({source})"),
        ("bounds", f"{bounds} ({source})"),
    ]
    if "experts_kept" in plan:
        rows.append(("experts", f"{plan['experts_kept']:.0%} of each layer's stay in memory in decode (counted)"))
    if "instances" in message:
        found = message["instances"]
        rows.append(
            (
                "instances",
                f"{found['count']:,}, each with {found['requests_each']:,} requests, whose time is that above. With "
                f"{in_words(found['feeding_s'])} for feeding them the batch takes {in_words(found['seconds'])} "
                f"({found['source']})",
            )
        )
    if "deadline" in message:
        rows.append(("deadline", f"{message['deadline']['text']} ({source})"))
    if "runner_up" in message:
        other = message["runner_up"]
        where = f"{other['layout']['text']}, " if other["layout"] != plan["layout"] else ""
        rows.append(("runner-up", f"{where}{' '.join(other['flags'])}: {other['why_it_lost']} ({source})"))
    return rows + _not_implemented(message)


def _not_implemented(message: Mapping[str, Any]) -> Rows:
    if "not_implemented" not in message:
        return []
    other = message["not_implemented"]
    what = f"{other['layout']['text']}, " if "hardware" in message else ""
    return [("not chosen", f"{what}{' '.join(other['flags'])}: {in_words(other['seconds'])} ({other['label']})")]


def _memory(memory: Mapping[str, Any], of: str) -> Rows:
    rows, source, of_one = [], memory["source"], f", of {of}" if of else ""
    for phase in ("prefill", "decode"):
        if phase in memory:
            uses = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory[phase].items() if size)
            rows.append(("memory", f"in {phase}{of_one}: {uses} ({source})"))
    store = f", {memory['store_pages']:,} in the host KV store" if memory["store_pages"] else ""
    rows.append(("KV", f"{memory['kv_pages']:,} pages on the device{store} ({source})"))
    return rows


def _table(rows: Rows) -> str:
    lines = []
    for name, words in rows:
        wrapped = textwrap.wrap(words, _WIDTH - _NAME_WIDTH - 1, break_on_hyphens=False) or [""]
        lines += [f"{name if index == 0 else '':<{_NAME_WIDTH}} {line}" for index, line in enumerate(wrapped)]
    return "\n".join(lines) + "\n"
