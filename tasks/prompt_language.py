"""The language of a prompt, by py3langid, whose model is in its wheel."""

from __future__ import annotations

from functools import cache

from tasks.prompt_rows import PromptsError

# Enough to tell; a prompt may carry a document.
CHARACTERS = 2000
# Below, a classifier guesses: such prompts pass.
FEWEST_LETTERS = 24


def language_of(text: str) -> str | None:
    """ISO 639-1 code of a text's beginning, None when it is too short to tell."""
    import py3langid

    beginning = text[:CHARACTERS]
    if sum(character.isalpha() for character in beginning) < FEWEST_LETTERS:
        return None
    code: str = py3langid.classify(beginning)[0]
    return code


@cache
def known_languages() -> frozenset[str]:
    """Codes that can be told apart."""
    import py3langid

    return frozenset(code for code, _ in py3langid.rank("text"))


def check_languages(languages: tuple[str, ...] | None) -> None:
    """Refuse codes that no text would have.

    Raises:
        PromptsError: names them, and the known ones.
    """
    if languages and (unknown := sorted(set(languages) - known_languages())):
        raise PromptsError(
            f"prompts.languages={list(languages)}: {', '.join(unknown)} unknown; known: "
            f"{', '.join(sorted(known_languages()))}"
        )
