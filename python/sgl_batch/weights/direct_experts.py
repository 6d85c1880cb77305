"""Owns reading quantised experts that stay in memory from their files into the kernels' form, without floats between.

Threads read and pack them while other weights are loaded. Taken to floats they would be widened, copied, and searched
for the form and the scales that their files have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from sgl_batch.checkpoint.expert_layout import is_expert_weight
from sgl_batch.checkpoint.quantised import plain_name
from sgl_batch.core.quantised_form import QuantisedForm
from sgl_batch.errors import ConfigError, EngineError
from sgl_batch.layers.small_weights import GroupedForm
from sgl_batch.memory.huge_pages import prefer_huge_pages
from sgl_batch.sglang_adapter.checkpoint_loading import WeightReform, WeightWatch, loading_bar
from sgl_batch.sglang_adapter.layers import expert_layers
from sgl_batch.sglang_adapter.types.models import ExpertLayer
from sgl_batch.weights.expert_slots import ExpertSlots
from sgl_batch.weights.model_experts import ModelExperts, grouped_form, slot_tensors
from sgl_batch.weights.page_cache import files_to_read_past_it

logger = logging.getLogger(__name__)

Adopt = Callable[[ExpertLayer, GroupedForm, tuple[Tensor, Tensor]], None]
"""Takes a layer, and its experts' packed weights [E, 2I, any] and [E, M, any] in this form."""


def is_of_experts(name: str) -> bool:
    """Return whether a tensor of a checkpoint belongs to matrices of routed experts, which may be quantised."""
    return is_expert_weight(plain_name(name))


class DirectExperts:
    """A `WeightWatch` around another one, which reads the experts of the model that it sees loaded.

    The model is made inside `unloaded_experts`. Where the threads do not take the form of its experts, or find numbers
    that do not have it, the parameters get memory and are loaded as all others are.

    Args:
        watch: the other one.
        form: how the checkpoint is quantised.
        shard: which of the equal parts of each layer's experts is this rank's.
        num_threads: how many threads read and pack.
        may_read: whether a model only copies weights while they are loaded.
        adopt: takes each layer's experts when everything is loaded.
    """

    def __init__(
        self,
        watch: WeightWatch,
        form: QuantisedForm,
        *,
        shard: int,
        num_threads: int,
        may_read: Callable[[nn.Module], bool],
        adopt: Adopt,
    ) -> None:
        self._watch, self._form, self._shard, self._num_threads = watch, form, shard, num_threads
        self._may_read, self._adopt = may_read, adopt
        self._layers: list[ExpertLayer] = []
        self._slots: ExpertSlots | None = None
        self._packed_form: GroupedForm | None = None

    def load(
        self,
        model: nn.Module,
        weights: Iterable[tuple[str, Tensor]],
        load_weights: Callable[[Iterable[tuple[str, Tensor]]], object],
    ) -> None:
        """Load `weights`, which `reading` gives; the experts that it leaves out are the model's when this returns."""
        self._model = model
        self._watch.load(model, weights, load_weights)
        slots, self._slots = self._slots, None  # whose files are closed when this returns
        if slots is None:
            return
        assert self._packed_form is not None, "slots have a form"
        slots.close()
        tensors, experts = slots.tensors, len(self._layers[0].w2_weight)
        for index, layer in enumerate(self._layers):
            own = slice(index * experts, (index + 1) * experts)
            self._adopt(layer, self._packed_form, (tensors.w13[own], tensors.w2[own]))

    def leaves(self, name: str) -> bool:
        """Return whether the tensor of this name is read here."""
        return self._slots is not None and is_of_experts(name)

    def reading(self, reform: WeightReform) -> WeightReform:
        """Return what begins to read experts when it is asked for the first tensor, and has `reform` take all others.

        The experts that cannot be read here come last.
        """

        def read(files: Sequence[str], weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            self._begin(files)
            yield from reform(files, ((name, one) for name, one in weights if not self.leaves(name)))
            if self._slots is not None and not self._all_read(self._slots):
                self._give_memory()
                yield from reform(files, _mapped_experts(files))

        return read

    def _begin(self, files: Sequence[str]) -> None:
        """Begin to read the experts in `files`, or give their parameters memory."""
        self._layers = expert_layers(self._model)
        # Asked before scales are read, which brings parts of the files to the page cache.
        past_cache = files_to_read_past_it([Path(file) for file in files])
        known = self._known_experts(files) if self._may_read(self._model) else None
        if known is None:
            self._give_memory()
            return
        found, self._packed_form = known
        layers, experts = found.shape
        self._slots = ExpertSlots(
            found.locations,
            slot_tensors(found.locations, layers * experts, int8=False),
            num_threads=self._num_threads,
            direct=2 * len(past_cache) > len(files),
            keeps_cached=True,
        )
        self._expert_bytes = found.locations.expert_bytes
        for layer in range(layers):
            self._slots.ask(layer, range(experts), urgent=False)

    def _known_experts(self, files: Sequence[str]) -> tuple[ModelExperts, GroupedForm] | None:
        """Return the experts and their form in memory; None if the threads do not take them."""
        try:
            found = ModelExperts.of(self._model, files, self._shard, self._form)
            form = grouped_form(found.locations)
        except ConfigError as error:
            logger.debug("experts are loaded as other weights are: %s", error)
            return None
        return None if form is None else (found, form)

    def _all_read(self, slots: ExpertSlots) -> bool:
        """Wait for the threads, and return whether all experts are there."""
        layers, experts = slots.table.slot_of.shape
        try:
            with loading_bar("Loading experts", layers * experts * self._expert_bytes) as bar:
                for layer in range(layers):
                    slots.wait(layer, range(experts))
                    bar.update(experts * self._expert_bytes)
        except EngineError as error:
            logger.info("experts are loaded again, as other weights are: %s", error)
            return False
        return True

    def _give_memory(self) -> None:
        """Give parameters of experts memory, to which they are loaded as others are."""
        if self._slots is not None:
            self._slots.close()
            self._slots = None
        for layer in self._layers:
            for weight in (layer.w13_weight, layer.w2_weight):
                weight.data = torch.empty(weight.shape, dtype=weight.dtype)
                prefer_huge_pages(weight.data)


def _mapped_experts(files: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of experts in files, which are read as they are used."""
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in filter(is_of_experts, opened.keys()):
                yield name, opened.get_tensor(name)
