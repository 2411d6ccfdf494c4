"""Flows that compose the stages. Importing this sets quiet defaults for Prefect; the environment wins."""

import os

_PREFECT_DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # A loaded machine needs more than the 20 s that Prefect allows its own local server.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "dspark",
    # Prefect's lines go to its run page; the terminal shows the stages' own.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
}
for _name, _value in _PREFECT_DEFAULTS.items():
    os.environ.setdefault(_name, _value)
