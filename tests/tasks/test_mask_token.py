"""The mask token is one that the verifier never reads or writes, and never pad or eos."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from dspark_model.dataset import write_examples
from tasks.mask_token import MaskTokenError, choose_mask_token

WORDS = 20
EOS, PAD = WORDS, WORDS + 1
TEMPLATE = "<turn>{{ messages[0].content }}"


def verifier_in(folder, size, added=(), ids=None, **special):
    """Words are ids 0..19 (or `ids`), then <eos>, <pad> and what is added."""
    vocab = {f"w{i}": i for i in range(WORDS)} if ids is None else {f"w{i}": i for i in ids}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", **special)
    fast.add_tokens([AddedToken(text, special=is_special, normalized=False) for text, is_special in added])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": size}))
    return fast


def choose(folder, wanted=None, used=(1, 2, 3)):
    examples = folder / "train.safetensors"
    write_examples(examples, [("a", list(used), [1] * len(used))])
    return choose_mask_token(folder, wanted, examples)


def test_the_wanted_id_if_it_is_free(tmp_path):
    verifier_in(tmp_path, 30)
    assert choose(tmp_path, wanted=7) == 7
    assert choose(tmp_path, wanted=0, used=(1, 2)) == 0
    assert choose(tmp_path, wanted=29) == 29


@pytest.mark.parametrize("wanted", [2, 30, EOS, PAD])
def test_the_wanted_id_is_refused_if_used_out_of_range_or_control(tmp_path, wanted):
    verifier_in(tmp_path, 30)
    with pytest.raises(MaskTokenError, match=rf"drafter\.mask_token_id={wanted} .*vocab_size=30.*leave it null"):
        choose(tmp_path, wanted=wanted)


def test_the_tokenizers_own_mask_token_comes_first(tmp_path):
    fast = verifier_in(tmp_path, 30, mask_token="<mask>")
    assert choose(tmp_path) == fast.mask_token_id
    assert choose(tmp_path, used=(1, fast.mask_token_id)) == len(fast), "used: the first unused row instead"


def test_the_first_row_past_the_tokenizer(tmp_path):
    fast = verifier_in(tmp_path, 40)
    assert choose(tmp_path) == len(fast) == PAD + 1


def test_rows_count_from_the_highest_id_where_ids_have_gaps(tmp_path):
    fast = verifier_in(tmp_path, 60, ids=[*range(10), *range(20, 30)])
    highest = max(fast.get_vocab().values())
    assert len(fast) < highest, "the tokenizer's length is the id of a word"
    assert choose(tmp_path) == highest + 1


def test_a_special_token_that_nobody_uses(tmp_path):
    # No unused row: ordinary added words, what the template writes, control tokens and used ones are passed over.
    added = [("<think>", False), ("<turn>", True), ("<file>", True), ("<repo>", True)]
    fast = verifier_in(tmp_path, PAD + 1 + len(added), added)
    file, repo = fast.convert_tokens_to_ids(["<file>", "<repo>"])
    assert choose(tmp_path) == file
    assert choose(tmp_path, used=(1, file)) == repo


def test_no_token_is_free(tmp_path):
    added = [("<think>", False), ("<turn>", True)]
    verifier_in(tmp_path, PAD + 1 + len(added), added)
    with pytest.raises(MaskTokenError, match=r"no mask token, no unused .*drafter\.mask_token_id"):
        choose(tmp_path)


def test_the_tiny_verifier_has_unused_rows(tiny_verifier, tmp_path):
    examples = tmp_path / "train.safetensors"
    write_examples(examples, [("a", [1, 2, 3], [0, 1, 1])])
    assert choose_mask_token(tiny_verifier, None, examples) == 1492
