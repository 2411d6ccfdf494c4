"""A Prefect server for runs that have none: it lives as long as the run, even if the run is killed."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import prefect
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_HOME,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    get_current_settings,
    temporary_settings,
)

from tasks.process import ManagedProcess

_GRACE_SECONDS = 5.0


class PrefectServerError(RuntimeError):
    """The run's own Prefect server did not start."""


def ensure_prefect_server() -> None:
    """Use the configured Prefect server, or start one on the local database until this process ends.

    Prefect would start the same server by itself, but leaves it running when the flow is killed. What it
    records can be seen later with `prefect server start`.

    Raises:
        PrefectServerError: it died or did not answer in time.
    """
    if PREFECT_API_URL.value():
        return
    port = _free_port()
    log = Path(PREFECT_HOME.value()) / "logs" / f"server-{os.getpid()}.log"
    server = ManagedProcess.start(_command(port), log, _environment(), grace_seconds=_GRACE_SECONDS)
    # At exit, not sooner: Prefect's threads send their last events after the flow has returned.
    cleanup = contextlib.ExitStack()
    atexit.register(cleanup.close)
    cleanup.callback(log.unlink, missing_ok=True)
    cleanup.callback(server.stop)
    _await(server, f"http://127.0.0.1:{port}/api/health", log)
    # The heartbeat serves servers that outlive the run, and costs a second at its end.
    settings = {PREFECT_API_URL: f"http://127.0.0.1:{port}/api", PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    cleanup.enter_context(temporary_settings(settings))


def _command(port: int) -> list[str]:
    application = ["--app-dir", str(Path(prefect.__file__).parent.parent), "--factory"]
    application += ["prefect.server.api.server:create_app", "--lifespan", "on", "--log-level", "error"]
    return [sys.executable, "-m", "uvicorn", *application, "--host", "127.0.0.1", "--port", str(port)]


def _environment() -> dict[str, str]:
    own = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    return {**os.environ, **get_current_settings().to_environment_variables(exclude_unset=True), **own}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await(server: ManagedProcess, url: str, log: Path) -> None:
    deadline = time.monotonic() + PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value()
    while time.monotonic() < deadline:
        if not server.alive():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise PrefectServerError(f"the local Prefect server died while starting:\n{tail}")
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(url, timeout=10).close()
            return
        time.sleep(0.05)
    raise PrefectServerError(
        f"the local Prefect server did not answer at {url} in time: raise "
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS, or start one and set PREFECT_API_URL"
    )
