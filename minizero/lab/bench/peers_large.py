"""As `peers`, with a model of 80 M parameters: it takes four times as long."""

from __future__ import annotations

from .peers import compare_steps, jobs
from .runner import Comparison


def compare(repeats: int) -> list[Comparison]:
    """Seconds beyond the model alone, memory and traffic, of each job."""
    return compare_steps(jobs("80M"), repeats)
