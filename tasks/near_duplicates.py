"""Prompts that say nearly the same: MinHash with locality-sensitive hashing, by datasketch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.prompt_rows import ngrams, normalised

PERMUTATIONS = 128
SHINGLE_WORDS, SHINGLE_CHARACTERS = 3, 5
# Fewer blanks than that: a script that does not separate words.
CHARACTERS_PER_BLANK = 12
# Short questions that differ in one word are different questions.
FEWEST_CHARACTERS = 80
# Candidates cost little, since each is compared again; a missed one is a duplicate in training.
RECALL_WEIGHTS = (0.1, 0.9)


class NearDuplicates:
    """Remembers texts; tells whether a new one is nearly among them.

    About 1.5 KiB and 0.3 ms a text.

    Args:
        similarity: estimated Jaccard similarity of the texts' shingles from which they count as the same.
    """

    def __init__(self, similarity: float) -> None:
        from datasketch import MinHash, MinHashLSH

        self._similarity = similarity
        # datasketch needs a threshold below 1; candidates are compared with the real one.
        threshold = min(similarity, 0.95)
        self._index: Any = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS, weights=RECALL_WEIGHTS)
        self._empty: Any = MinHash(num_perm=PERMUTATIONS, seed=1)
        self._signatures: list[NDArray[np.uint32]] = []

    def seen(self, text: str) -> bool:
        """Whether a remembered text is nearly `text`; if not, it is remembered from now on. Short texts never are."""
        if len(text) < FEWEST_CHARACTERS:
            return False
        signature = self._empty.copy()  # with its permutations, which are costly to draw
        signature.update_batch([shingle.encode("utf-8", "surrogatepass") for shingle in shingles(text)])
        values = signature.hashvalues
        for number in self._index.query(signature):
            if float((self._signatures[number] == values).mean()) >= self._similarity:
                return True
        self._index.insert(len(self._signatures), signature, check_duplication=False)
        self._signatures.append(values.copy())
        return False


def shingles(text: str) -> set[str]:
    """Runs of three words; of five characters in scripts that do not separate words."""
    if len(text.split()) * CHARACTERS_PER_BLANK >= len(text):
        return {" ".join(run) for run in ngrams(text, SHINGLE_WORDS)}
    plain = normalised(text)
    return {plain[start : start + SHINGLE_CHARACTERS] for start in range(max(1, len(plain) - SHINGLE_CHARACTERS + 1))}
