"""Recipes as files: find, read, change by `--set`, and say clearly what is wrong with one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from tasks.recipe import Recipe, RecipeError, VerifierSection
from tasks.recipe_data import FILE_SUFFIXES

RECIPES_DIR = Path(__file__).resolve().parent.parent / "deployments" / "recipes"
DEFAULT_RECIPE = "smollm2-135m"


def list_recipes() -> list[str]:
    """Names of the recipes that ship with the project."""
    return sorted(path.stem for path in RECIPES_DIR.glob("*.yaml"))


def load_recipe(name_or_file: str = DEFAULT_RECIPE, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a recipe by name or file and apply `a.b=value` overrides (values are YAML).

    Raises:
        RecipeError: no such recipe, unreadable YAML, unknown field or a value out of range.
    """
    path = Path(name_or_file)
    if path.suffix not in {".yaml", ".yml"}:
        path = RECIPES_DIR / f"{name_or_file}.yaml"
    if not path.is_file():
        raise RecipeError(
            f"recipe {name_or_file!r} not found (looked for {path}); known recipes: {', '.join(list_recipes())}"
        )
    try:
        raw = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise RecipeError(f"{path} must hold a mapping of recipe sections, found {type(raw).__name__}")
    _expand_paths(raw, path.parent)
    for override in overrides:
        _apply_override(raw, override)
    _expand_paths(raw, Path.cwd())  # what is typed on a command line starts where it is typed
    return parse_recipe(raw)


def parse_recipe(raw: dict[str, Any]) -> Recipe:
    """Validate a recipe given as plain data; one line per fault.

    Raises:
        RecipeError: with every fault's field path, value and expectation.
    """
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        faults = error.errors()
        # A tuple whose entries are wrong is reported as too short as well.
        inner = [fault["loc"][: len(outer["loc"])] for outer in faults for fault in faults if fault is not outer]
        told = [fault for fault in faults if fault["type"] != "too_short" or fault["loc"] not in inner]
        raise RecipeError("\n".join(_describe(fault) for fault in told)) from error


def _describe(fault: Any) -> str:
    section, *inner = fault["loc"] or ("",)
    # Pydantic names the kind of verifier, and which member of a union refused: neither is a field of the recipe.
    inner = inner[1:] if section == "verifier" else inner
    where = ".".join(str(part) for part in (section, *inner) if not str(part).startswith(("constrained-", "literal[")))
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        return f"{where}: unknown field (value {fault['input']!r}); known here: {', '.join(_known(fault['loc']))}"
    if fault["type"] == "value_error":
        return message if not where or where in message else f"{where}: {message}"
    return f"{where}: {message} (got {fault['input']!r})"


def _known(loc: tuple[Any, ...]) -> list[str]:
    model: Any = Recipe
    for part in loc[:-1]:
        if part == "verifier":
            continue
        if part in {"wheel", "path", "hub"}:
            options = get_args(get_args(VerifierSection)[0])
            model = next(m for m in options if get_args(m.model_fields["source"].annotation) == (part,))
            continue
        annotation = model.model_fields[part].annotation if isinstance(part, str) else model
        # An entry of a tuple of models is named by its position.
        model = next((inner for inner in get_args(annotation) if hasattr(inner, "model_fields")), annotation)
    return sorted(model.model_fields)


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise RecipeError(f"--set {override!r}: expected section.field=value")
    *parents, leaf = key.split(".")
    node = raw
    for part in parents:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise RecipeError(f"--set {override!r}: {part!r} is a value, not a section")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise RecipeError(f"--set {override!r}: the value is not valid YAML; quote it if it is text") from error
    # YAML 1.1 reads 1e-3 as text; people mean the number.
    if isinstance(parsed, str):
        with contextlib.suppress(ValueError):
            parsed = float(parsed)
    node[leaf] = parsed


def _expand_paths(raw: dict[str, Any], base: Path) -> None:
    """Make paths absolute: relative ones start at `base`; `~` and `$VAR` are expanded."""
    verifier, prompts = raw.get("verifier"), raw.get("prompts")
    if isinstance(verifier, dict) and isinstance(verifier.get("path"), str):
        verifier["path"] = _absolute(verifier["path"], base)
    if not isinstance(prompts, dict) or "sources" not in prompts:
        return
    sources = prompts["sources"] if isinstance(prompts["sources"], list) else [prompts["sources"]]
    prompts["sources"] = [_expand_source(source, base) for source in sources]


def _expand_source(source: Any, base: Path) -> Any:
    if isinstance(source, dict):
        return source | {"source": _expand_source(source["source"], base)} if "source" in source else source
    is_file = isinstance(source, str) and source.endswith(FILE_SUFFIXES) and "://" not in source
    return _absolute(source, base) if is_file else source


def _absolute(path: str, base: Path) -> str:
    expanded = Path(os.path.expandvars(path)).expanduser()
    return str(expanded if expanded.is_absolute() else (base / expanded).resolve())
