"""Decides how much memory a rank on a CPU keeps for partitions (BatchGen 4.2), beside weights, KV and unshared passes.

Theory of operation. Weights take no more: a rank's share of a product is some of a weight's columns, where they lie.
The KV of replicas takes none either: it lies in pages of the pool, and a rank without enough free pages is not
partitioned. Columns of experts that ranks share (--partition-experts split) are copied, as many bytes as a rank's own
experts have. And two things take memory in any case. A rank maps the region of every rank of each of its sets, through
which columns are gathered. And in a pass that all ranks share, each rank holds partial sums in float32: of its own
experts for all rows, and of the experts of all ranks for `SUMMED_ROWS` rows at a time.
"""

from __future__ import annotations

from sgl_batch.config import BatchConfig
from sgl_batch.core.device_budget import ModelShape, expert_call_bytes
from sgl_batch.core.plan import Plan

COLUMN_GATHER_BYTES = 16 << 20
"""Bytes of a rank's region for gathers of columns in one set. Larger matrices take several rounds."""

SUMMED_ROWS = 512
"""Rows of which the partial sums of all ranks are added up at a time. For thousands at once the system would give new
memory in each layer, which takes longer than the sums (16,384 rows of 1,024 numbers, two ranks: a quarter of the time).
"""

GATHERS, SHARED_PASSES, COLUMNS = "gathers of partitions", "passes that ranks share", "columns of all experts"
_FLOAT_BYTES = 4
# How --token-dispatcher says that ranks of a CPU share memory.
_THROUGH_MEMORY = ("auto", "shared")


def partition_reserves(config: BatchConfig, plan: Plan, shape: ModelShape, *, num_ranks: int) -> dict[str, int]:
    """Return what a rank on a CPU keeps for partitions, in bytes by name; empty where nothing is ever partitioned.

    The figures are upper bounds. Regions of other ranks count: they are resident in each process that reads them.
    """
    if not can_partition(config, num_ranks=num_ranks):
        return {}
    prompts = plan.prefill.b_moe if _shares_prompts(config) else 0
    kept = {
        GATHERS: gather_bytes(config, num_ranks=num_ranks),
        SHARED_PASSES: shared_pass_bytes(shape, rows=max(plan.decode.b_moe, prompts), num_ranks=num_ranks),
    }
    if shape.experts and config.ranks.partition_experts == "split":
        kept[COLUMNS] = columns_bytes(shape, num_ranks=num_ranks)
    return kept


def can_partition(config: BatchConfig, *, num_ranks: int) -> bool:
    """Return whether decisions under this configuration can partition anything. With streamed decode KV none can."""
    streams = config.memory.kv_store_bytes and config.memory.decode_kv == "streamed"
    return num_ranks > 1 and not streams and (_shares_prompts(config) or _makes_small_sets(config))


def gather_bytes(config: BatchConfig, *, num_ranks: int) -> int:
    """Return the bytes of the regions that a rank maps when it has belonged to a set of each size.

    Sets are all ranks or, where limits or a callback decide, equal parts of them (core/long_tail). A callback that
    makes others takes more. Gathers over gloo take no region.
    """
    if config.ranks.token_dispatcher not in _THROUGH_MEMORY:
        return 0
    sizes = range(2, num_ranks + 1) if _makes_small_sets(config) else (num_ranks,)
    return COLUMN_GATHER_BYTES * sum(size for size in sizes if num_ranks % size == 0)


def columns_bytes(shape: ModelShape, *, num_ranks: int) -> int:
    """Return the bytes of a rank's columns of all experts, as if every layer had experts."""
    matrices = 3 * shape.hidden * shape.expert_width * shape.item_bytes
    return -(-shape.layers * shape.experts * matrices // num_ranks)


def shared_pass_bytes(shape: ModelShape, *, rows: int, num_ranks: int) -> int:
    """Return the bytes by which a pass that all ranks share exceeds one that they do not (device_budget.pass_bytes).

    Beside the float32 sums of its own experts a rank has those of all ranks for some rows, and the sums of halves of
    the ranks. The experts' own call is over by then. A model without experts has none of this.
    """
    if not shape.experts:
        return 0
    row_bytes = shape.hidden * _FLOAT_BYTES
    combined = (num_ranks + (num_ranks - 1).bit_length()) * min(rows, SUMMED_ROWS) * row_bytes
    return rows * row_bytes + max(0, combined - expert_call_bytes(shape, rows=rows))


def _shares_prompts(config: BatchConfig) -> bool:
    """Return whether all ranks can share a prompt, or the last sequences by cost."""
    return config.ranks.partition_costs != "off" or config.ranks.partition_prompt_tokens > 0


def _makes_small_sets(config: BatchConfig) -> bool:
    ranks = config.ranks
    return ranks.partition_below > 0 or ranks.migration == "partition" or ranks.on_long_tail is not None
