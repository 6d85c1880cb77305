"""What a pass costs: never less than a resource allows, never more on better hardware, each effect by its name."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_batch.planner.candidate import INCLUSIVE, STREAMED
from sgl_batch.planner.layer_dag import EXCHANGE
from sgl_batch.planner.layouts import Layout
from sgl_batch.planner.model_layers import MOE
from sgl_batch.planner.pass_cost import COPIES, WEIGHTS
from sgl_batch.simulator.cluster import costs as parts
from sgl_batch.simulator.cluster.assumed import Assumed
from sgl_batch.simulator.cluster.costs import ClusterCosts
from sgl_batch.simulator.cluster.deployment import deployment
from sgl_batch.simulator.cluster.engines import BATCHGEN, ENGINES, FLEXGEN, SGLANG, SGLANG_SLICED, VLLM
from sgl_batch.simulator.cluster.hardware import cluster_named
from sgl_batch.simulator.cluster.models import model_named
from sgl_batch.simulator.cluster.regime import DATA_PARALLEL, HOST, Regime
from sgl_batch.simulator.work import PassWork, pairs_of

DEEPSEEK, MIXTRAL, OSS = (model_named(name) for name in ("deepseek-r1", "mixtral-8x7b", "gpt-oss-120b"))
H20, H20S, A5000 = (cluster_named(name) for name in ("h20x16", "h20x8", "a5000x1"))
ALONE, EIGHT, SIXTEEN = Layout(), Layout(ranks=8), Layout(ranks=16)
DECODE = PassWork(rows=64, kv_tokens=64 * 5000, all_rows=1024)
PROMPTS = PassWork(prompts=8, prompt_tokens=8192, prompt_pairs=8 * pairs_of(1024), all_rows=16 * 8192)
SETTINGS = settings(max_examples=40, deadline=None)


def costs(model=DEEPSEEK, cluster=H20, engine=SGLANG, layout=SIXTEEN, regime=None):
    return ClusterCosts(model, cluster, engine, layout, regime or Regime())


def certain(number: float) -> Assumed:
    return Assumed(number, number, number)


@st.composite
def works(draw, ranks: int = 16) -> PassWork:
    rows, prompts = draw(st.integers(0, 2000)), draw(st.integers(0, 40))
    length = draw(st.integers(1, 4000))
    tokens = prompts * length
    return PassWork(
        prompts=prompts,
        prompt_tokens=tokens,
        prompt_pairs=prompts * pairs_of(length),
        rows=rows,
        kv_tokens=rows * draw(st.integers(1, 20_000)),
        all_rows=(rows + tokens) * ranks - draw(st.integers(0, (rows + tokens) * (ranks - 1))),
    )


REGIMES = st.builds(
    Regime,
    kv=st.sampled_from(["device", INCLUSIVE, STREAMED]),
    streamed_weights=st.sampled_from([0.0, 0.3, 1.0]),
    prefill=st.sampled_from(["expert parallel", DATA_PARALLEL]),
    attention=st.sampled_from(["device", HOST]),
)


@SETTINGS
@given(works(), REGIMES, st.sampled_from(ENGINES), st.sampled_from([DEEPSEEK, OSS]))
def test_no_pass_is_shorter_than_any_resource_allows(work, regime, engine, model):
    found = costs(model, H20, engine, SIXTEEN, regime)
    seconds, layers, sheet = found.of_exactly(work).seconds, model.layers, H20.sheet
    tokens = work.prompt_tokens + work.rows
    plain = layers.num_layers * layers.attention_bytes / layers.weight_bytes
    share = max(work.all_rows, tokens) / 16
    routed = layers.layers[MOE] * layers.top_k * layers.expert_bytes_each / layers.expert_number_bytes
    most = max(sheet.bf16_flop_per_s, sheet.fp8_flop_per_s)
    assert seconds >= 2 * (plain * tokens + routed * share) / most * 0.999
    assert seconds >= (layers.num_layers * layers.attention_bytes if tokens else 0) / sheet.memory_bytes_per_s
    full = layers.num_layers - layers.window_layers
    if regime.attention != HOST:
        assert seconds >= full * work.kv_tokens * layers.kv_layer_bytes / sheet.memory_bytes_per_s
        if regime.kv == STREAMED:
            assert seconds >= full * work.kv_tokens * layers.kv_layer_bytes / H20.link_bytes_per_s
    else:
        node = H20.host_memory_bytes_per_s.best / 8
        assert seconds >= full * work.kv_tokens * layers.kv_layer_bytes / node * 0.999


@SETTINGS
@given(works(), REGIMES, st.floats(1.0, 4.0), st.sampled_from(["memory", "flop", "pcie", "nvlink", "network", "host"]))
def test_better_hardware_is_never_slower(work, regime, times, what):
    sheet = H20.sheet
    better = {
        "memory": replace(H20, sheet=replace(sheet, memory_bytes_per_s=sheet.memory_bytes_per_s * times)),
        "flop": replace(
            H20,
            sheet=replace(
                sheet, bf16_flop_per_s=sheet.bf16_flop_per_s * times, fp8_flop_per_s=sheet.fp8_flop_per_s * times
            ),
        ),
        "pcie": replace(H20, sheet=replace(sheet, pcie_bytes_per_s=sheet.pcie_bytes_per_s * times)),
        "nvlink": replace(H20, sheet=replace(sheet, nvlink_bytes_per_s=sheet.nvlink_bytes_per_s * times)),
        "network": replace(H20, network_bytes_per_s=certain(H20.network_bytes_per_s.best * times)),
        "host": replace(H20, host_memory_bytes_per_s=certain(H20.host_memory_bytes_per_s.best * times)),
    }[what]
    for engine in (BATCHGEN, SGLANG):
        before = costs(engine=engine, regime=regime).of_exactly(work).seconds
        assert costs(cluster=better, engine=engine, regime=regime).of_exactly(work).seconds <= before * 1.000001


@SETTINGS
@given(works(), REGIMES)
def test_parts_and_bounds_add_up_to_the_seconds_and_all_parts_have_a_source(work, regime):
    found = costs(engine=BATCHGEN, regime=regime)
    whole = found.of_exactly(work)
    assert sum(whole.bounds.values()) == pytest.approx(whole.seconds)
    assert set(whole.parts) <= set(found.sources)
    assert min(whole.parts.values(), default=0.0) >= 0


@SETTINGS
@given(works(), works())
def test_more_work_is_never_shorter(one, other):
    both = PassWork(
        prompts=one.prompts + other.prompts,
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        prompt_pairs=one.prompt_pairs + other.prompt_pairs,
        rows=one.rows + other.rows,
        kv_tokens=one.kv_tokens + other.kv_tokens,
        all_rows=one.all_rows + other.all_rows,
    )
    slow = replace(SGLANG, graph_rows=1 << 30, mixed_graphs=True, ragged_gather=1.0, padded_gather=False)
    found = costs(engine=slow)
    assert found.of_exactly(both).seconds >= found.of_exactly(one).seconds * 0.999999


def test_remembered_passes_differ_by_less_than_a_percent_and_are_quick():
    found = costs()
    exact = found.of_exactly(DECODE).seconds
    assert exact <= found.of_pass(DECODE).seconds < 1.01 * exact
    assert found.of_pass(DECODE) is found.of_pass(replace(DECODE, kv_tokens=DECODE.kv_tokens - 100))
    begin = time.perf_counter()
    for _ in range(1000):
        found.of_pass(DECODE)
    assert (time.perf_counter() - begin) / 1000 < 5e-4


def test_latent_attention_takes_the_products_of_its_forms():
    rates = costs().rates
    decode = costs().of_exactly(DECODE).parts[parts.ATTENTION]
    assert decode == pytest.approx(61 * DECODE.kv_tokens * 2 * 128 * (576 + 512) / rates.attention)
    long = PassWork(prompts=1, prompt_tokens=20_000, prompt_pairs=pairs_of(20_000), all_rows=16 * 20_000)
    prompts = costs().of_exactly(long).parts[parts.ATTENTION]
    assert prompts == pytest.approx(61 * long.prompt_pairs * 2 * 128 * (192 + 128) / rates.attention)


def test_short_prompts_take_longer_for_each_pair_of_tokens():
    short = costs().of_exactly(_prompts(8)).parts[parts.ATTENTION] / _prompts(8).prompt_pairs
    long = PassWork(prompts=1, prompt_tokens=4000, prompt_pairs=pairs_of(4000), all_rows=16 * 4000)
    assert 1.3 < short / (costs().of_exactly(long).parts[parts.ATTENTION] / long.prompt_pairs) < 2.5


def test_attention_of_a_window_looks_no_further():
    found = costs(OSS, cluster_named("h100x8"), layout=EIGHT)
    short, long = (PassWork(rows=8, kv_tokens=8 * context, all_rows=64) for context in (100, 10_000))
    full = OSS.layers.num_layers * OSS.layers.kv_layer_bytes / found.rates.memory
    assert found.of_exactly(short).parts[parts.ATTENTION] == pytest.approx(8 * 100 * full, rel=0.01)
    assert found.of_exactly(long).parts[parts.ATTENTION] == pytest.approx(8 * (10_000 + 128) / 2 * full, rel=0.01)


def test_data_parallel_prefill_exchanges_nothing_and_waits_for_experts_that_products_do_not_hide():
    alone = costs(engine=replace(BATCHGEN, overlap=certain(1.0)), regime=Regime(prefill=DATA_PARALLEL))
    few, many = (alone.of_exactly(_prompts(count)) for count in (4, 400))
    assert EXCHANGE not in few.parts
    assert parts.SKEW not in few.parts
    experts = DEEPSEEK.expert_bytes * 15 / 16 / alone.rates.link
    assert few.seconds == pytest.approx(experts, rel=0.02)
    assert many.parts.get(WEIGHTS, 0.0) == 0
    assert many.seconds > 3 * experts
    shared = costs(engine=BATCHGEN).of_exactly(_prompts(400))
    assert shared.parts[EXCHANGE] > 0
    assert shared.parts[parts.SKEW] > 0
    assert WEIGHTS not in shared.parts


def _prompts(count: int) -> PassWork:
    return PassWork(
        prompts=count, prompt_tokens=count * 500, prompt_pairs=count * pairs_of(500), all_rows=16 * 500 * count
    )


def test_a_decode_step_is_expert_parallel_in_both_forms_of_prefill():
    forms = [costs(engine=BATCHGEN, regime=Regime(prefill=form)) for form in ("expert parallel", DATA_PARALLEL)]
    assert forms[0].of_exactly(DECODE).parts == forms[1].of_exactly(DECODE).parts


def test_tiles_cost_most_where_experts_get_few_rows():
    few, many = costs().of_exactly(replace(DECODE, all_rows=512)), costs().of_exactly(replace(DECODE, all_rows=200_000))
    assert few.parts[parts.TILES] / few.parts[parts.EXPERTS] > 0.3
    assert many.parts[parts.TILES] / many.parts[parts.EXPERTS] < 0.05
    plain = costs(engine=replace(SGLANG, tile_rows=1)).of_exactly(replace(DECODE, all_rows=512))
    assert plain.parts[parts.TILES] < few.parts[parts.TILES] / 5


def test_more_ranks_wait_longer_for_the_busiest_and_slices_for_none():
    work = replace(DECODE, all_rows=4000)
    shares = []
    for ranks in (2, 8, 32):
        found = costs(engine=replace(SGLANG, tile_rows=1), layout=Layout(ranks=ranks)).of_exactly(work).parts
        shares.append(found[parts.SKEW] / found[parts.EXPERTS])
    assert 0 < shares[0] < shares[1] < shares[2] < 1
    assert parts.SKEW not in costs(engine=SGLANG_SLICED).of_exactly(work).parts
    even = costs(engine=replace(SGLANG, unevenness=certain(0.0))).of_exactly(replace(work, all_rows=10_000_000)).parts
    assert even[parts.SKEW] < 0.02 * even[parts.EXPERTS]


def test_graphs_spare_launches_and_passes_with_prompts_have_none():
    small = PassWork(rows=1, kv_tokens=10, all_rows=2)
    mixed = replace(small, prompts=1, prompt_tokens=8, prompt_pairs=36, all_rows=10)
    qwen, two = model_named("qwen3-30b-a3b"), cluster_named("h20x2")
    launches = {
        (engine.name, work.mixed): costs(qwen, two, engine, Layout(ranks=2)).of_exactly(work).parts[parts.LAUNCHES]
        for engine in (SGLANG, VLLM, replace(SGLANG, name="eager", graph_rows=0))
        for work in (small, mixed)
    }
    assert launches["sglang", False] == pytest.approx(48 * SGLANG.layer_s.best)
    assert launches["sglang", True] > 5 * launches["sglang", False]
    assert launches["eager", False] > 5 * launches["sglang", False]
    assert launches["vllm", True] == pytest.approx(48 * VLLM.layer_s.best)
    beside_prompts = costs(qwen, two, SGLANG, Layout(ranks=2)).of_exactly(replace(small, all_rows=20))
    assert beside_prompts.parts[parts.LAUNCHES] > 5 * launches["sglang", False]


def test_ranks_pad_gathered_rows_to_those_of_the_busiest():
    even, uneven = DECODE, replace(DECODE, all_rows=100)
    padded = costs().of_exactly
    assert padded(uneven).parts[EXCHANGE] == pytest.approx(padded(even).parts[EXCHANGE])
    plain = costs(engine=replace(SGLANG, padded_gather=False)).of_exactly
    assert plain(uneven).parts[EXCHANGE] < plain(even).parts[EXCHANGE]


def test_bytes_between_nodes_go_over_the_network_and_within_them_over_nvlink():
    slow = replace(H20, network_bytes_per_s=certain(1e9))
    for engine in (SGLANG, BATCHGEN):
        across, within = (costs(cluster=one, engine=engine).of_exactly(PROMPTS).parts[EXCHANGE] for one in (slow, H20))
        assert across > 5 * within
    one_node = [costs(cluster=one, layout=EIGHT).of_exactly(PROMPTS).parts[EXCHANGE] for one in (slow, H20)]
    assert one_node[0] == one_node[1]


def test_tensor_parallel_ranks_share_every_matrix_and_add_their_sums_up():
    ranks, tensor = (costs(cluster=H20S, layout=Layout(ranks=8, tensor=tensor)) for tensor in (False, True))
    work = PassWork(rows=64, kv_tokens=64 * 1000, all_rows=64)
    assert tensor.of_exactly(work).parts[parts.MATRICES] < ranks.of_exactly(work).parts[parts.MATRICES] / 6
    assert tensor.of_exactly(work).parts[EXCHANGE] > 0
    assert parts.SKEW not in tensor.of_exactly(work).parts


def test_streamed_weights_and_kv_take_the_host_link():
    engine = replace(BATCHGEN, overlap=certain(1.0))
    work = PassWork(rows=64, kv_tokens=64 * 1000, all_rows=64)
    weights = costs(MIXTRAL, A5000, engine, ALONE, Regime(streamed_weights=1.0))
    assert weights.of_exactly(work).seconds == pytest.approx(MIXTRAL.expert_bytes / weights.rates.link, rel=0.01)
    kv = costs(MIXTRAL, A5000, engine, ALONE, Regime(streamed_weights=1.0, kv=STREAMED)).of_exactly(work)
    more = work.kv_tokens * MIXTRAL.kv_token_bytes / weights.rates.link
    assert kv.seconds - weights.of_exactly(work).seconds == pytest.approx(more, rel=0.01)
    assert kv.parts[COPIES] > 0
    resident = costs(MIXTRAL, cluster_named("h200x1"), engine, ALONE, Regime(kv=INCLUSIVE))
    asked = resident.of_exactly(replace(work, streams=True)).parts[COPIES]
    assert asked > 100 * resident.of_exactly(work).parts.get(COPIES, 0.0)


def test_attention_on_the_host_takes_the_hosts_bandwidth():
    found = costs(MIXTRAL, A5000, replace(BATCHGEN, overlap=certain(0.0)), ALONE, Regime(kv=INCLUSIVE, attention=HOST))
    work = PassWork(rows=64, kv_tokens=64 * 1000, all_rows=64)
    host = work.kv_tokens * MIXTRAL.kv_token_bytes / found.rates.host_memory
    assert found.of_exactly(work).parts[parts.HOST_ATTENTION] == pytest.approx(host)
    assert parts.ATTENTION not in found.of_exactly(work).parts


def test_layer_by_layer_engines_bring_all_of_a_layer_for_few_rows_as_for_many():
    one = PassWork(rows=1, kv_tokens=100, all_rows=1)
    regime = Regime(streamed_weights=1.0)
    by_layer, by_expert = (
        costs(MIXTRAL, A5000, replace(engine, overlap=certain(1.0)), ALONE, regime).of_exactly(one).seconds
        for engine in (FLEXGEN, BATCHGEN)
    )
    link = costs(MIXTRAL, A5000, FLEXGEN, ALONE).rates.link
    assert by_layer >= MIXTRAL.expert_bytes / link
    assert by_expert == pytest.approx(MIXTRAL.expert_bytes / 4 / link, rel=0.02)


def test_copies_and_moves_take_the_bytes_of_kv():
    found = costs(engine=BATCHGEN)
    assert found.of_copy(1000).seconds == pytest.approx(1000 * DEEPSEEK.kv_token_bytes / found.rates.link)
    assert found.of_move(1000).seconds == pytest.approx(1000 * DEEPSEEK.kv_token_bytes / found.rates.network)
    in_node = costs(cluster=H20S, engine=BATCHGEN, layout=EIGHT)
    assert in_node.of_move(1000).seconds < found.of_move(1000).seconds


def test_restoring_a_long_sequence_takes_what_batchgen_counts():
    """About 0.2 ms a layer for 10,000 tokens of DeepSeek's KV over PCIe 5.0 (BatchGen, Table 2)."""
    alone = deployment("deepseek-r1", "h20x16", "batchgen", regime=Regime(kv=INCLUSIVE)).costs
    link = cluster_named("h20x1").link_bytes_per_s * BATCHGEN.copy_share.best
    assert 10_000 * DEEPSEEK.layers.kv_layer_bytes / link == pytest.approx(0.2e-3, rel=0.1)
    assert alone.of_copy(10_000).seconds / 61 == pytest.approx(0.2e-3, rel=0.25)


def test_a_pass_of_nothing_takes_no_time():
    assert costs().of_pass(PassWork()).seconds == 0
