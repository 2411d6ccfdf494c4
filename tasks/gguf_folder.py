"""A quantised GGUF file as a Hugging Face folder, checked against its source."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.gguf_header import read_gguf_header
from tasks.recipe import RecipeError

if TYPE_CHECKING:
    import torch

PROBE = "Name three fruits and say what colour each of them is."
ANSWER_TOKENS = 24
# Rounding to bfloat16 moves next-token distributions of a small model by a few thousandths of a nat.
MAX_MEAN_KL = 0.05
# Vocabularies whose numbers are split into single digits before byte-pair merging; transformers reads the
# vocabulary of such a GGUF but not this rule, so "\n\n1" would become other tokens than the verifier was
# trained on.
_DIGIT_SPLITTERS = {"smollm", "starcoder", "refact", "command-r"}


def dequantise(gguf: Path, dtype: str, output: Path, log: logging.Logger) -> dict[str, int | float | str]:
    """Write config, weights, tokenizer, chat template and generation config of a GGUF file into `output`.

    Args:
        gguf: the quantised file.
        dtype: name of the torch dtype to store the weights in.
        output: existing folder.
        log: receives a sample answer.

    Returns:
        `num_layers`, `parameters`, `mean_kl` (nats, stored folder against the float32 weights on a chat
        prompt) and `sample_answer` (greedy).

    Raises:
        RecipeError: the file names no end of sequence, or the stored folder disagrees with its source.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    header = read_gguf_header(gguf)
    tokenizer = _tokenizer(gguf, header)
    source = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        **source,
        dtype=torch.float32,
        quantization_config=GgufConfig(**source, dequantize=True),
    ).eval()
    prompt = _probe_ids(tokenizer)
    reference = _log_probabilities(model, prompt)

    model = model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    for leftover in ("quantization_config", "_model_name_or_path"):
        model.config.__dict__.pop(leftover, None)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    parameters = model.num_parameters()
    num_layers = model.config.num_hidden_layers
    del model

    return {
        "num_layers": num_layers,
        "parameters": parameters,
        **_check_stored(output, prompt, reference, log),
    }


def _tokenizer(gguf: Path, header: dict[str, Any]) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if tokenizer.eos_token_id is None:
        raise RecipeError(f"verifier.file: {gguf.name} names no end-of-sequence token (tokenizer.ggml.eos_token_id)")
    if header.get("tokenizer.ggml.pre") in _DIGIT_SPLITTERS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    context_length = header.get(f"{header['general.architecture']}.context_length")
    if context_length is not None:
        tokenizer.model_max_length = int(context_length)
    for leftover in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(leftover, None)
    return tokenizer


def _check_stored(
    folder: Path, prompt: torch.Tensor, reference: torch.Tensor, log: logging.Logger
) -> dict[str, float | str]:
    """Load what was written, as a reader will, and compare it with `reference` [T, V] (log probabilities)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    again = _probe_ids(tokenizer)
    if again.tolist() != prompt.tolist():
        raise RecipeError(f"the tokenizer stored in {folder} gives other ids than its GGUF source: {again.tolist()}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    stored = _log_probabilities(model, prompt)
    mean_kl = float((reference.exp() * (reference - stored)).sum(-1).mean())
    if not mean_kl < MAX_MEAN_KL:  # also catches NaN
        raise RecipeError(
            f"the folder stored in {folder} disagrees with its GGUF source: mean KL {mean_kl:.4f} nats, "
            f"at most {MAX_MEAN_KL} expected from rounding; try verifier.dtype=float32 to see whether "
            "rounding is the cause"
        )
    answer_ids = model.generate(
        prompt, attention_mask=prompt.new_ones(prompt.shape), max_new_tokens=ANSWER_TOKENS, do_sample=False
    )[0, prompt.shape[1] :]
    answer = tokenizer.decode(answer_ids, skip_special_tokens=True)
    log.info("stored verifier answers %r with %r (mean KL to its source %.5f nats)", PROBE, answer, mean_kl)
    return {"mean_kl": round(mean_kl, 6), "sample_answer": answer}


def _probe_ids(tokenizer: Any) -> torch.Tensor:
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROBE}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    ids: torch.Tensor = encoded["input_ids"]
    return ids


def _log_probabilities(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """Next-token log probabilities [T, V] in float32 for ids [1, T]."""
    import torch

    with torch.inference_mode():
        logits: torch.Tensor = model(prompt).logits[0].float()
    return torch.log_softmax(logits, dim=-1)
