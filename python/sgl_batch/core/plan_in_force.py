"""Owns the configuration in force and its plan, one object per scheduler process, from which all others read them.

It decides which changes a running engine accepts. The scheduler decides when they come into force.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_batch.config import BatchConfig, from_mapping
from sgl_batch.core.plan import Plan, make_plan
from sgl_batch.errors import ConfigError

# By section of BatchConfig, the options that an engine is built with (None: all); the others can change while it runs.
_BUILT_WITH: dict[str, tuple[str, ...] | None] = {
    "forward": (
        "expert_runner",
        "decode_forward",
        "start_choices",
        "decode_graph_memory",
        "cpu_weight_dtype",
        "cpu_activations",
        "on_yield",
    ),
    "schedule": ("order", "admission", "drafter"),
    "memory": None,
    "ranks": None,
    "trace": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """The properties of a device that a plan is fitted to; see `PlanInForce.fit`."""

    page_size: int
    max_running: int
    can_reenter: bool
    whole_groups: bool
    dense: bool


class PlanInForce:
    """The configuration, and its plan once `fit` has been called.

    A change takes two calls: `prepare` checks it, on top of the changes prepared before; `apply` puts it in force,
    between two steps.
    """

    def __init__(self, config: BatchConfig) -> None:
        self._config = self._prepared = config
        self._device: _Device | None = None
        self._plan: Plan | None = None
        self._reserved: Plan | None = None

    @property
    def config(self) -> BatchConfig:
        """The configuration in force."""
        return self._config

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        assert self._plan is not None, "the plan is made when the device is known"
        return self._plan

    def fit(
        self,
        *,
        page_size: int,
        max_running: int,
        can_reenter: bool,
        whole_groups: bool = False,
        dense: bool = False,
    ) -> Plan:
        """Fit the plan to the device, and return it. Called again when more is known of the device.

        Args:
            page_size: tokens of a KV page.
            max_running: the most sequences that can run.
            can_reenter: whether attention can switch between several sub-batches; prompts share prefixes only then.
            whole_groups: as in make_plan.
            dense: as in make_plan.

        Raises:
            ConfigError: the configuration cannot work on this device.
        """
        self._device = _Device(
            page_size=page_size,
            max_running=max_running,
            can_reenter=can_reenter,
            whole_groups=whole_groups,
            dense=dense,
        )
        self._plan = self._made_of(self._config)
        return self._plan

    def device_facts(self) -> dict[str, Any]:
        """Return what `fit` was called with, as a record of a change holds it."""
        assert self._device is not None, "the plan is made when the device is known"
        return dataclasses.asdict(self._device)

    def reserve(self) -> None:
        """Allow no larger groups than the present plan's from now on: the device has working memory for these."""
        self._reserved = self.plan

    @property
    def most_prompt_tokens(self) -> int | None:
        """The longest prompt that working memory was reserved for; None if none was. Changes of the plan keep it."""
        return None if self._reserved is None else self._reserved.prefill.b_moe

    def prepare(self, changes: Mapping[str, Any]) -> BatchConfig:
        """Return the configuration with these changes, by flag names, for `apply` to put in force.

        Raises ConfigError for a change that a running engine cannot accept; nothing has changed then.
        """
        wanted = from_mapping({**self._prepared.flat(), **changes})
        self._check_built_with(wanted)
        plan = self._made_of(wanted)
        if self._reserved is not None:
            _check_reserved(wanted, plan, self._reserved)
        self._prepared = wanted
        return wanted

    def apply(self, config: BatchConfig) -> None:
        """Put a configuration that `prepare` has returned in force, with its plan. Must run between two steps."""
        self._config, self._plan = config, self._made_of(config)

    def _made_of(self, config: BatchConfig) -> Plan:
        device = self._device
        assert device is not None, "the plan is made when the device is known"
        plan = make_plan(
            config,
            page_size=device.page_size,
            max_running=device.max_running,
            whole_groups=device.whole_groups,
            dense=device.dense,
        )
        _check_mixing(plan, device)
        return dataclasses.replace(plan, share_prefixes=plan.share_prefixes and device.can_reenter)

    def _check_built_with(self, wanted: BatchConfig) -> None:
        for section, names in _BUILT_WITH.items():
            now, then = getattr(self._config, section), getattr(wanted, section)
            for name in names if names is not None else [field.name for field in dataclasses.fields(now)]:
                if getattr(now, name) != getattr(then, name):
                    raise ConfigError(
                        f"{name} is {getattr(now, name)!r} and cannot become {getattr(then, name)!r} while the engine "
                        f"runs: restart it with --{name.replace('_', '-')}"
                    )


def _check_mixing(plan: Plan, device: _Device) -> None:
    """Raise ConfigError if decode steps cannot compute prompt tokens as the plan asks."""
    tokens = plan.mix_prefill
    if 0 < tokens < plan.page_size:
        raise ConfigError(
            f"mix_prefill is {tokens}, less than a page ({plan.page_size} tokens), and prompts are cut at pages: give "
            f"at least {plan.page_size}, or 0"
        )
    if tokens and not device.can_reenter:
        raise ConfigError(
            f"mix_prefill is {tokens}, and the attention backend cannot hold the plans of decode rows and prompts at "
            "once: choose another one (--attention-backend), or leave out mix_prefill"
        )


def _check_reserved(wanted: BatchConfig, plan: Plan, reserved: Plan) -> None:
    """Raise ConfigError for groups larger than working memory was reserved for."""
    asked, limits = wanted.flat(), _sizes(reserved)
    for name, size in _sizes(plan).items():
        if size > limits[name]:
            raise ConfigError(
                f"{name} is {asked[name]}, and the device's budget has working memory for {limits[name]}, "
                f"reserved when the engine started: give at most {limits[name]}, or restart the engine with a larger "
                f"--{name.replace('_', '-')} (and --device-memory)"
            )


def _sizes(plan: Plan) -> dict[str, int]:
    """Return the sizes that working memory depends on, by the names of their flags."""
    return {
        "b_moe_prefill": plan.prefill.b_moe,
        "b_attn_prefill": plan.prefill.b_attn,
        "b_moe_decode": plan.decode.b_moe,
        "b_attn_decode": plan.decode.b_attn,
        "mix_prefill": plan.mix_prefill,
    }
