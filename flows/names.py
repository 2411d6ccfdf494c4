"""Names of flow runs."""

from datetime import UTC, datetime
from pathlib import Path

from prefect import runtime

from tasks.recipe import Recipe


def run_name() -> str:
    """Such as `smollm2-135m-20261201-120000`, of the flow run that is being created."""
    recipe = runtime.flow_run.parameters["recipe"]
    name = recipe.name if isinstance(recipe, Recipe) else Path(recipe).stem
    return f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
