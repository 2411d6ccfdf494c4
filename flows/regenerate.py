"""Training data for one verifier: prompts, its own answers, training rows and the draft vocabulary.

`python flows/regenerate.py --recipe NAME` runs it; `--help` explains the rest. The stages are those of
`full_pipeline.py`, so what is made here is cached there.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also works where the project is not installed

if __name__ == "__main__":  # the command line refuses a wrong recipe before Prefect is even imported
    from flows.cli import run_command
    from flows.commands import REGENERATE

    run_command(REGENERATE)
    sys.exit()

from prefect import flow

from flows.names import run_name
from tasks.manifest import ArtifactRef
from tasks.pipeline import DATA_STAGES, load_stages
from tasks.preflight import open_recipe, open_store
from tasks.recipe import Recipe
from tasks.recipe_file import DEFAULT_RECIPE
from tasks.run import PipelineRun


@flow(name="regenerate", flow_run_name=run_name)
def regenerate(
    recipe: Recipe | str = DEFAULT_RECIPE,
    overrides: tuple[str, ...] = (),
    store: str | None = None,
    force: tuple[str, ...] = (),
) -> dict[str, ArtifactRef]:
    """Make the training data of a drafter.

    Args:
        recipe: name of a recipe in deployments/recipes, a YAML file, or a recipe filled in here.
        overrides: changes to a named recipe, such as `prompts.num_prompts=20000`.
        store: folder or s3://bucket/prefix; default $DSPARK_STORE or .dspark/store.
        force: stages to make again even if their artifacts exist.
    """
    stages = load_stages(DATA_STAGES)
    with PipelineRun(open_recipe(recipe, overrides), open_store(store), stages=stages, force=force) as run:
        run("verifier")  # the model that answers, as a Hugging Face folder
        run("prompts")  # user turns for training, and others for evaluation
        run("references")  # its answers to the evaluation prompts
        run("responses")  # its answers to the training prompts, as exact token ids
        run("examples")  # token ids and loss masks, split by conversation
        run("vocab")  # the tokens that a drafter may propose
        run("coverage")  # what that vocabulary leaves out, and what it costs
        return run.finish()
