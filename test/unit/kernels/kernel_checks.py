"""Owns the checks that kernels' cases share: the error against float64, and bits that do not depend on threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
DTYPES = (torch.float32, torch.bfloat16)
Check = tuple[str, bool]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    if expected.numel() == 0:
        return 0.0 if found.shape == expected.shape else float("inf")
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def same_on_any_threads(compute: Callable[[], torch.Tensor]) -> bool:
    """Return whether one thread, three and this machine's number give the same bits, also when repeated."""
    number = torch.get_num_threads()
    results = []
    for threads in (1, 3, number, number):
        torch.set_num_threads(threads)
        results.append(compute())
    return all(torch.equal(result, results[0]) for result in results)


def refusals(name: str, calls: Iterable[tuple[str, Callable[[], object]]]) -> Iterator[Check]:
    """Check that each call is refused with its message in the error."""
    for message, call in calls:
        try:
            call()
        except RuntimeError as error:
            yield f"{name}: {message}", message in str(error)
        else:
            yield f"{name}: {message}: nothing was refused", False
