"""Peak resident memory of this process, on Linux without the time before the last reset."""

from __future__ import annotations

import resource
from pathlib import Path

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak() -> None:
    """Forget the peak so far: making random weights needs more memory than holding them."""
    if _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5")


def peak_bytes() -> int:
    """Since the last reset; since the start of the process where there is no /proc."""
    if _STATUS.exists():
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
