"""A verifier small enough to serve in tests: a random 4-layer Qwen3 with its own tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path

SENTENCES = (
    "The quick brown fox jumps over the lazy dog while the cat sleeps in the warm sun.",
    "def add(first, second):\n    return first + second\n",
    "What is the capital of France? The capital of France is Paris.",
    "Write a short poem about the sea, the wind and the stars above the harbour.",
    "Numbers such as 0, 1, 2, 3, 10, 42, 100 and 2024 appear in many questions.",
    "Explain step by step how to multiply seven by eight and why the answer is fifty six.",
    "for i in range(10):\n    print(i, i * i)\n",
    "Translate the following sentence into German: good morning, how are you today?",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NUM_LAYERS, HIDDEN, VOCAB = 4, 128, 1500
# Rows past the tokenizer's end, as real checkpoints have: one of them can serve as mask token.
UNUSED_ROWS = 8
# How far a token's successor stands out. Higher: answers hang less on the prompt; lower: more near-ties.
SUCCESSOR_STRENGTH = 1.2


def make_tiny_verifier(folder: Path, seed: int = 0, dtype: str = "bfloat16") -> Path:
    """Write a Hugging Face folder (safetensors, tokenizer, chat template), the same for the same seed and dtype.

    Serve it with dtype float32 where two engines must agree token by token:
    rounding of activations to bf16 can turn the few near-ties of a random model.
    """
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_train_tokenizer(), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    eos, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=eos,
        pad_token_id=pad,
        bos_token_id=None,
        dtype=dtype,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        _sharpen(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    generation = {"eos_token_id": eos, "pad_token_id": pad, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    return folder


def _train_tokenizer():
    """A byte-level BPE of the sentences and of made-up words, enough of them to fill the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - UNUSED_ROWS,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    draw = random.Random(0)
    words = ["".join(draw.choices("bdfgklmnprstvz aeiou", k=6)) for _ in range(1500)]
    tokenizer.train_from_iterator([*SENTENCES, " ".join(words)], trainer)
    return tokenizer


def _sharpen(model) -> None:
    """Scale random weights so that greedy answers hang on their context and rarely come near a tie.

    Every token gets a successor whose output row leans towards the token's embedding: it mostly wins by
    far, and what attention adds from the context decides the rest.
    """
    import torch

    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=weight.shape[1] ** -0.5)
        embedding = model.model.embed_tokens.weight.normal_()
        successor = torch.randperm(VOCAB)
        model.lm_head.weight[successor] += embedding * SUCCESSOR_STRENGTH * HIDDEN**-0.5
        # No answer may end by chance: its length is the test's choice.
        model.lm_head.weight[:3].mul_(0.0)
        model.lm_head.weight.mul_(3.0)
