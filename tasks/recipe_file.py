"""Recipes as files: find, read, change by `--set`, and say clearly what is wrong with one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from tasks.recipe import Recipe, RecipeError, VerifierSection

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
    for override in overrides:
        _apply_override(raw, override)
    _expand_paths(raw, path.parent)
    return parse_recipe(raw)


def parse_recipe(raw: dict[str, Any]) -> Recipe:
    """Validate a recipe given as plain data; one line per fault.

    Raises:
        RecipeError: with every fault's field path, value and expectation.
    """
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise RecipeError("\n".join(_describe(fault) for fault in error.errors())) from error


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
        model = model.model_fields[part].annotation
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
    """Paths in a recipe are relative to its file; `~` and `$VAR` are expanded."""
    for section, field in (("verifier", "path"), ("prompts", "dataset")):
        values = raw.get(section)
        value = values.get(field) if isinstance(values, dict) else None
        is_file = field == "path" or (isinstance(value, str) and value.endswith((".jsonl", ".parquet")))
        if isinstance(values, dict) and isinstance(value, str) and is_file and "://" not in value:
            expanded = Path(os.path.expandvars(value)).expanduser()
            values[field] = str(expanded if expanded.is_absolute() else (base / expanded).resolve())
