"""What the documentation says is so: generated pages are current, quoted messages exist, examples are valid."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks.recipe_file import parse_recipe

REPO = Path(__file__).resolve().parents[2]
DOCS = REPO / "docs"
GENERATOR = DOCS / "generate_recipe_reference.py"


def test_recipe_reference_is_up_to_date():
    answer = subprocess.run([sys.executable, str(GENERATOR), "--check"], capture_output=True, text=True, cwd="/")
    assert answer.returncode == 0, answer.stderr


def test_check_notices_an_outdated_page(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("generate_recipe_reference", GENERATOR)
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    monkeypatch.setattr(generator, "TARGET", tmp_path / "recipes.md")
    assert generator.main(["--check"]) == 1
    assert generator.main([]) == 0
    assert generator.main(["--check"]) == 0
    (tmp_path / "recipes.md").write_text("old")
    assert generator.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err


def test_every_recipe_field_is_described():
    rows = [line for line in (DOCS / "recipes.md").read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 60
    assert [row for row in rows if re.split(r"(?<!\\)\|", row)[4].strip() == ""] == []


@pytest.mark.parametrize("page", ["recipes.md", "data.md"])
def test_example_recipes_in_the_documentation_are_valid(page):
    examples = re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert examples
    for example in examples:
        parse_recipe(yaml.safe_load(example))


def _messages() -> str:
    """All string literals of the source, joined as Python joins them, with ... for each formatted value."""
    texts = []
    folders = ("dspark_model", "tasks", "flows", "vllm_plugin")
    for file in (path for folder in folders for path in (REPO / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "..." for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_quoted_messages_exist_in_the_source():
    headings = re.findall(
        r"^### ([^A-Z].*|vLLM .*|DSpark .*)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE
    )
    assert len(headings) > 15
    messages = _messages()
    missing = [head for head in headings if not all(part.strip() in messages for part in head.split("..."))]
    assert missing == []


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_files_named_in_a_page_exist(page):
    named = re.findall(
        r"`((?:docs|docker|deployments|tasks|flows|dspark_model|benchmarks)/[\w./-]*)`", (DOCS / page).read_text()
    )
    assert [name for name in named if not (REPO / name).exists() and name != "docker/.env"] == []
