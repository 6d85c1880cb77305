"""Decode passes that run from a record have the bits of computed ones, while groups shrink, grow and change."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_batch.kernel_loader import native_kernels
from sgl_batch.layers.attention.native_paged import PieceMetadata, attend, attend_latent
from sgl_batch.metrics.counters import Counters
from sgl_batch.model_executor import recorded_passes
from sgl_batch.model_executor.batch_split import SubBatch
from sgl_batch.model_executor.group_pass import Part
from sgl_batch.model_executor.recorded_passes import RecordedPasses

HIDDEN, HEADS, DIM, EXPERTS, INTER, PAGE, PAGES, LAYERS = 64, 2, 32, 8, 32, 32, 64, 2
LATENT, ROTATED = 24, 8


def packed(*shape: int) -> torch.Tensor:
    weight = torch.randn(shape).mul_(0.2)
    native_kernels().pack_(weight if len(shape) == 3 else weight[None])
    return weight


class NativeLayers:
    """Some layers of the native operators, with pages of KV of their own.

    `regions`: the memory of ranks that share experts, of which these layers are rank number `rank`.
    """

    def __init__(
        self,
        *,
        adds_ones: bool = False,
        in_torch: bool = False,
        latent: bool = False,
        regions: list[torch.Tensor] | None = None,
        rank: int = 0,
    ) -> None:
        torch.manual_seed(0)
        self.adds_ones, self.in_torch, self.latent = adds_ones, in_torch, latent
        self.regions, self.rank = regions, rank
        self.layers = [
            SimpleNamespace(
                norm=torch.rand(HIDDEN) + 0.5,
                qkv=packed(3 * HIDDEN, HIDDEN),
                out=packed(HIDDEN, HIDDEN),
                gate=packed(EXPERTS, HIDDEN),
                w13=torch.cat([packed(EXPERTS * 2, INTER, HIDDEN)]).view(EXPERTS, 2 * INTER, HIDDEN),
                w2=packed(EXPERTS, HIDDEN, INTER),
                keys=torch.zeros(PAGES, HEADS, 1, DIM, PAGE, 1),
                values=torch.zeros(PAGES, HEADS, 1, PAGE, DIM, 1),
                latents=torch.zeros(PAGES, PAGE, LATENT + ROTATED),
                up_keys=packed(HEADS, LATENT, DIM - ROTATED),
                up_values=packed(HEADS, DIM, LATENT),
            )
            for _ in range(LAYERS)
        ]
        self.counters, self.backend, self.computed = Counters(), SimpleNamespace(forward_metadata=None), 0

    def compute(self, parts: Any, hidden: torch.Tensor) -> torch.Tensor:
        kernels, batch, residual = native_kernels(), parts[0].batch, None
        self.computed += 1
        for layer in self.layers:
            if residual is None:
                residual, (hidden, _) = hidden, kernels.rms_norm(hidden, None, layer.norm, 1e-6)
            else:
                kernels.add_rms_norm_(hidden, residual, layer.norm, 1e-6)
            query, key, value = kernels.linear(hidden, layer.qkv).split(HIDDEN, dim=-1)
            if self.latent:
                seen = self.seen_in_latents(layer, query, key, batch.out_cache_loc)
            else:
                key, value = (rows.view(-1, HEADS, DIM) for rows in (key, value))
                kernels.write_pages(layer.keys, layer.values, batch.out_cache_loc, key, value)
                seen = self.attended(layer, query)
            hidden = kernels.linear(seen, layer.out)
            if self.adds_ones:
                hidden = hidden + 1
            if self.in_torch:
                hidden = shared(hidden, layer.norm)
            kernels.add_rms_norm_(hidden, residual, layer.norm, 1e-6)
            hidden = self.expert_half(layer, hidden)
        return hidden

    def compute_without_rows(self) -> None:
        for layer in self.layers:
            self.expert_half(layer, torch.empty(0, HIDDEN))

    def expert_half(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        kernels = native_kernels()
        weights, ids = kernels.topk(kernels.linear(hidden, layer.gate), 2, renormalize=True)
        if self.regions is None:
            out, rows_per_expert = kernels.experts(hidden, layer.w13, layer.w2, weights, ids)
        else:
            ranks = {"regions": self.regions, "rank": self.rank, "spin_us": 5.0, "timeout_s": 20.0}
            own = slice(self.rank * EXPERTS // 2, (self.rank + 1) * EXPERTS // 2)
            x, ids, weights, _ = kernels.exchange_dispatch(
                x_TM=hidden, topk_ids_TK=ids, topk_weights_TK=weights, num_experts=EXPERTS, **ranks
            )
            sums, rows_per_expert = kernels.experts(x, layer.w13[own], layer.w2[own], weights, ids, f32_output=True)
            out, _ = kernels.exchange_combine(sums_RM=sums, num_tokens=len(hidden), **ranks)
        self.counters.add_expert_call(rows_per_expert)
        return out

    def attended(self, layer: Any, query: torch.Tensor) -> torch.Tensor:
        pools, pieces = (layer.keys, layer.values), self.backend.forward_metadata
        return attend(native_kernels(), query, pools, pieces, page_size=PAGE, head_dim=DIM, scaling=0.2)

    def seen_in_latents(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, kv_indices: torch.Tensor
    ) -> torch.Tensor:
        """Attend as layers with latent attention do, with torch's copies between the products by head."""
        kernels, pieces, rows = native_kernels(), self.backend.forward_metadata, len(query)
        plain, rotated = query.view(rows, HEADS, DIM).split([DIM - ROTATED, ROTATED], dim=-1)
        queries = query.new_empty(rows, HEADS, LATENT + ROTATED)
        kernels.linear_by_head(plain, layer.up_keys, queries[..., :LATENT])
        queries[..., LATENT:] = rotated.contiguous()
        kernels.write_rows(layer.latents.flatten(0, 1), kv_indices, key[:, : LATENT + ROTATED])
        seen = attend_latent(kernels, queries.flatten(1), layer.latents, pieces, value_dim=LATENT, scaling=0.2)
        out = query.new_empty(rows, HEADS, DIM)
        kernels.linear_by_head(seen.view(rows, HEADS, LATENT), layer.up_values, out)
        return out.flatten(1)


def shared(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Operators of torch on rows, as SGLang's models have them between products."""
    half = hidden[:, : HIDDEN // 2].contiguous() * 0.5
    scaled = (hidden * weight).to(torch.bfloat16)
    gate = torch.sigmoid(scaled[:, :1]) * scaled
    return torch.add(hidden, gate).view(len(hidden), 2, -1).clone().flatten(1) + half[:, :1]


def decode_part(lengths: list[int], step: int) -> tuple[Part, torch.Tensor]:
    """Sequences of these lengths, each on pages of its own, and their embeddings."""
    pages = [[2 * i + 1 + j for j in range(-(-length // PAGE))] for i, length in enumerate(lengths)]
    counts = torch.tensor([len(own) for own in pages])
    pieces = PieceMetadata(
        starts=torch.arange(len(lengths) + 1),
        lengths=torch.tensor(lengths),
        table_starts=torch.cumsum(counts, 0) - counts,
        tables=torch.tensor([page for own in pages for page in own]),
        visits=sum(lengths),
    )
    last = [own[-1] * PAGE + (length - 1) % PAGE for own, length in zip(pages, lengths, strict=True)]
    tokens = torch.zeros(len(lengths), dtype=torch.int64)
    batch: Any = SimpleNamespace(
        input_ids=tokens, positions=torch.tensor(lengths) - 1, out_cache_loc=torch.tensor(last)
    )
    sub = SubBatch(span=(0, len(lengths)), forward_batch=batch, attn_metadata=pieces)
    hidden = torch.randn(len(lengths), HIDDEN, generator=torch.Generator().manual_seed(step))
    return Part(batch=batch, span=sub.span, sub_batches=[sub]), hidden


def passes_of(layers: NativeLayers, *, version: Any, latent_numbers: int = 0) -> RecordedPasses:
    return RecordedPasses(
        native_kernels(),
        attn_backend=layers.backend,
        counters=layers.counters,
        version=version,
        num_layers=LAYERS,
        latent_numbers=latent_numbers,
    )


class Runs:
    """The same passes by a record and computed."""

    def __init__(self, *, latent_numbers: int = 0, **layers: bool) -> None:
        self.by_record, self.by_hand = (NativeLayers(**layers) for _ in range(2))
        self.version, self.step = 0, 0
        self.passes = passes_of(self.by_record, version=lambda pieces: self.version, latent_numbers=latent_numbers)

    def computes(self, lengths: list[int]) -> bool:
        """Run a pass both ways, with the same result. Return whether the record's way computed it."""
        part, hidden = decode_part(lengths, self.step)
        self.step += 1
        before = self.by_record.computed
        for layers in (self.by_record, self.by_hand):
            layers.backend.forward_metadata = part.sub_batches[0].attn_metadata
        out = self.passes.run(part, hidden.clone(), self.by_record.compute)
        assert torch.equal(out, self.by_hand.compute([part], hidden.clone()))
        return self.by_record.computed > before


class TwoRanks:
    """Passes of two ranks by records, each beside the same pass of a rank that has all experts."""

    def __init__(self) -> None:
        regions = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(2)]
        self.by_record = [NativeLayers(regions=regions, rank=rank) for rank in range(2)]
        self.alone = [NativeLayers() for _ in range(2)]
        self.passes = [passes_of(layers, version=lambda pieces: 0) for layers in self.by_record]
        self.step = 0

    def recorded(self, *lengths: list[int]) -> tuple[bool, ...]:
        """Run a pass of each rank with sequences of these lengths. Return which of them ran from records."""
        self.step += 1
        before = self.counts("recorded_passes")
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(self.run, range(2), lengths))
        return tuple(now > was for now, was in zip(self.counts("recorded_passes"), before, strict=True))

    def run(self, rank: int, lengths: list[int]) -> None:
        if not lengths:
            self.passes[rank].run_without_rows(self.by_record[rank].compute_without_rows)
            return
        part, hidden = decode_part(lengths, 2 * self.step + rank)
        for layers in (self.by_record[rank], self.alone[rank]):
            layers.backend.forward_metadata = part.sub_batches[0].attn_metadata
        out = self.passes[rank].run(part, hidden.clone(), self.by_record[rank].compute)
        assert torch.equal(out, self.alone[rank].compute([part], hidden.clone()))

    def counts(self, name: str) -> list[int]:
        return [layers.counters.counts[name] for layers in self.by_record]


def test_ranks_run_from_records_while_what_comes_from_others_shrinks_and_grows():
    ranks = TwoRanks()
    assert [ranks.recorded([4 + step] * 3, [9]) for step in range(3)] == [(False, False)] * 2 + [(True, True)]
    assert ranks.recorded([20] * 3, [8]) == (True, True)
    assert ranks.recorded([20], [8] * 30) == (True, False), "the second rank has more rows than its record"
    assert ranks.recorded([21, 22], [9] * 30) == (True, False)
    assert ranks.recorded([23, 22], [7] * 29) == (True, True)
    assert ranks.recorded([5] * 3, [8]) == (True, True)


def test_a_rank_without_rows_computes_for_others_from_a_record_of_its_own():
    ranks = TwoRanks()
    assert [ranks.recorded([5 + step], []) for step in range(3)] == [(False, False)] * 2 + [(True, True)]
    assert [ranks.recorded([9] * 30, []) for _ in range(3)] == [(False, True)] * 2 + [(True, True)]
    assert [ranks.recorded([], [9 + step]) for step in range(2)] == [(False, False), (True, False)]
    assert [ranks.recorded([2], [3]) for _ in range(2)] == [(True, True)] * 2


def test_rows_of_ranks_are_counted_and_waits_for_others_are_stalls():
    ranks = TwoRanks()
    for _ in range(4):
        ranks.recorded([5] * 3, [])
    assert sum(ranks.counts("expert_rows")) == sum(layers.counters.counts["expert_rows"] for layers in ranks.alone)
    assert ranks.counts("expert_calls") == [4 * LAYERS] * 2
    for layers in ranks.by_record:
        spent = layers.counters.clock.read()
        assert all(spent[part] > 0 for part in ("router", "experts", "exchange", "stall"))


def alone_by_exchange(x: torch.Tensor, ids: torch.Tensor, compute: Any) -> torch.Tensor:
    """Exchange rows of one expert with nobody."""
    kernels = native_kernels()
    ranks = {"regions": [torch.zeros(1 << 20, dtype=torch.uint8)], "rank": 0, "spin_us": 5.0, "timeout_s": 20.0}
    came = kernels.exchange_dispatch(
        x_TM=x, topk_ids_TK=ids, topk_weights_TK=torch.ones(len(x), 1), num_experts=1, **ranks
    )
    out, _ = kernels.exchange_combine(sums_RM=compute(*came), num_tokens=len(x), **ranks)
    return out


def test_rows_may_come_where_none_came_when_the_pass_was_recorded():
    kernels, w13, w2 = native_kernels(), packed(2, INTER, HIDDEN).view(1, 2 * INTER, HIDDEN), packed(1, HIDDEN, INTER)
    x, ids, weights = torch.randn(3, HIDDEN), torch.full((3, 1), -1, dtype=torch.int32), torch.ones(3, 1)

    def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *_: float) -> torch.Tensor:
        return kernels.experts(x, w13, w2, weights, ids, f32_output=True)[0]

    kernels.record_begin(3)
    out = alone_by_exchange(x, ids, experts)
    number = kernels.record_end(keep=True)
    assert torch.equal(out, torch.zeros(3, HIDDEN))
    ids[:2] = 0
    kernels.record_run(number, 3)
    assert torch.equal(out, experts(x, ids, weights))
    kernels.record_drop(number)


def test_rows_of_other_ranks_that_other_operators_compute_are_not_recorded():
    kernels, weight = native_kernels(), packed(HIDDEN, HIDDEN)
    kernels.record_begin(3)
    ids = torch.zeros(3, 1, dtype=torch.int32)
    alone_by_exchange(torch.ones(3, HIDDEN), ids, lambda x, *_: kernels.linear(x, weight))
    assert kernels.record_end(keep=True) is None


@pytest.mark.parametrize("latent", [False, True], ids=["heads", "latent"])
def test_results_are_those_of_computed_passes_while_groups_shrink_and_sequences_grow(latent):
    runs = Runs(latent=latent)
    assert [runs.computes([7 + step] * 5) for step in range(4)] == [True, True, False, False]
    assert not any(runs.computes([20 + step] * rows) for step, rows in enumerate((5, 4, 2, 1, 3, 5)))
    assert not any(runs.computes([30 + step, 3, 9]) for step in range(5))


def test_a_group_that_has_grown_is_recorded_when_it_no_longer_grows():
    runs = Runs()
    assert [runs.computes([9] * rows) for rows in (2, 2, 2, 4, 6, 6, 6, 2)] == [
        True,
        True,
        False,
        True,
        True,
        True,
        False,
        False,
    ]
    assert runs.by_record.counters.counts["passes_recorded"] == 2


def test_expert_calls_are_counted_as_in_computed_passes():
    runs = Runs()
    for rows in (4, 4, 4, 3):
        runs.computes([5] * rows)
    own, other = runs.by_record.counters, runs.by_hand.counters
    assert {name: own.counts[name] for name in other.counts} == other.counts
    assert own.counts["recorded_passes"] == 2
    assert torch.equal(own.tokens_per_expert, other.tokens_per_expert)


def test_time_counts_to_the_parts_of_a_pass():
    runs = Runs()
    for _ in range(4):
        runs.computes([5] * 4)
    spent = runs.by_record.counters.clock.read()
    assert all(spent[part] > 0 for part in ("attention", "router", "experts"))


def test_both_halves_of_an_mlp_that_ranks_share_count_to_experts():
    names = ["linear", "gated", "gather_columns", "copy_rows", "linear", "gather_columns", "linear", "topk", "experts"]
    parts = [recorded_passes._PARTS[recorded_passes._part_of(names, index)] for index in range(len(names))]
    assert parts == [
        "attention",
        "experts",
        "exchange",
        "attention",
        "experts",
        "exchange",
        "router",
        "router",
        "experts",
    ]


def test_other_weights_or_pages_are_recorded_anew():
    runs = Runs()
    assert [runs.computes([5] * 3) for _ in range(3)] == [True, True, False]
    runs.version = 1
    assert [runs.computes([5] * 3) for _ in range(3)] == [True, True, False]


def test_more_pages_than_there_is_room_for_are_recorded_anew():
    runs = Runs()
    assert [runs.computes([5]) for _ in range(3)] == [True, True, False]
    assert [runs.computes([PAGE * pages]) for pages in (2, 3, 4, 5)] == [False, False, True, False]


def test_groups_whose_record_would_take_too_much_memory_are_computed(monkeypatch):
    row_bytes = 4 * HIDDEN * LAYERS * recorded_passes._ROWS_KEPT_A_LAYER
    monkeypatch.setattr(recorded_passes, "_MOST_BYTES", 3 * row_bytes)
    runs = Runs()
    assert [runs.computes([5] * rows) for rows in (4, 4, 4, 3, 3, 2)] == [True, True, True, True, False, False]
    # Rows over latents are twice as wide here, in all.
    runs = Runs(latent=True, latent_numbers=HIDDEN * recorded_passes._ROWS_KEPT_A_LAYER)
    assert [runs.computes([5] * rows) for rows in (2, 2, 2, 1, 1)] == [True, True, True, True, False]


def test_operators_of_torch_on_rows_between_native_ones_are_recorded():
    runs = Runs(in_torch=True)
    assert [runs.computes([7 + step] * 5) for step in range(4)] == [True, True, False, False]
    assert not any(runs.computes([20 + step] * rows) for step, rows in enumerate((5, 4, 2, 1, 3, 5)))


def test_layers_that_compute_with_other_operators_are_computed_each_time():
    runs = Runs(adds_ones=True)
    assert all(runs.computes([5] * 3) for _ in range(4))
    assert runs.by_record.counters.counts["recorded_passes"] == 0


def test_a_record_that_is_freed_meanwhile_does_not_disturb():
    runs, other = Runs(), Runs()
    for _ in range(3):
        other.computes([5] * 2)
    compute = runs.by_record.compute

    def frees_the_other(parts: Any, hidden: torch.Tensor) -> torch.Tensor:
        other.passes._record = None
        gc.collect()
        return compute(parts, hidden)

    runs.by_record.compute = frees_the_other
    assert [runs.computes([5] * 2) for _ in range(3)] == [True, True, False]


def test_a_pass_that_fails_leaves_nothing_recording():
    runs = Runs()
    runs.computes([5] * 2)
    part, hidden = decode_part([5, 5], 0)
    with pytest.raises(ZeroDivisionError):
        runs.passes.run(part, hidden, lambda parts, rows: 1 // 0)
    assert [runs.computes([5] * 2) for _ in range(2)] == [True, False]


def test_a_record_does_not_run_with_more_rows_than_it_has():
    kernels, weight = native_kernels(), packed(HIDDEN, HIDDEN)
    kernels.record_begin(3)
    kernels.linear(torch.zeros(3, HIDDEN), weight)
    number = kernels.record_end(keep=True)
    assert kernels.record_names(number) == ["linear"]
    with pytest.raises(RuntimeError, match="a record of 3 rows cannot run with 4"):
        kernels.record_run(number, 4)
    kernels.record_drop(number)
    with pytest.raises(RuntimeError, match=f"there is no record {number}"):
        kernels.record_run(number, 3)
