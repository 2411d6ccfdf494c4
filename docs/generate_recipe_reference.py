"""Write docs/recipes.md from the recipe's models: `python docs/generate_recipe_reference.py`.

The tables come from `tasks/recipe.py`, so a field is described once. `--check` writes nothing and exits with 1 when
the file is out of date.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also works where the project is not installed

from tasks.recipe import Recipe, VerifierSection

TARGET = Path(__file__).resolve().parent / "recipes.md"
INTRODUCTION = """\
<!-- Made by docs/generate_recipe_reference.py from tasks/recipe.py and tasks/recipe_data.py: edit there. -->
# Recipes

A recipe is one YAML file with every decision about one verifier's drafter. Those that ship are in
`deployments/recipes/`; `--recipe` takes their name, or the path of a file of yours. What a recipe leaves out has the
default given here; a field that does not exist is refused.

```
python flows/full_pipeline.py --list-recipes
python flows/full_pipeline.py --recipe my-model.yaml --plan
python flows/full_pipeline.py --recipe my-model.yaml --set training.steps=2000 --set 'training.loss={ce: 0.1, tv: 0.9}'
```

Values of `--set` are YAML. `verifier.path` and files in `prompts.sources` may be relative (in a recipe to its file, in
`--set` to where you are) and may contain `~` and `$VARIABLES`. `docs/data.md` explains sources, answers and vocabulary.

The smallest recipe:

```yaml
name: my-model
verifier:
  source: path
  path: ~/models/my-model
```

Changing a value makes the stages that read it, and those after them, run again; `--plan` shows which, and why. Only
what describes the machine, or a run's patience, changes no result and makes nothing run again: all of `serving`,
`prompts.min_prompts`, `prompts.max_unusable_share`, `responses.max_failed_share` and
`training.checkpoint_every_seconds`.
"""


def render() -> str:
    """The whole page."""
    top = {name: field for name, field in Recipe.model_fields.items() if not _is_section(field)}
    parts = [INTRODUCTION, "## Top level\n", _table(top)]
    for model in get_args(get_args(VerifierSection)[0]):
        source = get_args(model.model_fields["source"].annotation)[0]
        fields = {name: field for name, field in model.model_fields.items() if name != "source"}
        parts += [f"## verifier, source: {source}\n", f"{_summary(model)}\n", _table(fields)]
    for name, field in Recipe.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            parts += [f"## {name}\n", f"{_summary(field.annotation)}\n", _table(field.annotation.model_fields)]
            for inner, entry in _entries(field.annotation):
                parts += [f"### Each of {name}.{inner}\n", f"{_summary(entry)}\n", _table(entry.model_fields)]
    return "\n".join(parts)


def _entries(section: type[BaseModel]) -> list[tuple[str, type[BaseModel]]]:
    """Fields that are lists of models, with the model."""
    return [
        (name, entry)
        for name, field in section.model_fields.items()
        for entry in get_args(field.annotation)
        if isinstance(entry, type) and issubclass(entry, BaseModel)
    ]


def _is_section(field: FieldInfo) -> bool:
    return field.discriminator is not None or (
        isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    )


def _summary(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())


def _table(fields: dict[str, FieldInfo]) -> str:
    lines = ["| field | values | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        cells = (f"`{name}`", _values(field), _default(field), field.description or "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"`{json.dumps(value, default=lambda other: getattr(other, 'source', None) or str(other))}`"


def _values(field: FieldInfo) -> str:
    adapted: Any = TypeAdapter(field.rebuild_annotation())
    return _describe(adapted.json_schema())


def _describe(schema: dict[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in schema:
        return "entries, see below"
    if schema == {} or schema is True:
        return "any value"
    if "anyOf" in schema:
        return " or ".join(_describe(option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = {"null": "null", "boolean": "true, false", "string": "text", "integer": "integer", "number": "number"}
    if schema["type"] == "array":
        if "$ref" in schema["items"]:
            return "list of entries, see below"
        return f"list of {_describe(schema['items'])}{'' if 'enum' in schema['items'] else 's'}"
    if schema["type"] == "object":
        if "propertyNames" not in schema:
            return "map of names to values"
        return f"map of {_describe(schema['propertyNames'])} to {_describe(schema['additionalProperties'])}s"
    text = "path" if schema.get("format") == "path" else kind[schema["type"]]
    symbols = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{symbol} {schema[key]:g}" for key, symbol in symbols.items() if key in schema]
    if "pattern" in schema:
        limits.append(f"matching `{schema['pattern']}`")
    return " ".join([text, ", ".join(limits)]).strip()


def main(argv: list[str] | None = None) -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    arguments = parser.parse_args(argv)
    page = render()
    if not arguments.check:
        TARGET.write_text(page)
        return 0
    if TARGET.is_file() and TARGET.read_text() == page:
        return 0
    print(f"{TARGET} is out of date: run `python docs/generate_recipe_reference.py`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
