"""Owns the optimizers: orthogonalised momentum for hidden matrices, AdamW for the rest; not the schedule."""

import torch
from torch import Tensor, nn


class OrthogonalMomentum(torch.optim.Optimizer):
    """Momentum whose step is approximately orthogonalised (Muon, Jordan et al. 2024).

    Takes matrices [rows, columns] and stacks of matrices [experts, rows, columns]. It needs fewer steps than
    AdamW on models this small.
    """

    def __init__(self, parameters: list[nn.Parameter], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Apply one update from the current gradients."""
        assert closure is None, "a closure is not supported"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1.0 - group["momentum"])
                direction = parameter.grad.lerp(average, group["momentum"])
                num_rows, num_columns = parameter.shape[-2:]
                scale = max(1.0, num_rows / num_columns) ** 0.5
                parameter.mul_(1.0 - group["lr"] * 0.05)
                parameter.sub_(_orthogonal(direction), alpha=group["lr"] * scale)


def _orthogonal(matrices: Tensor, num_rounds: int = 5) -> Tensor:
    """Run five Newton-Schulz rounds with the coefficients of Jordan's article; singular values end near 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def make_optimizers(model: nn.Module, matrix_rate: float, other_rate: float) -> list[torch.optim.Optimizer]:
    """Return OrthogonalMomentum for attention, expert and dense matrices, and AdamW for all other parameters."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_hidden = ".experts." in name or ".self_attn." in name or name.endswith("_proj.weight")
        is_hidden_matrix = is_hidden and parameter.ndim > 1
        (matrices if is_hidden_matrix else others).append(parameter)
    return [
        OrthogonalMomentum(matrices, lr=matrix_rate),
        torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]
