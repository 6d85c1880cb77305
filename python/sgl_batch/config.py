"""Owns the configuration: one frozen dataclass per owner. `config_flags` generates command line flags from them.

It checks values by themselves. Whether a model fits them is decided where the model is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sgl_batch.byte_sizes import parse_bytes
from sgl_batch.config_fields import check_value
from sgl_batch.config_fields import flag as _flag
from sgl_batch.errors import ConfigError
from sgl_batch.named_function import check_name

CPU_WEIGHT_DTYPES = ("auto", "model", "lossless12", "int8")
# Those that ask for nothing that only a CPU has.
MODEL_WEIGHTS = ("auto", "model")
CPU_ACTIVATIONS = ("model", "int8")
DECODE_FORWARDS = ("auto", "measure", "default", "coroutine", "eager", "sglang")
KV_STORE_MODES = ("auto", "inclusive", "exclusive")
DECODE_KV_MODES = ("auto", "resident", "streamed")
EXPERT_RUNNERS = ("auto", "sglang", "triton", "deepgemm", "native", "torch")
ADMISSIONS = ("auto", "reserve", "two-page", "forecast")
ORDERS = ("fifo", "longest-first")
OVERLAPS = ("auto", "on", "off")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForwardConfig:
    """How a forward pass cuts a group for attention and combines it for experts (BatchGen Algorithm 1)."""

    b_attn_prefill: int = _flag(
        2048,
        "tokens in one attention sub-batch of prefill; a longer prompt is computed in chunks; smaller sub-batches take "
        "less working memory",
        minimum=1,
    )
    b_moe_prefill: int = _flag(
        8192,
        "tokens that one expert call combines in prefill, which is also the size of a prefill group; larger groups use "
        "each weight for more tokens and take more working memory",
        minimum=1,
    )
    b_attn_decode: int = _flag(
        0,
        "sequences in one attention sub-batch of decode; 0: the whole group on one GPU with resident KV, else 256 (and "
        "256 for latent attention by Triton)",
        minimum=0,
    )
    b_moe_decode: int = _flag(
        256,
        "sequences that one expert call combines in decode, which is also the most that run at once; raise it for more "
        "throughput where memory holds their KV",
        minimum=1,
    )
    accumulate: bool | None = _flag(
        None,
        "combine the attention sub-batches of a group for one expert call per layer (one MLP call in a dense layer); "
        "--no-accumulate makes one call per sub-batch; by default sub-batches are combined, except for prompts of a "
        "dense model, whose sub-batches are large enough",
        kind=bool,
    )
    expert_runner: str = _flag(
        "auto",
        "what computes the experts: sglang, triton (GPU), deepgemm (GPU), native (CPU) or torch; auto: native on a "
        "CPU, and on a GPU the fastest in calls at the start",
        choices=EXPERT_RUNNERS,
    )
    decode_forward: str = _flag(
        "auto",
        "which forward pass computes decode groups; default: SGLang's own where one of its CUDA graphs serves the "
        "group, else the coroutine forward; coroutine, eager (coroutine without CUDA graphs) or sglang: this one for "
        "all groups; measure: tries them at the start, in at most 20 s, and takes another than the default only if it "
        "gives the same tokens and is 5 % faster (kept in the user's cache); auto: measure on a GPU, default on a CPU",
        choices=DECODE_FORWARDS,
    )
    start_choices: str | None = _flag(
        None,
        "choices of an earlier start, as JSON (`choices` in the plan of a manifest): an option that is left to auto "
        "takes its choice from there instead of measuring, if this engine can compute so; `sgl-batch run --resume` "
        "passes it",
        metavar="JSON",
    )
    decode_graph_memory: int = _flag(
        0,
        "on a GPU: memory for CUDA graphs of whole decode steps (all sub-batches and layers in one launch), for groups "
        "that SGLang's own graphs do not serve: those of several attention sub-batches. Groups are padded to certain "
        "sizes; the largest size is captured first, each other size after a few passes. Needs one rank, resident "
        "weights, decode KV on the device, and the attention backend triton or fa3. 0: no such graphs, until they have "
        "run on a GPU; SGLang's own graphs have flags of their own",
        minimum=0,
        in_bytes=True,
    )
    cpu_weight_dtype: str = _flag(
        "auto",
        "number type of weights on a CPU; model: the model's; lossless12: bfloat16 experts read as 12 bits a weight, "
        "same tokens; auto: 4 and 8 bits stay so, experts lossless12 where it pays; int8: half, rounded, but not "
        "routers and output projection; other tokens",
        choices=CPU_WEIGHT_DTYPES,
    )
    cpu_activations: str = _flag(
        "model",
        "number type in which rows meet int8 weights on a CPU; model: the model's; int8: each row is rounded with a "
        "scale of its own, and products add up exactly, in about half the time where the CPU has AVX512-VNNI; it needs "
        "--cpu-weight-dtype int8 and resident weights, and changes tokens",
        choices=CPU_ACTIVATIONS,
    )
    on_yield: str | None = _flag(
        None,
        "Python function that is called each time sequences yield after attention in a layer; it may change their KV "
        "of that layer; on a CPU, without a host KV store (see model_executor/yield_callback.py)",
        metavar="MODULE:NAME",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """When to prefill, decode and refill (BatchGen Algorithm 2)."""

    boundary_tokens: int = _flag(
        64,
        "decode steps between two boundaries; READY sequences join the decode group at a boundary, so that a smaller "
        "value fills the group sooner",
        minimum=1,
    )
    refill_watermark: float = _flag(
        0.75,
        "prefill again at a boundary if running and ready sequences together are fewer than this share of "
        "b_moe_decode, 0 to 1",
        minimum=0.0,
        maximum=1.0,
        metavar="SHARE",
    )
    ready_ahead: float = _flag(
        0.5,
        "how many sequences are prefilled before the decode group has room for them, as a share of b_moe_decode",
        minimum=0.0,
        maximum=16.0,
        metavar="SHARE",
    )
    order: str = _flag(
        "fifo",
        "which queued sequences are prefilled first; fifo: the earliest; longest-first: those with the most prompt and "
        "output tokens that they can have, so that the last sequences to end are short (a sequence goes first, "
        "whatever its length, after 8,192 later arrivals)",
        choices=ORDERS,
    )
    admission: str = _flag(
        "auto",
        "for how many tokens a sequence reserves pages of KV when it is admitted; reserve: for its max_tokens (without "
        "max_tokens, the whole context); two-page: for its prompt and the first interval, at least two pages; "
        "forecast: for the mean length of the outputs that have finished; with the last two, sequences are extended as "
        "they grow, more of them run where answers are shorter than max_tokens, and where pages lack the most decoded "
        "wait with their KV kept; auto: forecast on a CPU without an exclusive store, else reserve",
        choices=ADMISSIONS,
    )
    share_prefixes: bool = _flag(
        True,
        "compute whole pages with which several prompts begin (a system prompt, examples) once, and keep them once, "
        "while a sequence that has them is alive; --no-share-prefixes computes each prompt whole; the choices of one "
        "request (n > 1) share their prompt either way",
    )
    mix_prefill: int = _flag(
        0,
        "prompt tokens that a decode step computes in the same forward pass, so that prompts do not stop decoding; 0: "
        "prompts are computed in groups of their own",
        minimum=0,
    )
    speculate: str = _flag(
        "off",
        "how many tokens of each sequence a decode step drafts and verifies in the same pass, while few sequences run; "
        "drafts are what followed an earlier occurrence of the sequence's last tokens, and change no output; N: up to "
        "N, wherever there was one; auto: as many as pay, by how often the sequence's drafts were right and what a row "
        "costs, both as measured; off: none; only on a CPU with our kernels, with KV on the device, and for groups "
        "without log probabilities, penalties and grammars",
        metavar="{auto,off,N}",
    )
    drafter: str | None = _flag(
        None,
        "Python function (tokens, most) that drafts in place of --speculate's own look-up: it returns at most `most` "
        "tokens that may follow",
        metavar="MODULE:NAME",
    )
    overlap: str = _flag(
        "auto",
        "when the results of a decode step are processed; on: while the device computes the next step (several ranks, "
        "groups with penalties and streamed KV still wait for each result); off: before the next step; auto: off on a "
        "CPU, which gains nothing; on a GPU on if the device still computes when the host has launched a step, as "
        "measured at the start",
        choices=OVERLAPS,
    )
    plan: str = _flag(
        "auto",
        "auto: where a profile is kept (`sgl-batch plan --profile`), what is not given is planned; off: it is not",
        choices=("auto", "off"),
    )
    workload: str | None = _flag(
        None,
        "the batch that is planned for, as for `sgl-batch plan`; by default the input of `sgl-batch run`, else "
        "128:128x256",
        metavar="PROMPT:OUTPUTxCOUNT",
    )


WEIGHT_MODES = ("resident", "streamed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """The memory tiers (BatchGen 5.3): where KV and weights lie for which the device has no room."""

    kv_store_bytes: int = _flag(
        0,
        "size of the host KV store, in which prefilled and suspended sequences wait while the device has no pages for "
        "them, so that nothing is computed twice; use it to run more sequences than the device holds; 0: no store, and "
        "a sequence is admitted when all pages that it can need are free",
        minimum=0,
        in_bytes=True,
    )
    kv_store_dir: str | None = _flag(
        None, "directory of the host KV store (default: in memory), or of the files of --admission", metavar="DIR"
    )
    kv_store_mode: str = _flag(
        "auto",
        "inclusive: every full page of KV is in the host KV store too, so that suspending copies almost nothing; "
        "exclusive: a page lies on the device or in the store, so that both together hold sequences, and only choices "
        "of one request share their prompt; auto: exclusive if the store is not larger than the device's pages, or if "
        "the model has no family adapter (its prompts are computed on the device and share nothing), else inclusive",
        choices=KV_STORE_MODES,
    )
    decode_kv: str = _flag(
        "auto",
        "where the KV of the decode group lies if there is a host KV store; resident: on the device, so that as many "
        "sequences run as fit there; streamed: in the store, from which each step brings it by layer and sub-batch, so "
        "that the group is as large as the store; auto: measures both for one interval between boundaries each, on a "
        "GPU only if copies are fast enough (several ranks: resident)",
        choices=DECODE_KV_MODES,
    )
    kv_store_checksums: bool = _flag(False, "keep a checksum of every page in the host KV store, to find faults")
    kv_copy_threads: int = _flag(1, "threads that copy pages between the device and the host KV store", minimum=1)
    weights: str = _flag(
        "resident",
        "resident: all weights are loaded; streamed: the weights of experts are read from the checkpoint while the "
        "model runs (a GPU fetches them from host memory), so that the model can be larger than memory; streamed pays "
        "with large groups, since each step reads what it needs once",
        choices=WEIGHT_MODES,
    )
    weight_memory: int = _flag(
        0,
        "memory for streamed experts; what two layers' experts leave of it holds experts that stay; 0: on a CPU, what "
        "each forward pass leaves free in the machine, its control group or --device-memory; on a GPU, two layers' "
        "experts",
        minimum=0,
        in_bytes=True,
    )
    weight_read_threads: int = _flag(
        4, "threads that read streamed experts, and quantised ones at the start", minimum=1, maximum=64
    )
    device_memory: int = _flag(
        0,
        "memory that a rank may take of its device (of RAM, on a CPU) for its process, weights, the working memory of "
        "the largest groups, and as many pages of KV as then fit; 0: --mem-fraction-static and --max-total-tokens "
        "decide",
        minimum=0,
        in_bytes=True,
    )
    host_memory: int = _flag(
        0, "RAM that the host KV store may take; a larger store is refused; 0: no limit", minimum=0, in_bytes=True
    )

    @property
    def store_in_memory_bytes(self) -> int:
        """Bytes of RAM that the host KV store may take."""
        return self.kv_store_bytes if self.kv_store_dir is None else 0

    @property
    def process_bytes(self) -> int:
        """Bytes that a rank's process may have in memory on a CPU, where both tiers are RAM; 0 without a budget."""
        return self.device_memory + self.store_in_memory_bytes if self.device_memory else 0


_FUNCTION_EXAMPLES = {"on_yield": "my_callbacks:round_kv", "drafter": "my_drafts:of_corpus"}
PARTITION_COSTS = ("kept", "measure", "off")
PARTITION_EXPERTS = ("whole", "split")
MIGRATIONS = ("even", "never", "always", "prepared", "as-tokens", "partition")
TOKEN_DISPATCHERS = ("auto", "shared", "gloo", "nccl", "deepep")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """How several ranks share sequences and watch each other."""

    migration: str = _flag(
        "even",
        "which sequences move to another rank at a boundary; even: those that even out the ranks' counts; never: none; "
        "for tests, all that can: always: at once, prepared: after copies of full pages, as-tokens: without KV; "
        "partition: none, but ranks run all together every other interval",
        choices=MIGRATIONS,
    )
    on_refill: str | None = _flag(
        None,
        "Python function that decides at a boundary before which sequences wait: which of them move to other ranks, or "
        "that all ranks prefill (see `Callbacks` in docs/ranks.md); by default sgl_batch.core.refill:on_refill",
        metavar="MODULE:NAME",
    )
    on_long_tail: str | None = _flag(
        None,
        "Python function that decides at a boundary when nothing waits on any rank: which of the last sequences move, "
        "are partitioned, or are held (see `Callbacks` in docs/ranks.md); by default "
        "sgl_batch.core.long_tail:on_long_tail",
        metavar="MODULE:NAME",
    )
    partition_costs: str = _flag(
        "kept",
        "whether ranks are partitioned by measured cost; kept: if an earlier start has measured it; measure: if none "
        "has, this one does; off: by the limits below alone (see `Partitions` in docs/ranks.md)",
        choices=PARTITION_COSTS,
    )
    partition_below: int = _flag(
        0,
        "without known costs, partition the last sequences over ranks when at most so many are left on all of them and "
        "nothing waits: one over all ranks, two on four ranks over two sets of two; 0: never",
        minimum=0,
    )
    partition_least_tokens: int = _flag(
        512,
        "and only if one of them is expected to generate at least so many tokens yet, by the lengths of the outputs "
        "that have ended",
        minimum=0,
    )
    partition_prompt_tokens: int = _flag(
        0,
        "let all ranks compute a prompt of at least so many tokens together when no other prompt is to be computed; 0: "
        "from the length on that the costs say, and never without costs",
        minimum=0,
    )
    partition_experts: str = _flag(
        "whole",
        "how the ranks of a partition compute experts; whole: each computes those that it has; split: each computes "
        "some columns of all, copies of which take as much memory again as its experts",
        choices=PARTITION_EXPERTS,
    )
    token_dispatcher: str = _flag(
        "auto",
        "how tokens reach the ranks of their experts: shared (memory of one machine, CPU), gloo (CPU), nccl (GPU) or "
        "deepep (GPU); auto: shared or nccl",
        choices=TOKEN_DISPATCHERS,
    )
    rank_timeout_s: float = _flag(
        10.0,
        "seconds without a sign of life after which a rank counts as hung and the engine stops",
        minimum=1.0,
        metavar="SECONDS",
    )

    @property
    def callbacks(self) -> dict[str, str | None]:
        """The names of the functions that decide for several ranks, by their flags; None for the default."""
        return {"on_refill": self.on_refill, "on_long_tail": self.on_long_tail}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """Where events of sequences and decisions are written, and whether the start is logged."""

    trace_file: str | None = _flag(
        None,
        "file to which one JSON line is written for each change of a sequence's state and each decision (see "
        "`sgl-batch trace`); by default there is none",
        metavar="FILE",
    )
    log_startup: bool = _flag(
        False,
        "log, when the engine has started or has failed to, how long each of its processes took for each phase of the "
        "start, and at what rate weights were read",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Everything that sgl_batch adds to SGLang's own arguments."""

    forward: ForwardConfig = dataclasses.field(default_factory=ForwardConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    ranks: RankConfig = dataclasses.field(default_factory=RankConfig)
    trace: TraceConfig = dataclasses.field(default_factory=TraceConfig)

    def __post_init__(self) -> None:
        for owner in self._owners():
            for field in dataclasses.fields(owner):
                check_value(field, getattr(owner, field.name))
        self._check_callbacks()
        self._check_mixing()
        self._check_speculation()
        forward = self.forward
        for phase in ("prefill", "decode"):
            b_attn, b_moe = getattr(forward, f"b_attn_{phase}"), getattr(forward, f"b_moe_{phase}")
            if b_attn > b_moe and b_attn != _default_of("forward", f"b_attn_{phase}"):
                raise ConfigError(
                    f"b_attn_{phase} is {b_attn}, more than b_moe_{phase} ({b_moe}): a sub-batch cannot be larger "
                    f"than its group; lower b_attn_{phase} or raise b_moe_{phase}"
                )

    def _check_callbacks(self) -> None:
        names = {"on_yield": self.forward.on_yield, **self.ranks.callbacks, "drafter": self.schedule.drafter}
        for flag, name in names.items():
            if name is not None:
                check_name(flag, name, _FUNCTION_EXAMPLES.get(flag, f"my_callbacks:{flag}"))

    def _check_speculation(self) -> None:
        wanted, overlap = self.schedule.speculate, self.schedule.overlap
        if wanted not in ("auto", "off") and not (wanted.isascii() and wanted.isdecimal() and int(wanted) > 0):
            raise ConfigError(f"speculate is {wanted!r}; it takes auto, off, or a number of drafts from 1 on")
        if wanted != "off" and overlap == "on":
            raise ConfigError(
                f"speculate is {wanted} and overlap is on: drafts follow from the results of the step before; leave "
                "out overlap or speculate"
            )

    def _check_mixing(self) -> None:
        tokens, most = self.schedule.mix_prefill, self.forward.b_moe_prefill
        if tokens > most:
            raise ConfigError(
                f"mix_prefill is {tokens}, more than b_moe_prefill ({most}), the tokens of a prefill group: lower "
                "mix_prefill, or raise b_moe_prefill"
            )
        if tokens and self.forward.accumulate is False:
            raise ConfigError(
                f"mix_prefill is {tokens}, and experts are called once for each sub-batch: decode rows and prompts "
                "share an expert call only with accumulation; leave out no_accumulate or mix_prefill"
            )
        if tokens and self.schedule.overlap == "on":
            raise ConfigError(
                f"mix_prefill is {tokens} and overlap is on: the prompt tokens of a step depend on the results of the "
                "step before it; leave out overlap or mix_prefill"
            )

    def _owners(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def flat(self) -> dict[str, Any]:
        """Return every value by its flag's name, as it is written to a manifest."""
        return {f.name: getattr(owner, f.name) for owner in self._owners() for f in dataclasses.fields(owner)}


SECTIONS: dict[str, type[Any]] = {
    "forward": ForwardConfig,
    "schedule": ScheduleConfig,
    "memory": MemoryConfig,
    "ranks": RankConfig,
    "trace": TraceConfig,
}


def _default_of(section: str, name: str) -> Any:
    return next(f.default for f in dataclasses.fields(SECTIONS[section]) if f.name == name)


def field_names() -> frozenset[str]:
    """Return the names of all our flags, with underscores."""
    return frozenset(f.name for section in SECTIONS.values() for f in dataclasses.fields(section))


def from_mapping(values: Mapping[str, Any]) -> BatchConfig:
    """Build a configuration from flat names; names left out keep their defaults. Raises ConfigError."""
    unknown = sorted(set(values) - field_names())
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}; known: {', '.join(sorted(field_names()))}")
    sections = {
        name: section(**{f.name: _read(f, values[f.name]) for f in dataclasses.fields(section) if f.name in values})
        for name, section in SECTIONS.items()
    }
    return BatchConfig(**sections)


def _read(field: dataclasses.Field[Any], value: Any) -> Any:
    """Return a value as given; a size may be text."""
    return parse_bytes(field.name, value) if field.metadata["in_bytes"] and isinstance(value, str) else value


def split_kwargs(kwargs: Mapping[str, Any]) -> tuple[BatchConfig, dict[str, Any]]:
    """Split keyword arguments into ours, as a configuration, and the rest, which are SGLang's. Raises ConfigError."""
    ours = {name: value for name, value in kwargs.items() if name in field_names()}
    return from_mapping(ours), {name: value for name, value in kwargs.items() if name not in ours}
