"""Owns the policies that can be simulated by name: whose engine each is, its KV, its decisions and its limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from sgl_batch.core.admission_policy import RESERVE
from sgl_batch.core.plan import PhasePlan, Plan
from sgl_batch.errors import ConfigError
from sgl_batch.planner.candidate import DEVICE, INCLUSIVE, STREAMED
from sgl_batch.simulator.cluster.deployment import Deployment
from sgl_batch.simulator.cluster.engine_settings import EngineSettings
from sgl_batch.simulator.cluster.engines import BATCHGEN, DEEPSPEED, FLEXGEN, MOE_LIGHTNING, SGLANG, SGLANG_SLICED, VLLM
from sgl_batch.simulator.kv_forms import KVForm, RankPages, make_form
from sgl_batch.simulator.rivals.lazy_pages import LazyPages
from sgl_batch.simulator.rivals.static_binding import DecodeFirst, PrefillFirst, PrefillTogether
from sgl_batch.simulator.rivals.static_block import StaticBlock
from sgl_batch.simulator.rivals.token_ratio import TokenRatio
from sgl_batch.simulator.scheduler import Ours, Scheduler

PAGE = INTERVAL = 64
REQUEST_SLOTS = 1 << 20
# Defaults of the engine's configuration (config.py).
_WATERMARK, _AHEAD = 0.75, 0.5
# GPU batches for which weights are loaded once (FlexGen's block schedule).
_GPU_BATCHES = (1, 4, 16)
# vLLM's --max-num-seqs on GPUs with much memory. SGLang's limits are above what memory holds.
_VLLM_ROWS, _MOST_ROWS = 1024, 4096
# What an engine can do, and what its scheduler and its memory take: all but its kernels, launches and exchanges.
_OURS = frozenset(
    (
        "name title data_attention tensor_attention kv prefill attention streams_weights by_layer chunk_tokens "
        "reserve_bytes ranks_reserve_bytes host_reserve_bytes step_s step_row_s agree_s boundary_s partition_s "
        "copy_share host_share overlap"
    ).split()
)
# SGLang's --schedule-conservativeness with data-parallel attention, as a factor.
_DATA_ATTENTION = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a policy sets besides its regime: the most sequences that a rank decodes, and tokens of a prefill pass.

    `together`: ranks hold prompts back until all of them have some.
    """

    rows: int
    chunk: int
    together: bool = False

    def plan(self) -> Plan:
        """Return the plan of these limits."""
        return Plan(
            prefill=PhasePlan(b_attn=self.chunk, b_moe=self.chunk),
            decode=PhasePlan(b_attn=self.rows, b_moe=self.rows),
            page_size=PAGE,
            boundary_tokens=INTERVAL,
            refill_watermark=_WATERMARK,
            ready_target=max(1, int(self.rows * (1 + _AHEAD))),
        )

    def text(self) -> str:
        """Return the limits in words."""
        return f"up to {self.rows:,} sequences a rank, prompts in passes of {self.chunk:,} tokens" + (
            ", held back until all ranks have some" if self.together else ""
        )


Choices = Callable[[Deployment, float, float], Sequence[Choice]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A way to run a batch.

    Attributes:
        name, title: "sglang"; its name in reports.
        engines: Whose kernels and abilities it has, or those that are compared.
        says: What it is, for people.
        form: Returns the KV of a rank.
        scheduler: Returns what decides, for the form of KV of its ranks and the limits.
        choices: Returns the limits that are compared, for a deployment and the tokens of a sequence on average: of its
            prompt, and of all that it may have.
        units: Whether prefill and decode have units of their own; the other attributes are then those of a unit.
        gpus: Of each instance, or unit; None for any number.
        partitions: Whether the last sequences of a batch may be partitioned (core/tail_cost).
        pools: Whether what waits on the ranks of a node is for all of them (node_pool).
    """

    name: str
    title: str
    engines: tuple[EngineSettings, ...]
    says: str
    form: Callable[[Deployment], KVForm]
    scheduler: Callable[[KVForm, Choice], Scheduler]
    choices: Choices
    units: bool = False
    gpus: int | None = None
    partitions: bool = False
    pools: bool = False


def pages(tokens: float) -> int:
    """Return the whole pages of so many tokens."""
    return int(tokens // PAGE)


# Ours.


def _our_form(deployment: Deployment) -> KVForm:
    regime = deployment.regime
    kv = STREAMED if regime.runs_from_store else regime.kv
    return make_form(kv, RankPages(device=pages(deployment.device_tokens), store=pages(deployment.store_tokens)), PAGE)


def _our_choices(deployment: Deployment, prompt: float, whole: float) -> Sequence[Choice]:
    """Return as many sequences as fit with all their tokens and, with a store, as fit on average while they grow."""
    chunk = deployment.engine.chunk_tokens
    fits = _rows(deployment.running_tokens / whole)
    if deployment.regime.kv != INCLUSIVE or deployment.regime.runs_from_store:
        return [Choice(rows=fits, chunk=chunk)]
    growing = _rows(deployment.running_tokens / ((prompt + whole) / 2))
    return [Choice(rows=rows, chunk=chunk) for rows in sorted({fits, growing})]


def _rows(number: float) -> int:
    return max(1, min(int(number), _MOST_ROWS))


# Engines that bind sequences.


def _sglang_form(deployment: Deployment) -> KVForm:
    conservativeness = _DATA_ATTENTION if deployment.ranks > 1 else 1.0
    return LazyPages(pages(deployment.device_tokens), PAGE, TokenRatio(conservativeness), waits_last=True)


def _sglang_choices(deployment: Deployment, prompt: float, whole: float) -> Sequence[Choice]:
    """Return the default, by which ranks with data-parallel attention share a chunk, and a chunk for each rank.

    A chunk for each rank is tried with its prompt delayer as well.
    """
    chunk = deployment.engine.chunk_tokens
    chunks = {max(PAGE, chunk // deployment.ranks), chunk}
    rows = _bound_rows(deployment, prompt, whole, _MOST_ROWS)
    found = [Choice(rows=rows, chunk=one) for one in sorted(chunks)]
    return [*found, replace(found[-1], together=True)] if deployment.ranks > 1 else found


def _bound_rows(deployment: Deployment, prompt: float, whole: float, most: int) -> int:
    """Return the most sequences that a rank decodes: where layers keep windows, those that fit while they grow.

    SGLang sets memory for windows apart by a ratio of two pools; this is the best ratio for the batch.
    """
    if not deployment.sequence_tokens:
        return most
    return min(most, _rows(deployment.device_tokens / ((prompt + whole) / 2 + deployment.sequence_tokens)))


def _vllm_form(deployment: Deployment) -> KVForm:
    return LazyPages(pages(deployment.device_tokens), PAGE, RESERVE)


def _vllm_choices(deployment: Deployment, prompt: float, whole: float) -> Sequence[Choice]:
    """Return the default budget of a step, a quarter, and a share of it, which hold decode up for less time."""
    chunk = deployment.engine.chunk_tokens
    rows = _bound_rows(deployment, prompt, whole, _VLLM_ROWS)
    shares = {chunk // max(deployment.ranks, 4), chunk // 4, chunk}
    return [Choice(rows=rows, chunk=max(one, _VLLM_ROWS)) for one in sorted(shares)]


# Engines that compute block by block.


def _block_form(deployment: Deployment) -> KVForm:
    """Return pages of the tier whose KV limits a block; a sequence holds all that it may need."""
    return make_form(DEVICE, RankPages(device=pages(deployment.running_tokens)), PAGE)


def _block_choices(deployment: Deployment, prompt: float, whole: float) -> Sequence[Choice]:
    return [Choice(rows=_rows(deployment.running_tokens / whole), chunk=deployment.engine.chunk_tokens)]


def _zigzag_choices(deployment: Deployment, prompt: float, whole: float) -> Sequence[Choice]:
    """Return blocks whose prompts are computed by one GPU batch for each load of weights, or by several in turn."""
    (one,) = _block_choices(deployment, prompt, whole)
    return [replace(one, chunk=batches * one.chunk) for batches in _GPU_BATCHES]


def _kernels_of(rival: EngineSettings) -> EngineSettings:
    """Return BatchGen with the kernels, launches and exchanges of another engine."""
    kernels = {field.name: getattr(rival, field.name) for field in fields(rival) if field.name not in _OURS}
    return replace(BATCHGEN, title=f"BatchGen, kernels of {rival.title}", **kernels)


def _block(engine: EngineSettings, says: str, choices: Choices = _zigzag_choices) -> Policy:
    return Policy(
        name=engine.name,
        title=f"{engine.title}-like",
        engines=(engine,),
        says=says,
        form=_block_form,
        scheduler=lambda form, choice: StaticBlock(),
        choices=choices,
    )


_BATCHGEN = Policy(
    name="batchgen",
    title=BATCHGEN.title,
    engines=(BATCHGEN,),
    says="the decisions of this engine (core/), in the best layout and regime that fits; ranks of a node share what "
    "waits, and the last sequences may be partitioned, which the engine does not do yet",
    form=_our_form,
    scheduler=lambda form, choice: Ours(form.policy),
    choices=_our_choices,
    partitions=True,
    pools=True,
)
_SGLANG = Policy(
    name="sglang",
    title=SGLANG.title,
    engines=(SGLANG, SGLANG_SLICED),
    says="continuous batching, prompts first, in chunks; sequences bound to ranks; the better of data-parallel and "
    "tensor-parallel attention, of whole and sliced experts, of independent groups, of two sizes of chunks, and with "
    "its prefill delayer or without",
    form=_sglang_form,
    scheduler=lambda form, choice: PrefillTogether() if choice.together else PrefillFirst(),
    choices=_sglang_choices,
)
POLICIES: tuple[Policy, ...] = (
    _BATCHGEN,
    replace(
        _BATCHGEN,
        name="batchgen-no-partition",
        title="BatchGen, no partition",
        says="as batchgen, but the last sequences are decoded as all others",
        partitions=False,
    ),
    replace(
        _BATCHGEN,
        name="batchgen-as-built",
        title="BatchGen as built",
        says="as batchgen, without partition, and what was dealt to a rank waits there: as the engine is today",
        partitions=False,
        pools=False,
    ),
    replace(
        _BATCHGEN,
        name="batchgen-sglang-kernels",
        title="BatchGen, SGLang's kernels",
        engines=(_kernels_of(SGLANG),),
        says="as batchgen, with the assumed kernels, launches and exchanges of SGLang",
    ),
    _SGLANG,
    Policy(
        name="vllm",
        title=VLLM.title,
        engines=(VLLM,),
        says="continuous batching, chunks of prompts beside decode; sequences bound to ranks, as for sglang",
        form=_vllm_form,
        scheduler=lambda form, choice: DecodeFirst(),
        choices=_vllm_choices,
    ),
    replace(
        _SGLANG,
        name="disaggregated",
        title="Prefill-decode units",
        says="SGLang's kernels with prefill and decode on units of their own, at the best ratio of units",
        units=True,
    ),
    _block(FLEXGEN, "weights stream once for several GPU batches; a block is decoded to its end, KV in host memory"),
    _block(MOE_LIGHTNING, "weights stream once for several micro-batches; a block to its end, attention on the host"),
    _block(DEEPSPEED, "weights stream, a batch is decoded to its end", _block_choices),
)
# Names that stand for several policies.
SEVERAL = {"offload": ("flexgen", "moe-lightning", "deepspeed")}


def policies_named(text: str) -> list[Policy]:
    """Return the policies whose names stand behind commas, each once: NAME, or NAME:GPUS of an instance.

    Raises ConfigError, which lists the names.
    """
    found: dict[str, Policy] = {}
    known = {one.name: one for one in POLICIES}
    for word in text.lower().split(","):
        name, colon, gpus = (part.strip() for part in word.partition(":"))
        if colon and not (gpus.isascii() and gpus.isdigit() and int(gpus)):
            raise ConfigError(f"--policies has {word!r}; behind a colon stand the GPUs of an instance, as in sglang:16")
        for each in SEVERAL.get(name, (name,)):
            if each not in known:
                names = ", ".join([*known, *SEVERAL])
                raise ConfigError(f"there is no policy {each!r}; --policies takes some of {names}, behind commas")
            found[f"{each}{colon}{gpus}"] = _with_gpus(known[each], int(gpus)) if colon else known[each]
    return list(found.values())


def _with_gpus(policy: Policy, gpus: int) -> Policy:
    return replace(policy, gpus=gpus, title=f"{policy.title}, {gpus} GPUs each")
