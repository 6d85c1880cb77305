"""Owns the training loop and its batches."""

import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from .experts import use_sorted_experts
from .optimizer import make_optimizers
from .routing import RouterProbe

# Row lengths in turns: mostly short ones, which are fast, and some longer than any prompt of the tests.
ROW_LENGTHS = (256, 256, 512, 256, 512, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The training schedule.

    num_steps: optimizer steps. limit_s: wall seconds after which the schedule ends early.
    batch_tokens: tokens per step. matrix_rate, other_rate: peak learning rates of the two optimizers.
    balance_coefficient: weight of the load-balancing loss over experts. bias_step: what a step adds to or takes off
    each bias of a router, where it has any.
    """

    num_steps: int
    limit_s: float
    batch_tokens: int = 2048
    matrix_rate: float = 0.02
    other_rate: float = 6e-3
    warmup_steps: int = 30
    balance_coefficient: float = 0.01
    bias_step: float = 0.001
    seed: int = 0


class BatchSource:
    """Yield batches over the samples without end; every epoch has a new order, every step one row length."""

    def __init__(self, samples: list[list[int]], *, batch_tokens: int, seed: int) -> None:
        self._samples = samples
        self._batch_tokens = batch_tokens
        self._rng = random.Random(seed)
        self._order: list[list[int]] = []

    def next_batch(self, step: int) -> Tensor:
        """Return token ids [rows, length] with rows * length = batch_tokens."""
        length = ROW_LENGTHS[step % len(ROW_LENGTHS)]
        rows = [self._next_row(length) for _ in range(self._batch_tokens // length)]
        return torch.tensor(rows)

    def _next_row(self, length: int) -> list[int]:
        row: list[int] = []
        while len(row) < length:
            if not self._order:
                self._order = self._rng.sample(self._samples, len(self._samples))
            row += self._order.pop()
        return row[:length]


def token_loss(logits_BLV: Tensor, ids_BL: Tensor) -> Tensor:
    """Return the mean next-token loss in nats of `ids_BL` [rows, length] under the logits of the same positions."""
    return functional.cross_entropy(logits_BLV[:, :-1].flatten(0, 1), ids_BL[:, 1:].flatten())


def train(model: PreTrainedModel, samples: list[list[int]], plan: TrainingPlan) -> float:
    """Train `model` in place; return the mean loss of the last tenth of the steps."""
    torch.manual_seed(plan.seed)
    source = BatchSource(samples, batch_tokens=plan.batch_tokens, seed=plan.seed)
    probe = RouterProbe(model)
    use_sorted_experts(model)
    optimizers = make_optimizers(model, plan.matrix_rate, plan.other_rate)
    rated_groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    model.train()
    losses: list[float] = []
    started_s = time.monotonic()
    for step in range(plan.num_steps):
        elapsed_s = time.monotonic() - started_s
        progress = max(step / plan.num_steps, elapsed_s / plan.limit_s)
        if progress >= 1.0:
            break
        for group, peak_rate in rated_groups:
            group["lr"] = peak_rate * _rate_factor(step, progress, plan)
        ids_BL = source.next_batch(step)
        loss = token_loss(model(input_ids=ids_BL, use_cache=False).logits, ids_BL)
        balance = probe.balance_loss()
        (loss + plan.balance_coefficient * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        probe.step_biases(plan.bias_step)
        losses.append(loss.item())
        if step % 25 == 0 and step:
            _report(losses, balance.item(), elapsed_s, progress)
    model.eval()
    tail = losses[-max(1, len(losses) // 10) :]
    print(f"trained {len(losses)} steps in {time.monotonic() - started_s:.0f} s", flush=True)
    return sum(tail) / len(tail)


def _rate_factor(step: int, progress: float, plan: TrainingPlan) -> float:
    """Return the learning rate's factor: linear warm-up, constant, then linear to 2 % over the last 60 %."""
    return min(1.0, (step + 1) / plan.warmup_steps, 0.02 + 0.98 * (1.0 - progress) / 0.6)


def _report(losses: list[float], balance: float, elapsed_s: float, progress: float) -> None:
    recent = sum(losses[-25:]) / len(losses[-25:])
    left_s = elapsed_s / progress - elapsed_s
    print(
        f"step {len(losses) - 1:5d}  loss {recent:.3f}  balance {balance:.3f}  "
        f"{elapsed_s:5.0f} s gone  {left_s:5.0f} s left",
        flush=True,
    )
