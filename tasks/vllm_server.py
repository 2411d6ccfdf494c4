"""vLLM servers of a run: started, awaited, watched, shared between stages and stopped.

A server runs in the serving environment (`tasks.server_spec`) and dies with the pipeline (`tasks.process`).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tasks.process import TAIL_LINES, ManagedProcess
from tasks.server_spec import (
    MODEL_NAME,
    ServerSpec,
    ServingError,
    engine_name,
    require_plugin,
    serve_command,
    serve_environment,
    serving_python,
    shell_command,
)

__all__ = [
    "ServerDied",
    "ServerPool",
    "ServerSpec",
    "ServingError",
    "VllmServer",
    "engine_name",
    "serve_command",
    "serve_environment",
    "serving_python",
    "shell_command",
]

POLL_SECONDS = 0.2
# A server has nothing to save; while starting it ignores SIGTERM.
GRACE_SECONDS = 5.0
START_ATTEMPTS = 3
# Of the pipeline's own environment; they would mislead another interpreter or override the spec.
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "VLLM_CPU_KVCACHE_SPACE")


class ServerDied(ServingError):  # noqa: N818 - reads as what happened
    """A server process ended by itself; the message carries the end of its log."""


class VllmServer:
    """One vLLM server process. Made by `start`, which returns when it answers."""

    def __init__(self, spec: ServerSpec, process: ManagedProcess, port: int, log_file: Path) -> None:
        self.spec = spec
        self.url = f"http://127.0.0.1:{port}"
        self.model_name = MODEL_NAME
        self.headers: Mapping[str, str] = {}
        self.request_timeout_seconds = spec.request_timeout_seconds
        self.log_file = log_file
        self._process = process
        self._stopped = False

    @classmethod
    def start(cls, spec: ServerSpec, log_dir: Path) -> VllmServer:
        """Start a server and wait until it answers.

        Raises:
            ServingError: the environment lacks vLLM or the plugin, or the server is not ready in time.
            ServerDied: the process ended while starting.
        """
        server = cls.launch(spec, log_dir)
        for _ in range(START_ATTEMPTS - 1):
            try:
                return server.wait_ready()
            except ServerDied:
                # Between choosing a free port and binding it another program may take it.
                if "address already in use" not in server.log_tail().lower():
                    raise
                server = cls.launch(spec, log_dir)
        return server.wait_ready()

    @classmethod
    def launch(cls, spec: ServerSpec, log_dir: Path) -> VllmServer:
        """Start the process without waiting; `wait_ready` is still to be called.

        Raises:
            ServingError: the environment lacks vLLM or the plugin.
        """
        require_plugin(spec)
        port = _free_port()
        log_file = log_dir / f"vllm-{spec.mode}-{port}.log"
        inherited = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
        process = ManagedProcess.start(
            serve_command(spec, port),
            log_file,
            inherited | serve_environment(spec),
            grace_seconds=GRACE_SECONDS,
        )
        return cls(spec, process, port, log_file)

    def wait_ready(self) -> VllmServer:
        """Wait until the server answers, and return it; a server that does not is stopped."""
        import httpx

        deadline = time.monotonic() + self.spec.start_timeout_seconds
        try:
            with httpx.Client(trust_env=False) as client:
                while not self._answers(client):
                    self.check_alive()
                    if time.monotonic() > deadline:
                        raise ServingError(
                            f"vLLM was not ready after {self.spec.start_timeout_seconds:g} s; raise "
                            f"serving.start_timeout_seconds if it needs longer. {self.log_file} ends:\n"
                            f"{self.log_tail()}"
                        )
                    time.sleep(POLL_SECONDS)
        except BaseException:
            self.stop()
            raise
        return self

    def _answers(self, client: httpx.Client) -> bool:  # type: ignore[name-defined]  # noqa: F821
        import httpx

        try:
            return client.get(f"{self.url}/health", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def alive(self) -> bool:
        """Whether the server process runs."""
        return self._process.alive()

    def check_alive(self) -> None:
        """Raise ServerDied when the process has ended."""
        if self.alive():
            return
        if self._stopped:
            raise ServerDied(f"the {self.spec.mode} server was stopped and cannot be asked any more")
        raise ServerDied(
            f"vLLM ({self.spec.mode}) ended by itself with status {self._process.returncode}; "
            f"{self.log_file} ends:\n{self.log_tail()}"
        )

    def log_tail(self) -> str:
        """The last lines of the server's log."""
        if not self.log_file.is_file():
            return "  (no log)"
        lines = self.log_file.read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in _without_noise(lines)[-TAIL_LINES:])

    def stop(self) -> None:
        """End the server and its processes; harmless when it has ended."""
        self._stopped = True
        self._process.stop()

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class ServerPool:
    """The servers of a flow run. Stages ask for what they need; what nobody asks for any more is stopped."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self._servers: dict[ServerSpec, VllmServer] = {}
        self._lock = threading.RLock()

    def acquire(self, spec: ServerSpec) -> VllmServer:
        """A running server for `spec`: the one that runs already, or a new one. Others are stopped.

        Raises:
            ServingError: as `VllmServer.start`.
        """
        return self.acquire_many([spec])[0]

    def acquire_many(self, specs: Sequence[ServerSpec]) -> list[VllmServer]:
        """Running servers for all of `specs`, started side by side; others are stopped.

        Raises:
            ServingError: as `VllmServer.start`; then none of the new ones is left running.
        """
        with self._lock:
            for spec in list(self._servers):
                if spec not in specs or not self._servers[spec].alive():
                    self._servers.pop(spec).stop()
            missing = [spec for spec in dict.fromkeys(specs) if spec not in self._servers]
            self._servers |= _start_together(missing, self.log_dir)
            return [self._servers[spec] for spec in specs]

    def close(self) -> None:
        """Stop all servers."""
        with self._lock:
            while self._servers:
                self._servers.popitem()[1].stop()

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _start_together(specs: Sequence[ServerSpec], log_dir: Path) -> dict[ServerSpec, VllmServer]:
    from concurrent.futures import ThreadPoolExecutor

    if not specs:
        return {}
    with ThreadPoolExecutor(len(specs), thread_name_prefix="vllm-start") as threads:
        starts = {spec: threads.submit(VllmServer.start, spec, log_dir) for spec in specs}
    failures = [error for start in starts.values() if (error := start.exception()) is not None]
    if failures:
        for start in starts.values():
            if start.exception() is None:
                start.result().stop()
        raise failures[0]
    return {spec: start.result() for spec, start in starts.items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _without_noise(lines: Sequence[str]) -> list[str]:
    """Drop what vLLM's binding library prints at every exit, which hides the reason."""
    return [line for line in lines if not line.startswith(("nanobind:", " - leaked", " - ... skipped"))]
