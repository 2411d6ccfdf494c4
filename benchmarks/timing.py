"""Wall time of work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def seconds_of(work: Callable[[], object], device: torch.device, *, times: int, warm_up: int = 1) -> list[float]:
    """Seconds of each of `times` calls after `warm_up` others; a GPU is waited for."""
    found = []
    for _ in range(warm_up + times):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - started)
    return found[warm_up:]
