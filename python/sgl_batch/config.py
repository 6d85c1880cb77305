"""Owns our configuration: one frozen dataclass per owner, and the flags generated from them.

It checks values for themselves; whether a model fits them is decided where the model is known.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sgl_batch.byte_sizes import HOW_TO_WRITE, parse_bytes
from sgl_batch.errors import ConfigError


def _flag(
    default: Any,
    help_text: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] | None = None,
    in_bytes: bool = False,
    kind: type = str,
) -> Any:
    """A dataclass field that is also a command line flag, with the range of values it takes.

    `in_bytes`: its value is a size, which may be given as text. `kind`: the type of a value where the default is None.
    """
    metadata = {
        "help": help_text,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "in_bytes": in_bytes,
        "kind": kind if default is None else type(default),
    }
    return dataclasses.field(default=default, metadata=metadata)


CPU_WEIGHT_DTYPES = ("auto", "int8")
DECODE_FORWARDS = ("auto", "measure", "default", "coroutine", "eager", "sglang")
KV_STORE_MODES = ("auto", "inclusive", "exclusive")
DECODE_KV_MODES = ("auto", "resident", "streamed")
EXPERT_RUNNERS = ("auto", "sglang", "triton", "deepgemm", "native", "torch")
ORDERS = ("fifo", "longest-first")
OVERLAPS = ("auto", "on", "off")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForwardConfig:
    """Coroutine forward (BatchGen Algorithm 1): how a group is cut for attention and combined for experts."""

    b_attn_prefill: int = _flag(
        2048, "tokens that go through attention together in prefill; longer sequences are chunked", minimum=1
    )
    b_moe_prefill: int = _flag(
        8192, "tokens combined for one expert call in prefill; also the size of a prefill group", minimum=1
    )
    b_attn_decode: int = _flag(
        0,
        "sequences that go through attention together in decode (0: the whole group on one GPU with resident KV, "
        "else 256; 256 for latent attention by Triton)",
        minimum=0,
    )
    b_moe_decode: int = _flag(
        256, "sequences combined for one expert call in decode; also the most that run at once", minimum=1
    )
    accumulate: bool | None = _flag(
        None,
        "combine the attention sub-batches for one expert call per layer, or one of a dense layer's MLP "
        "(--no-accumulate calls them once per sub-batch; None: combine, but not the prompts of a dense model, whose "
        "sub-batches are large enough)",
        kind=bool,
    )
    expert_runner: str = _flag(
        "auto",
        "what computes the experts: auto (native on a CPU; on a GPU the fastest in calls at the start), or one of "
        "sglang, triton, deepgemm (GPU), native (CPU), torch",
        choices=EXPERT_RUNNERS,
    )
    decode_forward: str = _flag(
        "auto",
        "which forward pass computes decode groups: default, SGLang's own where one of its CUDA graphs serves the "
        "group, else the coroutine forward; coroutine, eager (without CUDA graphs) or sglang, for all groups; measure "
        "tries them at the start, in at most 20 s, and leaves the default for one with the same tokens that is 5 % "
        "faster (kept in the user's cache); auto measures on a GPU and is the default on a CPU",
        choices=DECODE_FORWARDS,
    )
    start_choices: str | None = _flag(
        None,
        "what an earlier start has settled, in JSON (`choices` of a manifest's plan): taken over in place of measuring "
        "where an option is left to auto and this engine can compute so (`sgl-batch run --resume` passes it)",
    )
    decode_graph_memory: int = _flag(
        0,
        "on a GPU: memory for CUDA graphs of whole decode steps, all sub-batches and layers in one launch, of groups "
        "that SGLang's own graphs do not serve (those of several attention sub-batches); groups are padded to some "
        "sizes, the largest is captured first and each other when it has been met a few times. For one rank, resident "
        "weights, decode KV on the device, and the attention backends triton and fa3 (0: none, the default until they "
        "have run on a GPU; SGLang's own graphs have flags of their own)",
        minimum=0,
        in_bytes=True,
    )
    cpu_weight_dtype: str = _flag(
        "auto",
        "on a CPU: auto keeps weights in the model's number type; int8 rounds those of experts and linear layers, with "
        "a scale for each output, but not routers and the output projection: half the memory, and other tokens",
        choices=CPU_WEIGHT_DTYPES,
    )
    on_yield: str | None = _flag(
        None,
        "module:name of a Python function that is called each time sequences yield after attention of a layer, and may "
        "change their KV of that layer (see model_executor/yield_callback.py; on a CPU, without a host KV store)",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Group phases (BatchGen Algorithm 2): when to prefill, decode and refill."""

    boundary_tokens: int = _flag(64, "decode steps between boundaries, where READY sequences are refilled", minimum=1)
    refill_watermark: float = _flag(
        0.75,
        "prefill again at a boundary when running and ready sequences are fewer than this share of b_moe_decode",
        minimum=0.0,
        maximum=1.0,
    )
    ready_ahead: float = _flag(
        0.5, "sequences prefilled ahead of need, as a share of b_moe_decode", minimum=0.0, maximum=16.0
    )
    order: str = _flag(
        "fifo",
        "which queued sequences are prefilled first: fifo, those that came first; longest-first, those of which prompt "
        "and most output are longest, so that the last to end are short ones (of one that came 8,192 arrivals ago, "
        "itself)",
        choices=ORDERS,
    )
    share_prefixes: bool = _flag(
        True,
        "compute whole pages with which several prompts begin (a system prompt, examples) once, and keep them once, as "
        "long as a sequence that has them is alive (--no-share-prefixes computes each prompt whole; choices of one "
        "request, n > 1, share it either way)",
    )
    mix_prefill: int = _flag(
        0,
        "prompt tokens that a decode step takes along, in the same forward pass: prompts are computed in chunks beside "
        "the decode rows instead of stopping them (0: prompts are computed in groups of their own)",
        minimum=0,
    )
    overlap: str = _flag(
        "auto",
        "when the results of a decode step are processed: on, while the device computes the next one (several ranks, "
        "groups with penalties and streamed KV wait for each result); off, before the next one; auto is off on a CPU, "
        "which gains nothing, and on a GPU on where the device still computes, as measured at the start, when the host "
        "has launched a step",
        choices=OVERLAPS,
    )


WEIGHT_MODES = ("resident", "streamed")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """Memory tiers (BatchGen 5.3): where KV waits that the device has no pages for, and weights it has no room for."""

    kv_store_bytes: int = _flag(
        0,
        "size of the host KV store, where sequences wait, prefilled or suspended, for which the device has no pages; "
        "nothing is computed twice (0: no store; a sequence is admitted when all pages it can need are free)",
        minimum=0,
        in_bytes=True,
    )
    kv_store_dir: str | None = _flag(None, "directory for a file that is the host KV store, in place of memory")
    kv_store_mode: str = _flag(
        "auto",
        "inclusive keeps every full page of KV in the host KV store, so that suspending copies next to nothing; "
        "exclusive keeps a page on the device or in the store, so that both together hold sequences, and shares "
        "prompts among choices alone; auto is exclusive where the store is not larger than the device's pages, and for "
        "models without a family adapter, which compute prompts on the device alone and share none",
        choices=KV_STORE_MODES,
    )
    decode_kv: str = _flag(
        "auto",
        "where the decode group's KV lies beside a host KV store: resident on the device, so that as many run as fit "
        "there; streamed through the device by layer and sub-batch in each step, so that the group is as large as the "
        "store; auto measures both, each between two boundaries, on a GPU if copies are fast enough (ranks: resident)",
        choices=DECODE_KV_MODES,
    )
    kv_store_checksums: bool = _flag(False, "keep a checksum of every page in the host KV store, to find faults")
    kv_copy_threads: int = _flag(1, "threads that copy pages between the device and the host KV store", minimum=1)
    weights: str = _flag(
        "resident",
        "resident: all weights are loaded; streamed: those of experts are read from the checkpoint while the model "
        "runs, or fetched by a GPU from host memory, so that it can be larger than memory (large groups pay: each step "
        "reads what it needs once)",
        choices=WEIGHT_MODES,
    )
    weight_memory: int = _flag(
        0,
        "memory for streamed experts; what is more than two layers' holds experts that stay (0: what is free, in the "
        "machine, its control group or --device-memory, beside what each forward pass takes; on a GPU: two layers')",
        minimum=0,
        in_bytes=True,
    )
    weight_read_threads: int = _flag(4, "threads that read streamed experts", minimum=1, maximum=64)
    device_memory: int = _flag(
        0,
        "what a rank may take of its device's memory (of RAM, on a CPU): itself, weights, working memory for the "
        "largest groups, and as many pages of KV as then fit (0: --mem-fraction-static and --max-total-tokens decide)",
        minimum=0,
        in_bytes=True,
    )
    host_memory: int = _flag(
        0, "what the host KV store may take of RAM; a larger store is refused (0: no limit)", minimum=0, in_bytes=True
    )

    @property
    def store_in_memory_bytes(self) -> int:
        """What the host KV store may take of RAM."""
        return self.kv_store_bytes if self.kv_store_dir is None else 0

    @property
    def process_bytes(self) -> int:
        """What a rank's process may have in memory on a CPU, where both tiers are RAM; 0 where no budget is set."""
        return self.device_memory + self.store_in_memory_bytes if self.device_memory else 0


MIGRATIONS = ("even", "never", "always")
TOKEN_DISPATCHERS = ("auto", "shared", "gloo", "nccl", "deepep")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """Several ranks (--tp N --dp N --enable-dp-attention --ep N): how they share sequences and watch each other."""

    migration: str = _flag(
        "even",
        "which sequences change their rank at a boundary: even (to even out counts), never, or always (for tests)",
        choices=MIGRATIONS,
    )
    token_dispatcher: str = _flag(
        "auto",
        "how tokens go to the ranks of their experts: shared (memory of one machine; CPU), gloo (CPU), nccl, deepep "
        "(GPUs), or auto, which is shared or nccl",
        choices=TOKEN_DISPATCHERS,
    )
    rank_timeout_s: float = _flag(
        10.0, "seconds without a sign of life after which a rank counts as hung and the engine stops", minimum=1.0
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """Where the events of sequences go."""

    trace_file: str | None = _flag(
        None, "write one JSON line for each change of a sequence's state to this file (see `sgl-batch trace`)"
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
                _check_value(field, getattr(owner, field.name))
        self._check_on_yield()
        self._check_mixing()
        forward = self.forward
        for phase in ("prefill", "decode"):
            b_attn, b_moe = getattr(forward, f"b_attn_{phase}"), getattr(forward, f"b_moe_{phase}")
            if b_attn > b_moe and b_attn != _default_of("forward", f"b_attn_{phase}"):
                raise ConfigError(
                    f"b_attn_{phase} is {b_attn}, more than b_moe_{phase} ({b_moe}): a sub-batch cannot be larger "
                    f"than its group; lower b_attn_{phase} or raise b_moe_{phase}"
                )

    def _check_on_yield(self) -> None:
        name = self.forward.on_yield
        if name is None:
            return
        module, colon, attribute = name.partition(":")
        if not (module and colon and attribute.isidentifier()):
            raise ConfigError(f"on_yield is {name!r}; it takes module:name, as in my_callbacks:round_kv")

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
                "have their experts in common only with accumulation; leave out no_accumulate or mix_prefill"
            )
        if tokens and self.schedule.overlap == "on":
            raise ConfigError(
                f"mix_prefill is {tokens} and overlap is on: what a step takes along follows from the results of the "
                "step before it; leave out overlap or mix_prefill"
            )

    def _owners(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def flat(self) -> dict[str, Any]:
        """Every value by its flag's name, as it goes into a manifest."""
        return {f.name: getattr(owner, f.name) for owner in self._owners() for f in dataclasses.fields(owner)}


_SECTIONS: dict[str, type[Any]] = {
    "forward": ForwardConfig,
    "schedule": ScheduleConfig,
    "memory": MemoryConfig,
    "ranks": RankConfig,
    "trace": TraceConfig,
}


def _default_of(section: str, name: str) -> Any:
    return next(f.default for f in dataclasses.fields(_SECTIONS[section]) if f.name == name)


def _check_value(field: dataclasses.Field[Any], value: Any) -> None:
    kinds: tuple[type, ...] = (field.metadata["kind"],)
    if field.default is None:
        kinds = (*kinds, type(None))
    elif isinstance(field.default, float):
        kinds = (float, int)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ConfigError(f"{field.name} is {value!r}; it takes a value of type {kinds[0].__name__}")
    choices = field.metadata["choices"]
    if choices is not None and value not in choices:
        raise ConfigError(f"{field.name} is {value!r}; it must be one of {', '.join(choices)}")
    low, high = field.metadata["minimum"], field.metadata["maximum"]
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        upper = "" if high is None else f" and at most {high}"
        raise ConfigError(f"{field.name} is {value}; it must be at least {low}{upper}")


def field_names() -> frozenset[str]:
    """Names of all our flags, with underscores."""
    return frozenset(f.name for section in _SECTIONS.values() for f in dataclasses.fields(section))


def from_mapping(values: Mapping[str, Any]) -> BatchConfig:
    """Build a configuration from flat names; names left out keep their defaults. Raises ConfigError."""
    unknown = sorted(set(values) - field_names())
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]!r}; known: {', '.join(sorted(field_names()))}")
    sections = {
        name: section(**{f.name: _read(f, values[f.name]) for f in dataclasses.fields(section) if f.name in values})
        for name, section in _SECTIONS.items()
    }
    return BatchConfig(**sections)


def _read(field: dataclasses.Field[Any], value: Any) -> Any:
    """A value as given; sizes may be text."""
    return parse_bytes(field.name, value) if field.metadata["in_bytes"] and isinstance(value, str) else value


def split_kwargs(kwargs: Mapping[str, Any]) -> tuple[BatchConfig, dict[str, Any]]:
    """Part keyword arguments into ours (as a configuration) and the rest (SGLang's)."""
    ours = {name: value for name, value in kwargs.items() if name in field_names()}
    return from_mapping(ours), {name: value for name, value in kwargs.items() if name not in ours}


def add_cli_flags(parser: argparse.ArgumentParser) -> None:
    """Add one argument group per owner, generated from the dataclasses above."""
    for section in _SECTIONS.values():
        title, _, rest = (section.__doc__ or "").partition(":")
        group = parser.add_argument_group(f"sgl_batch: {title.strip().lower()}", rest.strip() or None)
        for field in dataclasses.fields(section):
            _add_flag(group, field)


def add_some_flags(group: Any, names: Sequence[str], *, briefly: bool = False) -> None:
    """Add the flags of these names to a group of help; `briefly`: how sizes are written stands elsewhere."""
    fields = {field.name: field for section in _SECTIONS.values() for field in dataclasses.fields(section)}
    for name in names:
        _add_flag(group, fields[name], briefly=briefly)


def _add_flag(group: Any, field: dataclasses.Field[Any], *, briefly: bool = False) -> None:
    name = "--" + field.name.replace("_", "-")
    text = f"{field.metadata['help']} (default: {field.default})".replace("%", "%%")
    if field.metadata["kind"] is bool:
        action = argparse.BooleanOptionalAction
        group.add_argument(name, dest=field.name, action=action, default=field.default, help=text)
    elif field.metadata["in_bytes"]:
        # Read with the others, so that a mistake is told in the same words.
        text = text if briefly else f"{text}; it takes {HOW_TO_WRITE}"
        group.add_argument(name, dest=field.name, metavar="BYTES", default=field.default, help=text)
    else:
        group.add_argument(name, dest=field.name, type=field.metadata["kind"], default=field.default, help=text)


def from_args(args: argparse.Namespace) -> BatchConfig:
    """Read our flags from parsed arguments. Raises ConfigError."""
    return from_mapping({name: getattr(args, name) for name in field_names() if hasattr(args, name)})
