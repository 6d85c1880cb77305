"""Owns the short help of the server: its own flags, and the most used flags of the engine. It imports nothing slow.

The long help has all flags, and needs the engine's libraries.
"""

from __future__ import annotations

import argparse

from sgl_batch.api.front_options import add_own_flags
from sgl_batch.config_flags import add_some_flags

HELP_ALL = "--help-all"
PROGRAM = "python -m sgl_batch.launch_server"
_DESCRIPTION = """\
Serve a mixture-of-experts model over HTTP. The server has OpenAI's Files and Batch API, whose jobs survive crashes, and
SGLang's endpoints (chat, completions, /generate, weight updates). Requests run in groups, scheduled for the throughput
of the whole batch. / shows the progress of jobs, /metrics has metrics for Prometheus, /openapi.json describes the API.

These are the most important flags. --help-all lists all flags of sgl_batch and of SGLang. SGLang's flags mean what they
mean in SGLang.
"""
_EPILOG = """\
examples:
  {program} --model-path ./my-moe --served-model-name my-moe --jobs-dir jobs
  {program} --model-path ./my-moe --host 0.0.0.0 --api-key-file key --admin-api-key-file admin-key
  {program} --model-path ./my-moe --device-memory 8G --kv-store-bytes 16G     more KV than the device holds
  {program} --model-path ./my-moe --weights streamed --b-moe-decode 1024      a model larger than memory
  {program} --model-path ./my-moe --tp 2 --dp 2 --ep 2 --enable-dp-attention  two ranks
then:
  sgl-batch jobs submit in.jsonl --watch -o out.jsonl

exit codes: 0 stopped by SIGTERM or Ctrl-C, 1 bad usage, 3 the server cannot run
"""
_ENGINE = ("b_moe_decode", "b_moe_prefill", "b_attn_decode", "b_attn_prefill", "expert_runner", "cpu_weight_dtype")
_MEMORY = ("device_memory", "kv_store_bytes", "kv_store_dir", "host_memory", "weights", "weight_memory")
# SGLang's flags, which its own parser reads: flag, name of the value, help.
SGLANG_FLAGS = (
    ("--model-path", "PATH", "model directory, or name on the hub"),
    ("--served-model-name", "NAME", 'the name that requests give as "model" (default: PATH)'),
    ("--host", "ADDRESS", "address to listen on; an address other than loopback needs a key (default: 127.0.0.1)"),
    ("--port", "PORT", "port to listen on (default: 30000)"),
    ("--dtype", "TYPE", "number type of weights and activations: auto, bfloat16, float32, ... (default: auto)"),
    ("--context-length", "TOKENS", "longest sequence, prompt and output together (default: the model's)"),
    ("--tp", "N", "number of ranks; needs --dp N --ep N --enable-dp-attention (default: 1)"),
    ("--dp", "N", "ranks of data-parallel attention; equal to --tp"),
    ("--ep", "N", "ranks of expert parallelism; equal to --tp"),
    ("--enable-dp-attention", None, "needed by several ranks: each has its own sequences"),
    ("--max-total-tokens", "TOKENS", "size of the KV pool (default: what memory allows)"),
    ("--mem-fraction-static", "SHARE", "share of the device's memory for weights and the KV pool"),
    ("--device", "DEVICE", "cuda or cpu (default: cuda where there is a GPU)"),
    ("--chat-template", "FILE", "chat template, or the name of one (default: the model's)"),
    ("--tool-call-parser", "NAME", "parser of tool calls in answers"),
    ("--reasoning-parser", "NAME", "parser that separates reasoning from answers"),
    ("--trust-remote-code", None, "run code that comes with the model"),
    ("--enable-metrics", None, "add SGLang's metrics to /metrics"),
    ("--log-level", "LEVEL", "debug, info, warning or error (default: info)"),
)


def short_help(program: str = PROGRAM) -> str:
    """Return the short help, wrapped to the terminal's width."""
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} --model-path PATH [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(program=program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    _add_sglang_flags(parser.add_argument_group("model and engine (SGLang's flags)"))
    add_own_flags(parser)
    add_some_flags(parser.add_argument_group("sgl_batch: groups"), _ENGINE)
    add_some_flags(parser.add_argument_group("sgl_batch: memory, in bytes or as 512M, 8G"), _MEMORY, briefly=True)
    rest = parser.add_argument_group("help")
    rest.add_argument("-h", "--help", action="store_true", help="show this help and exit")
    rest.add_argument(HELP_ALL, action="store_true", help="show all flags, SGLang's too, and exit")
    return parser.format_help()


def _add_sglang_flags(group: argparse._ArgumentGroup) -> None:
    for flag, metavar, text in SGLANG_FLAGS:
        if metavar is None:
            group.add_argument(flag, action="store_true", help=text)
        else:
            group.add_argument(flag, metavar=metavar, help=text)
