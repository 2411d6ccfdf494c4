"""Child processes that never outlive the pipeline (see `tasks.supervisor`)."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

SUPERVISOR = Path(__file__).with_name("supervisor.py")
TAIL_LINES = 30
# Cancellation reaches a worker thread only between two waits.
POLL_SECONDS = 0.5
# What a supervisor may need beyond the grace period to reap what it killed.
REAP_SECONDS = 10.0


class ProcessFailed(RuntimeError):  # noqa: N818 - reads as what happened
    """A command ended with a status other than zero."""

    def __init__(self, command: Sequence[str], returncode: int, tail: Sequence[str]) -> None:
        self.command, self.returncode, self.tail = list(command), returncode, list(tail)
        lines = "\n".join(f"  {line}" for line in tail) or "  (no output)"
        super().__init__(
            f"{_brief(command)} ended with status {returncode} ({_meaning(returncode)}); its last lines:\n{lines}"
        )


class ProcessTimeout(RuntimeError):  # noqa: N818
    """A command took longer than it was given."""

    def __init__(self, command: Sequence[str], seconds: float, tail: Sequence[str]) -> None:
        self.command, self.seconds, self.tail = list(command), seconds, list(tail)
        lines = "\n".join(f"  {line}" for line in tail) or "  (no output)"
        super().__init__(f"{_brief(command)} was stopped after {seconds:g} s; its last lines:\n{lines}")


def run_logged(
    cmd: Sequence[str],
    *,
    log: Callable[[str], None],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_seconds: float | None = None,
    grace_seconds: float = 20.0,
) -> None:
    """Run a command to its end, handing each line of its output (stdout and stderr merged) to `log`.

    Whatever interrupts the wait, an exception from `log`, cancellation or Ctrl-C included, ends the command
    and all that it started: SIGTERM first, SIGKILL after `grace_seconds`.

    Raises:
        ProcessFailed: the command ended with a non-zero status.
        ProcessTimeout: it ran longer than `timeout_seconds`.
    """
    process = _start_supervised(cmd, subprocess.PIPE, cwd=cwd, env=env, grace_seconds=grace_seconds)
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    try:
        while (line := _next_line(lines, process, deadline)) is not None:
            if line:
                tail.append(line)
                log(line)
            elif deadline is not None and time.monotonic() >= deadline:
                raise ProcessTimeout(cmd, timeout_seconds or 0.0, tail)
        returncode = process.wait()
    finally:
        _stop_supervised(process, grace_seconds)
        process.stdout.close()
    if returncode != 0:
        raise ProcessFailed(cmd, returncode, tail)


class ManagedProcess:
    """A server-like command that runs beside the pipeline, its output going to a file."""

    def __init__(self, process: subprocess.Popen[str], grace_seconds: float) -> None:
        self._process = process
        self._grace_seconds = grace_seconds

    @classmethod
    def start(
        cls,
        cmd: Sequence[str],
        log_file: Path,
        env: Mapping[str, str] | None = None,
        *,
        cwd: Path | None = None,
        grace_seconds: float = 20.0,
    ) -> ManagedProcess:
        """Start a command; stdout and stderr are appended to `log_file`."""
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("a") as output:
            process = _start_supervised(cmd, output, cwd=cwd, env=env, grace_seconds=grace_seconds)
        return cls(process, grace_seconds)

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The command's exit status (128 + n for signal n), None while it runs."""
        return self._process.poll()

    def alive(self) -> bool:
        """Whether the command still runs."""
        return self.returncode is None

    def stop(self, grace_seconds: float | None = None) -> None:
        """End the command and all that it started; returns when they are gone. Harmless when it has ended."""
        _stop_supervised(self._process, self._grace_seconds if grace_seconds is None else grace_seconds)

    def __enter__(self) -> ManagedProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _start_supervised(
    cmd: Sequence[str],
    stdout: int | IO[str],
    *,
    cwd: Path | None,
    env: Mapping[str, str] | None,
    grace_seconds: float,
) -> subprocess.Popen[str]:
    # Isolated and without site-packages the supervisor starts in tens of milliseconds; the command keeps
    # `env` whole.
    supervised = [sys.executable, "-I", "-S", str(SUPERVISOR), str(grace_seconds), *map(str, cmd)]
    return subprocess.Popen(
        supervised,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=cwd,
        env=None if env is None else dict(env),
        # Ctrl-C in a terminal goes to the pipeline, which decides; the supervisor hears of it through the
        # lifeline.
        start_new_session=True,
    )


def _stop_supervised(process: subprocess.Popen[str], grace_seconds: float) -> None:
    assert process.stdin is not None
    # A supervisor that has ended already leaves a broken pipe.
    with contextlib.suppress(BrokenPipeError, ValueError):
        process.stdin.write(f"{grace_seconds}\n")
        process.stdin.flush()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(grace_seconds + REAP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _pump(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    # The reader may be closed under this thread when the command is stopped.
    with contextlib.suppress(ValueError, OSError):
        for line in stream:
            lines.put(line.rstrip())
    lines.put(None)


def _next_line(lines: queue.Queue[str | None], process: subprocess.Popen[str], deadline: float | None) -> str | None:
    """The next line, "" when there is none yet (or it is blank), None at the end of output."""
    wait = POLL_SECONDS if deadline is None else max(0.0, min(POLL_SECONDS, deadline - time.monotonic()))
    try:
        return lines.get(timeout=wait)
    except queue.Empty:
        # Something out of reach may hold the pipe open after the command is gone.
        return None if process.poll() is not None and lines.empty() else ""


def _brief(command: Sequence[str]) -> str:
    words = [os.path.basename(str(command[0])), *map(str, command[1:4])]
    return " ".join(words) + (" ..." if len(command) > 4 else "")


def _meaning(returncode: int) -> str:
    if returncode == 127:
        return "command not found"
    if returncode == 137:
        return "SIGKILL: often the kernel's out-of-memory killer"
    return f"signal {returncode - 128}" if returncode > 128 else "its own exit"
