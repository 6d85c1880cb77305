"""Owns what the rooms between ranks may import: the protocol is pure, and each room imports only its own."""

from __future__ import annotations

import ast

import pytest

# Modules that decide: the same messages lead to the same states in every process and in tests.
PURE = ("sgl_batch.migration.protocol", "sgl_batch.migration.messages", "sgl_batch.migration.header")
PURE_IMPORTS = {"__future__", "collections.abc", "enum", "msgspec", "typing"}
# Room -> the rooms of ours that it may import.
ROOMS = {
    "distributed": {"distributed", "memory", "sglang_adapter", "core", "config", "errors"},
    "migration": {"migration", "distributed", "mem_cache", "core", "config", "errors"},
}


def imported(tree: ast.Module) -> set[str]:
    """Return the modules that the tree imports."""
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return names | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}


def impure(tree: ast.Module) -> set[str]:
    """Return the imports of a pure module that are neither pure nor another pure module."""
    return imported(tree) - PURE_IMPORTS - set(PURE)


def foreign_rooms(room: str, tree: ast.Module) -> set[str]:
    """Return the rooms that a module of `room` imports although it may not."""
    ours = {name.split(".")[1] for name in imported(tree) if name.startswith("sgl_batch.")}
    return ours - ROOMS[room]


@pytest.mark.parametrize("module", PURE)
def test_the_protocol_knows_no_wire_no_tensor_and_no_clock(package_trees, module):
    assert impure(package_trees[module]) == set()


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_between_ranks_import_only_their_own(package_trees, room):
    trees = {name: tree for name, tree in package_trees.items() if name.startswith(f"sgl_batch.{room}.")}
    assert trees
    assert {name: found for name, tree in trees.items() if (found := foreign_rooms(room, tree))} == {}


def test_the_checks_see_a_violation():
    assert impure(ast.parse("import time\nfrom sgl_batch.distributed import channel")) == {
        "time",
        "sgl_batch.distributed",
    }
    assert foreign_rooms("migration", ast.parse("from sgl_batch.layers.moe import x")) == {"layers"}
    assert foreign_rooms("distributed", ast.parse("import sgl_batch.mem_cache.y")) == {"mem_cache"}


# Modules that may read `RankContext.rank`, the global rank: for control channels, process groups of all ranks, files
# and messages. Code that computes asks for the attention rank or the expert shard: a rank may have one of them alone.
READS_GLOBAL_RANK = {
    "sgl_batch.distributed.rank_context",
    "sgl_batch.kv_offload.kv_tiers",
    "sgl_batch.managers.rank_all_gather",
    "sgl_batch.managers.rank_heartbeat",
    "sgl_batch.managers.rank_migration",
    "sgl_batch.managers.rank_partition",
    "sgl_batch.model_executor.run_context",
    "sgl_batch.managers.scheduler",
    "sgl_batch.managers.tp_worker",
}


def reads_of_global_rank(tree: ast.Module) -> list[str]:
    """Return the expressions that take a `RankContext`'s rank; every variable of this type is called `rank_context`."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "rank"
        and ast.unparse(node.value).rpartition(".")[2].lstrip("_") == "rank_context"
    ]


def test_only_the_control_plane_reads_a_global_rank(package_trees):
    readers = {name for name, tree in package_trees.items() if reads_of_global_rank(tree)}
    assert readers <= READS_GLOBAL_RANK


def test_the_check_of_global_ranks_sees_a_violation():
    found = reads_of_global_rank(
        ast.parse("expert_shard(rank_context.rank)\nself._rank_context.rank\ncontext.rank_context.rank")
    )
    assert set(found) == {"rank_context.rank", "self._rank_context.rank", "context.rank_context.rank"}
    others = "rank_context.expert_shard\nrank_context.topology\nchannel.rank\nreplaced.rank"
    assert reads_of_global_rank(ast.parse(others)) == []
