"""Findings in the settings of the draft's layers: sizes, kinds and causality, rope, fit to the verifier.

Read in vLLM 0.32: `model_executor/models/qwen3_dflash.py`, `model_executor/layers/rotary_embedding/__init__.py`,
`transformers_utils/config.py`, `config/speculative.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from dspark_model.findings import Facts, Finding
from dspark_model.foreign_config import DEFAULT_ROPE_THETA, LAYER_DEFAULTS, rope_settings

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
)
"""What vLLM's draft reads without a default (speculators format: its config class has none of Qwen3's)."""
VLLM_ROPE_THETA = 1000000.0


def layer_findings(facts: Facts) -> Iterator[Finding]:
    """All of this module's rules."""
    yield from _sizes(facts)
    yield from _kinds(facts)
    yield from _causality(facts)
    yield from _rope(facts)
    yield from _fit(facts)


def _name(facts: Facts, field: str) -> str:
    return f"transformer_layer_config.{field}" if facts.speculators else field


def _sizes(facts: Facts) -> Iterator[Finding]:
    layer = facts.layer
    absent = [field for field in REQUIRED if layer.get(field) is None] if facts.speculators else []
    if absent:
        yield Finding(
            "error", _name(facts, absent[0]), f"missing: {', '.join(absent)}",
            "stops: the draft model reads them without a default", "write the values of the trained layers",
        )  # fmt: skip
    width, heads = layer.get("hidden_size"), layer.get("num_attention_heads")
    guessed = width // heads if width and heads else None
    if facts.speculators and layer.get("head_dim") is None and guessed not in (None, LAYER_DEFAULTS["head_dim"]):
        yield Finding(
            "error", _name(facts, "head_dim"), "missing",
            f"takes hidden_size / num_attention_heads = {guessed}; transformers, with which it was trained, "
            f"{LAYER_DEFAULTS['head_dim']}: loading stops at the projections' shapes",
            "write the trained head_dim",
        )  # fmt: skip
    if layer.get("hidden_act") not in (None, "silu"):
        yield Finding(
            "error", _name(facts, "hidden_act"), repr(layer["hidden_act"]), "stops: only silu", "retrain with silu"
        )
    if layer.get("model_type") not in (None, "qwen3"):
        yield Finding(
            "warning", _name(facts, "model_type"), repr(layer["model_type"]),
            "builds Qwen3 layers whatever is named", "make sure that Qwen3 layers were trained, and write 'qwen3'",
        )  # fmt: skip


def _kinds(facts: Facts) -> Iterator[Finding]:
    layer, kinds, field = facts.layer, facts.kinds, _name(facts, "layer_types")
    if not kinds:
        return
    if not layer.get("layer_types"):
        # In DeepSpec's format transformers' Qwen3Config fills the kinds in, for vLLM too.
        if facts.speculators:
            expected = "sliding" in kinds
            yield Finding(
                "error" if expected else "note", field, "missing",
                "makes every layer full attention, bidirectional inside the block"
                + (f"; transformers' rule, with which it was trained, says {kinds}" if expected else ""),
                "write the kind of each layer",
            )  # fmt: skip
        return
    if len(kinds) != layer["num_hidden_layers"]:
        yield Finding(
            "error", field, f"{len(kinds)} entries for {layer['num_hidden_layers']} layers",
            "stops: one kind per layer", "write one kind per layer",
        )  # fmt: skip
    others = sorted({kind for kind in kinds if kind not in ("full", "sliding")})
    if others:
        yield Finding(
            "error", field, ", ".join(others),
            "stops at a kind that transformers does not know, and takes any other for full attention",
            "write full_attention or sliding_attention, as trained",
        )  # fmt: skip
    if "sliding" in kinds and layer.get("sliding_window") is None:
        yield Finding(
            "error", _name(facts, "sliding_window"), "missing, with sliding layers",
            "stops: sliding attention requires a window", "write the trained window",
        )  # fmt: skip
    if 0 < kinds.count("sliding") < len(kinds):
        yield Finding(
            "note", field, " ".join(kinds),
            "serves mixed kinds on its second-generation runner only, which needs a GPU: on CPU it stops",
            "for CPU, train with layers of one kind",
        )  # fmt: skip


def _causality(facts: Facts) -> Iterator[Finding]:
    is_causal, kinds = facts.layer.get("is_causal"), facts.kinds
    non_causal_windows = bool(facts.top.get("sliding_window_non_causal"))
    trained = [kind == "sliding" and not non_causal_windows for kind in kinds]
    if is_causal is None and non_causal_windows and "sliding" in kinds:
        yield Finding(
            "error", "sliding_window_non_causal", "true",
            "ignores it for DSpark: sliding layers are served causal inside the block, not as trained",
            f"write {_name(facts, 'is_causal')}: false, which makes every layer bidirectional",
        )  # fmt: skip
    if is_causal is not None and any(causal != bool(is_causal) for causal in trained):
        yield Finding(
            "error", _name(facts, "is_causal"), str(is_causal).lower(),
            f"makes every layer {_causal(bool(is_causal))} inside the block; as trained, layer by layer: "
            + ", ".join(_causal(causal) for causal in trained),
            "remove the key: then sliding layers are causal and full ones bidirectional",
        )  # fmt: skip


def _causal(is_causal: bool) -> str:
    return "causal" if is_causal else "bidirectional"


def _rope(facts: Facts) -> Iterator[Finding]:
    rope = rope_settings(facts.layer)
    field = _name(facts, "rope_parameters")
    if not rope and facts.speculators:
        yield Finding(
            "error", field, "missing",
            f"turns with rope_theta {VLLM_ROPE_THETA:.0f}; transformers, with which it was trained, with "
            f"{DEFAULT_ROPE_THETA:.0f}",
            "write rope_type and the trained rope_theta",
        )  # fmt: skip
    nested = facts.layer.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in nested.values()):
        yield Finding(
            "error", field, f"one setting per kind of layer ({', '.join(nested)})",
            "stops: it reads one flat setting for all layers; speculators trains with the sliding layers' one",
            "write that one flat",
        )  # fmt: skip
    partial = rope.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        yield Finding(
            "error", f"{field}.partial_rotary_factor", str(partial),
            "turns only that part of each head; transformers' Qwen3 rope, with which both trainers train, turns all "
            "of it",
            "remove the key, or write 1.0",
            "https://github.com/deepseek-ai/DeepSpec/issues/71",
        )  # fmt: skip
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        yield Finding(
            "warning", f"{field}.rope_type", repr(kind),
            "scales positions by it; so do speculators and DeepSpec in training, dspark_model does not and refuses it",
            "make sure that the drafter was trained with it; else write 'default' and remove the scaling's keys",
        )  # fmt: skip
    if "mrope_section" in rope:
        yield Finding(
            "note", f"{field}.mrope_section", str(rope["mrope_section"]),
            "builds a multimodal rotary embedding, which for plain positions turns as the plain one does",
            "remove the multimodal keys: a draft has text positions only",
        )  # fmt: skip


def _fit(facts: Facts) -> Iterator[Finding]:
    verifier, layer = facts.verifier, facts.layer
    if verifier is None:
        return
    for field, ours, theirs, effect in (
        ("hidden_size", layer.get("hidden_size"), verifier.hidden_size, "stops: the shared embedding does not fit"),
        (
            "vocab_size", layer.get("vocab_size"), verifier.vocab_size,
            "compares the draft with the verifier's size: a smaller one counts as a reduced vocabulary (d2t and "
            "lm_head required), a larger one must bring its own embed_tokens",
        ),
    ):  # fmt: skip
        if ours is not None and ours != theirs:
            yield Finding(
                "error", _name(facts, field), f"{ours}, the verifier has {theirs}", effect,
                "name the verifier that the drafter was trained for",
            )  # fmt: skip
    positions = layer.get("max_position_embeddings")
    if positions is not None and positions < verifier.max_position_embeddings:
        yield Finding(
            "warning", _name(facts, "max_position_embeddings"),
            f"{positions}, the verifier has {verifier.max_position_embeddings}",
            "sizes the draft's rope table by it and does not raise it for DSpark: longer contexts read outside it "
            "(the first-generation runner stops drafting there)",
            f"write at least the served length, such as {verifier.max_position_embeddings}: rope has no trained part",
        )  # fmt: skip
