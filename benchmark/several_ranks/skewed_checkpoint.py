"""Owns a variant of a checkpoint whose routers favour a few experts; all other tensors are links to the original.

Half of the hot experts get router rows of their own, drawn out; each of the others the opposite row of one of these. So
one of each pair scores above the rest for nearly every token, and routing itself stays what it is.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sgl_batch.errors import ConfigError

ROUTERS = (".mlp.gate.weight", ".block_sparse_moe.gate.weight")
# SGLang reads files in the order of their names, and the last value of a tensor counts.
FILE = "skewed-routers.safetensors"
_INDEX = "model.safetensors.index.json"
_DRAWN_OUT = 16.0


def make_skewed(model: Path, directory: Path, *, num_hot: int) -> None:
    """Write the variant of `model` into the empty `directory`; its first `num_hot` experts are hot. Raises ConfigError.

    Where ranks share out experts, those are rank 0's.
    """
    shards = sorted(model.glob("*.safetensors"))
    late = [shard.name for shard in shards if shard.name >= FILE]
    if late:
        raise ConfigError(f"--model {model} has {late[0]}, which would be read after {FILE}: rename it")
    routers: dict[str, torch.Tensor] = {}
    for shard in shards:
        with safe_open(shard, "pt") as tensors:
            names = [name for name in tensors.keys() if name.endswith(ROUTERS)]  # noqa: SIM118
            routers.update({name: skewed(tensors.get_tensor(name), num_hot) for name in names})
    if not routers:
        raise ConfigError(f"--model {model} holds no router ({' or '.join(ROUTERS)}) in safetensors files")
    for file in model.iterdir():
        if file.name != _INDEX:
            (directory / file.name).symlink_to(file.resolve())
    save_file(routers, directory / FILE, metadata={"format": "pt"})
    if (model / _INDEX).is_file():
        index = json.loads((model / _INDEX).read_text(encoding="utf-8"))
        index["weight_map"].update(dict.fromkeys(routers, FILE))
        (directory / _INDEX).write_text(json.dumps(index), encoding="utf-8")


def skewed(router_EH: torch.Tensor, num_hot: int) -> torch.Tensor:
    """Make a router whose `num_hot` rows (an even number) are pairs: one of each pair scores high for every token."""
    if num_hot % 2 or not 2 <= num_hot <= len(router_EH):
        raise ConfigError(f"{num_hot} hot experts of {len(router_EH)}: they come in pairs")
    out_EH = router_EH.clone()
    drawn_out = out_EH[: num_hot // 2] * _DRAWN_OUT
    out_EH[:num_hot] = torch.cat((drawn_out, -drawn_out))
    return out_EH
