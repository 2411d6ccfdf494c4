"""A stage's progress bar on its page in Prefect."""

from __future__ import annotations

import logging
from typing import Any

_LOG = logging.getLogger("dspark")


class ProgressBar:
    """Publishes a text and a share; the bar appears with the first call.

    Args:
        name: of the Prefect artifact, before `-progress`.
    """

    def __init__(self, name: str) -> None:
        self._key = f"{name}-progress".replace(".", "-").replace("_", "-")
        self._artifact: Any = None
        self._broken = False

    def __call__(self, text: str, share: float) -> None:
        """Show `text` and a bar filled to `share` (0..1); without a server the stage loses the bar and goes on."""
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        if self._broken:
            return
        percent = round(100 * min(max(share, 0.0), 1.0), 1)
        try:
            if self._artifact is None:
                self._artifact = create_progress_artifact(percent, key=self._key, description=text)
            else:
                update_progress_artifact(self._artifact, percent, description=text)
        except Exception as error:
            self._broken = True
            _LOG.warning("no progress bar in Prefect from here on: %s: %s", type(error).__name__, error)
