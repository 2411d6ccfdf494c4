"""A small process between the pipeline and a long-running command: the command never outlives it.

    python supervisor.py GRACE_SECONDS COMMAND [ARGUMENT ...]

Standard input is the lifeline: the pipeline holds the other end and the kernel closes it however the
pipeline dies, `kill -9` included. On end of file, SIGTERM or SIGINT the command's process group gets
SIGTERM, and after the grace period everything that descends from the command gets SIGKILL. A number written
to the lifeline asks for the same with another grace period. The exit status is the command's (128 + n for
signal n).

Imports the standard library's light modules only: it is started for every command.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIFELINE = 0
POLL_SECONDS = 0.05


class Supervisor:
    """Runs one command in a session of its own and leaves none of its descendants behind."""

    def __init__(self, command: list[str], grace_seconds: float) -> None:
        self.command = command
        self.grace_seconds = grace_seconds
        self.returncode: int | None = None
        self.stop_requested = False
        self.pid = 0

    def run(self) -> int:
        """Start the command, wait for its end or for a reason to stop it, and return its exit status."""
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        wakeup = _wake_on_signals(self._request_stop)
        try:
            self.pid = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_die_with_supervisor,
            ).pid
        except OSError as error:
            print(f"cannot start {self.command[0]}: {error.strerror}", file=sys.stderr)
            return 127
        parent = os.getppid()
        while not self.stop_requested and not self._command_ended():
            # The timeout covers a forked sibling of ours that keeps the lifeline open after the pipeline
            # died.
            readable, _, _ = select.select([LIFELINE, wakeup], [], [], 1.0)
            if wakeup in readable:
                os.read(wakeup, 4096)
            if LIFELINE in readable:
                self._read_lifeline()
            if os.getppid() != parent:
                self.stop_requested = True
        self._end_group()
        return 0 if self.returncode is None else self.returncode

    def _request_stop(self, signum: int, frame: FrameType | None) -> None:
        self.stop_requested = True

    def _read_lifeline(self) -> None:
        message = os.read(LIFELINE, 64)
        self.stop_requested = True
        if message:
            self.grace_seconds = float(message)

    def _command_ended(self) -> bool:
        """Reap whatever ended, adopted descendants included; True once the command itself has."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return self.returncode is not None
            if pid == self.pid:
                code = os.waitstatus_to_exitcode(status)
                self.returncode = code if code >= 0 else 128 - code

    def _end_group(self) -> None:
        """TERM to the group and to descendants orphaned outside it; KILL to what is left after the grace."""
        deadline = time.monotonic() + self.grace_seconds
        self._signal_group(signal.SIGTERM)
        told = {self.pid}
        while time.monotonic() < deadline and self._living():
            for orphan in set(_children()) - told:
                told.add(orphan)
                _kill(os.kill, orphan, signal.SIGTERM)
            time.sleep(POLL_SECONDS)
        while self._living():
            self._signal_group(signal.SIGKILL)
            for child in _children():
                _kill(os.kill, child, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        self._command_ended()

    def _living(self) -> bool:
        self._command_ended()
        return _kill(os.killpg, self.pid, 0) or bool(_children())

    def _signal_group(self, signum: int) -> bool:
        return _kill(os.killpg, self.pid, signum)


def _kill(send: Callable[[int, int], None], target: int, signum: int) -> bool:
    try:
        send(target, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _children() -> list[int]:
    """Processes whose parent is this one; orphaned descendants become so (Linux only, else none)."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listing:
            return [int(pid) for pid in listing.read().split()]
    except OSError:
        return []


def _wake_on_signals(on_stop: Callable[[int, FrameType | None], None]) -> int:
    """Install handlers whose arrival makes the returned descriptor readable."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, on_stop)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    return reader


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_supervisor() -> None:
    """In the command, before it starts: have it told to end should the supervisor be killed."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(Supervisor(sys.argv[2:], float(sys.argv[1])).run())
