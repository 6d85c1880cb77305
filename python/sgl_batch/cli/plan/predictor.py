"""Owns what predictions are made with: the costs of each layout, its memory, and what the search may choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sgl_batch.cli.plan.subject import Subject
from sgl_batch.config import BatchConfig
from sgl_batch.core.supported_models import CPU, GPU
from sgl_batch.errors import ConfigError
from sgl_batch.memory.free_memory import free_bytes
from sgl_batch.planner.candidate import DEVICE, RESIDENT, Candidate
from sgl_batch.planner.candidate_memory import CandidateMemory, remembered
from sgl_batch.planner.candidates import Allowed, kv_forms
from sgl_batch.planner.cost_model import CostModel, fit
from sgl_batch.planner.data_sheets import HERE, DataSheet, sheet_of_gpu
from sgl_batch.planner.feeding import feeding_s
from sgl_batch.planner.layer_bars import PassPicture, pass_picture
from sgl_batch.planner.layouts import ONE_GPU, Layout, kv_parts, layouts, rank_layers, share_of
from sgl_batch.planner.needs import Target
from sgl_batch.planner.pass_cost import PassCost
from sgl_batch.planner.samples import Profile
from sgl_batch.planner.search import Outcome, Planned, predict_candidate, search, search_layouts
from sgl_batch.planner.sheet_costs import Assumptions, sheet_costs
from sgl_batch.planner.workload import first_group
from sgl_batch.startup.hardware import hardware
from sgl_batch.startup.plan_inputs import PAGE_SIZE, usual_budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """Predicts plans for a subject.

    Attributes:
        subject: The model and the batch.
        device: "cpu" or "gpu".
        budget: Bytes of one device.
        config: All settings that no candidate changes.
        among: The layouts that are compared.
        costs_of: The costs of one rank of a layout; None where nothing can be predicted.
        cores: Which copies take from computation; 0 on a GPU.
        most: Bytes that a process may take with the experts that it streams; 0 for no more than `budget`.
    """

    subject: Subject
    device: str
    budget: int
    config: BatchConfig
    among: list[Layout]
    costs_of: Callable[[Layout], CostModel]
    cores: int
    most: int = 0

    @property
    def page_size(self) -> int:
        """Return the tokens of a page of KV."""
        return PAGE_SIZE

    def default(self, kv: str = DEVICE) -> Candidate:
        """Return the engine's own limits: what holds where nothing was measured."""
        forward = self.config.forward
        return Candidate(
            b_attn_prefill=forward.b_attn_prefill,
            b_moe_prefill=forward.b_moe_prefill,
            b_attn_decode=min(forward.b_attn_decode or forward.b_moe_decode, forward.b_moe_decode),
            b_moe_decode=forward.b_moe_decode,
            kv=kv,
            weights=self.config.memory.weights,
        )

    def search(self) -> Outcome:
        """Return the best plan of all layouts."""
        return search_layouts(self.among, self._search_one)

    def seconds(self, planned: Planned, count: int) -> float:
        """Return the seconds of so many requests of the batch's mix with a plan that was found."""
        layout = planned.layout
        found = predict_candidate(
            planned.candidate,
            share_of(self.subject.workload, layout, count),
            self.costs_of(layout),
            rank_layers(self.subject.layers, layout),
            self._allowed,
            planned.memory,
        )
        assert found is not None, "what fits all fits some"
        return found.seconds + feeding_s(count, layout.instances)

    def pictured(self, planned: Planned) -> list[PassPicture]:
        """Return layers of a mean decode step and of the first prefill group of a plan, of its most frequent kind."""
        layers, work = rank_layers(self.subject.layers, planned.layout), share_of(self.subject.workload, planned.layout)
        passes = PassCost(self.costs_of(planned.layout), layers, planned.candidate, cores=self.cores)
        kind = max(layers.layers, key=layers.layers.__getitem__)
        group = first_group((request.prompt for request in work.requests), planned.candidate.b_moe_prefill)
        shown = [
            pass_picture(
                f"Prefill group: {sum(group):,} tokens of {len(group):,} prompt{'s' * (len(group) > 1)}, {kind} layers",
                passes.prefill_layer(group, kind, planned.prediction.kept),
            )
        ]
        rows = max(round(planned.prediction.mean_rows), 1)
        if planned.prediction.steps:
            # Rows of a step weigh by how long they run: half of an output stands behind its row on average.
            outputs = sum(one.output for one in work.requests)
            context = sum(one.output * (one.prompt + one.output / 2) for one in work.requests) / outputs
            title = f"Decode step: {rows:,} sequences of {context:,.0f} tokens on average, {kind} layers"
            shown.insert(0, pass_picture(title, passes.decode_layer(rows, context, kind, planned.prediction.kept)))
        return shown

    def memory(self, layout: Layout) -> CandidateMemory:
        """Return what counts the memory of candidates on one rank of a layout."""
        target = Target(
            device=self.device,
            budget=self.budget,
            page_size=PAGE_SIZE,
            length=self.subject.workload.longest,
            ranks=layout.ranks,
            tensor=layout.tensor,
            kv_parts=kv_parts(self.subject.layers, layout),
            most=self.most,
        )
        return CandidateMemory(model=self.subject.model, target=target, base=self.config)

    def host_memory(self) -> dict[str, int]:
        """Return the bytes that an instance on GPUs takes of its machine's memory, by use."""
        memory = self.config.memory
        experts = self.subject.model.weight_bytes().streamable if memory.weights == "streamed" else 0
        uses = {"streamed experts": experts, "host KV store": memory.kv_store_bytes}
        return {name: size for name, size in uses.items() if size and self.device == GPU}

    def _search_one(self, layout: Layout) -> Outcome:
        return search(
            share_of(self.subject.workload, layout),
            self.costs_of(layout),
            rank_layers(self.subject.layers, layout),
            self._allowed,
            remembered(self.memory(layout)),
        )

    @property
    def _allowed(self) -> Allowed:
        asked = self.config.memory
        return Allowed(
            kv=kv_forms(store_bytes=asked.kv_store_bytes, mode=asked.kv_store_mode),
            weights=("streamed",) if asked.weights == "streamed" else (RESIDENT,),
            page_size=PAGE_SIZE,
            cores=self.cores,
            base=self.config,
            intervals=self.cores > 0,
        )


def predictor_here(subject: Subject, config: BatchConfig, profile: Profile | None, instances: int = 1) -> Predictor:
    """Return what predicts for so many engines like that of the profile; without one it counts memory alone."""
    device = CPU if hardware()["gpu"] is None else GPU
    if profile is not None and config.memory.weights == "streamed" and "disk" not in profile.rates:
        raise ConfigError(
            "the profile has no rate of reading the checkpoint, which streamed weights need: measure it with --profile "
            "--weights streamed"
        )
    costs = None if profile is None else fit(profile, subject.layers)

    def costs_of(_: Layout) -> CostModel:
        assert costs is not None, "without a profile nothing is predicted"
        return costs

    return Predictor(
        subject=subject,
        device=device,
        budget=_budget_here(config, device),
        config=config,
        among=[replace(ONE_GPU, instances=instances)],
        costs_of=costs_of,
        cores=0 if profile is None else int(profile.machine["cores"]),
        most=0 if config.memory.device_memory else free_bytes(),
    )


def predictor_on(sheet: DataSheet, gpus: int, subject: Subject, config: BatchConfig, assumed: Assumptions) -> Predictor:
    """Return what predicts for so many GPUs of a data sheet. Raises ConfigError for what the sheet does not have."""
    known: dict[Layout, CostModel] = {}

    def costs_of(layout: Layout) -> CostModel:
        if layout not in known:
            known[layout] = sheet_costs(sheet, rank_layers(subject.layers, layout), layout, assumed)
        return known[layout]

    return Predictor(
        subject=subject,
        device=GPU,
        budget=config.memory.device_memory or int(sheet.memory_bytes),
        config=config,
        among=layouts(gpus, subject.layers),
        costs_of=costs_of,
        cores=0,
    )


def _budget_here(config: BatchConfig, device: str) -> int:
    if config.memory.device_memory:
        return config.memory.device_memory
    if device == GPU:
        sheet = sheet_of_gpu(str(hardware()["gpu"]))
        predicted = f", or predict from its data sheet with --hardware {sheet.name}" if sheet else ""
        raise ConfigError(
            "--device-memory is not given, and the memory of a GPU is not read here: name it, as in 80G" + predicted
        )
    return usual_budget()


def is_here(name: str) -> bool:
    """Return whether `--hardware` names this machine."""
    return name.lower() == HERE
