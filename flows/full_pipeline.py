"""The whole pipeline: from a verifier's name to a served, measured DSpark drafter.

`python flows/full_pipeline.py --recipe NAME` runs it; `--help` explains the rest. Each line of the flow is a
stage: a Prefect task that reads artifacts of earlier stages and commits one of its own (`tasks/<stage>.py`).
A stage whose artifact is in the store already is `Cached`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also works where the project is not installed

if __name__ == "__main__":  # the command line refuses a wrong recipe before Prefect is even imported
    from flows.cli import run_command
    from flows.commands import FULL_PIPELINE

    run_command(FULL_PIPELINE)
    sys.exit()

from prefect import flow

from flows.names import run_name
from tasks.manifest import ArtifactRef
from tasks.preflight import open_recipe, open_store
from tasks.recipe import Recipe
from tasks.recipe_file import DEFAULT_RECIPE
from tasks.run import PipelineRun


@flow(name="full-pipeline", flow_run_name=run_name)
def full_pipeline(
    recipe: Recipe | str = DEFAULT_RECIPE,
    overrides: tuple[str, ...] = (),
    store: str | None = None,
    force: tuple[str, ...] = (),
) -> dict[str, ArtifactRef]:
    """Train, measure and package a DSpark drafter for one verifier.

    Args:
        recipe: name of a recipe in deployments/recipes, a YAML file, or a recipe filled in here.
        overrides: changes to a named recipe, such as `training.learning_rate=1e-3`.
        store: folder or s3://bucket/prefix; default $DSPARK_STORE or .dspark/store.
        force: stages to make again even if their artifacts exist.
    """
    with PipelineRun(open_recipe(recipe, overrides), open_store(store), force=force) as run:
        run("verifier")  # the model to accelerate, as a Hugging Face folder
        run("prompts")  # user turns for training, and others for evaluation
        run("references")  # the verifier's answers to the evaluation prompts, with its hidden states
        run("responses")  # the verifier's answers to the training prompts, as exact token ids
        run("examples")  # token ids and loss masks, split by conversation
        run("vocab")  # the tokens that the drafter may propose
        run("coverage")  # what that vocabulary leaves out, and what it costs
        run("hidden_states")  # what the verifier computed inside for every training token
        run("drafter")  # training: a checkpoint that vLLM loads
        run("evaluation")  # served: acceptance, speedup, and whether training predicted them
        run("release")  # model card and files to publish
        return run.finish()
