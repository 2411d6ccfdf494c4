"""A tiny Llama in a GGUF file, inside a distribution as pip leaves it."""

from __future__ import annotations

import base64
import hashlib
import json

from tests.tiny_verifier import CHAT_TEMPLATE, _train_tokenizer

HEADS, KV_HEADS, HIDDEN, LAYERS = 4, 2, 64, 3


def toy_llama():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_train_tokenizer().get_vocab_size(),
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def interleaved(weight, heads):
    """GGUF keeps the two halves of each rotary head interleaved."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, model, pre="smollm", architecture="llama", template=CHAT_TEMPLATE):
    """Write the model with the norms in float32 and the matrices in Q8_0; return the decoded matrices."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    tokenizer = json.loads(_train_tokenizer().to_str())
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(special["<|im_end|>"])
    writer.add_pad_token_id(special["<|endoftext|>"])
    if template:
        writer.add_chat_template(template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    decoded = {}
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        target = names.get_name(name, try_suffixes=(".weight",))
        if weight.ndim == 1:
            writer.add_tensor(target, weight)
            continue
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        stored = interleaved(weight, heads) if heads else weight
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(target, gguf.quantize(stored, kind), raw_dtype=kind)
        # Q8_0 works along a row, so that quantising commutes with the order of rows.
        decoded[name] = gguf.dequantize(gguf.quantize(weight, kind), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoded


def install(site, *, with_hash=True, **options):
    """A distribution `toy-model` 1.2, as pip leaves it; returns the decoded matrices."""
    package, info = site / "toy_model", site / "toy_model-1.2.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    decoded = write_gguf(package / "toy.gguf", toy_llama(), **options)
    digest = hashlib.sha256((package / "toy.gguf").read_bytes()).digest()
    mark = "sha256=" + base64.urlsafe_b64encode(digest).decode().rstrip("=") if with_hash else ""
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-model\nVersion: 1.2\n")
    (info / "RECORD").write_text(f"toy_model/toy.gguf,{mark},\ntoy_model-1.2.dist-info/RECORD,,\n")
    return decoded
