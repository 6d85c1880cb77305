"""Owns the work of a batch in three numbers, and the seconds that a plan predicts for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The work of a batch: the tokens of all its prompts, those of all its outputs, and those of its longest output."""

    prompt_tokens: float = 0
    output_tokens: float = 0
    longest_output: int = 0

    def __add__(self, other: Load) -> Load:
        """Return the work of two batches that run together."""
        return Load(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            longest_output=max(self.longest_output, other.longest_output),
        )

    def share(self, part: float) -> Load:
        """Return the work of a part (0 to 1) of the batch; of none, no work."""
        if not part:
            return Load()
        return Load(
            prompt_tokens=part * self.prompt_tokens,
            output_tokens=part * self.output_tokens,
            longest_output=self.longest_output,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRates:
    """What a plan predicts: the rates of both phases with groups of its sizes, and a step of one sequence alone."""

    prompt_tokens_per_s: float
    output_tokens_per_s: float
    step_s: float

    def seconds(self, load: Load) -> float:
        """Return the predicted seconds of a load. No decode is shorter than the steps of its longest output."""
        decode_s = max(load.output_tokens / self.output_tokens_per_s, load.longest_output * self.step_s)
        return load.prompt_tokens / self.prompt_tokens_per_s + decode_s
