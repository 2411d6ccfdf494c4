"""What can be refused before anything is started: recipes, verifiers and stores that cannot work."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.recipe import Recipe, RecipeError
from tasks.recipe_file import load_recipe
from tasks.store import ArtifactStore


def open_recipe(recipe: Recipe | str, overrides: Sequence[str] = ()) -> Recipe:
    """Load and check a recipe, by name, by file or as filled into a form.

    Raises:
        RecipeError: unknown recipe or field, a value out of range, a verifier that is absent or does not fit.
    """
    from tasks.prompts import check_prompts
    from tasks.verifier import check_verifier

    if isinstance(recipe, Recipe):
        if overrides:
            raise RecipeError(f"overrides={list(overrides)}: they change a named recipe; edit this recipe's fields")
    else:
        recipe = load_recipe(recipe, list(overrides))
    check_verifier(recipe)
    check_prompts(recipe)
    return recipe


def open_store(root: str | None = None) -> ArtifactStore:
    """The store of a run, known to be usable.

    Raises:
        StoreError: it does not exist and cannot be made, or access is denied.
    """
    store = ArtifactStore(root)
    store.check()
    return store
