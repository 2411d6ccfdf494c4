"""Freed tensors go back to the system: seen from outside, in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from dspark_model import host_memory

# Freeing one mapped block of 30 MiB raises glibc's threshold past the blocks of 6 MiB that follow; every second of them
# is then freed, between neighbours that stay.
SCRIPT = """
import sys, torch
from pathlib import Path
from dspark_model.host_memory import return_freed_tensors

def resident():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024

if sys.argv[1] == "on":
    assert return_freed_tensors()
torch.ones(30 << 18)
blocks = [torch.ones(6 << 18) for _ in range(40)]
before = resident()
del blocks[::2]
print(before - resident())
"""


def freed_mib(choice: str) -> float:
    done = subprocess.run([sys.executable, "-c", SCRIPT, choice], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_tensors_between_kept_ones_go_back_to_the_system():
    assert freed_mib("off") < 20
    assert freed_mib("on") == pytest.approx(20 * 6, abs=8)


def test_elsewhere_nothing_is_done(monkeypatch):
    monkeypatch.setattr(host_memory.platform, "libc_ver", lambda: ("", ""))
    assert not host_memory.return_freed_tensors()
