"""Findings in the top level of config.json: block layout, proposals, tapped layers, heads, the verifier's name.

Read in vLLM 0.32: `transformers_utils/configs/speculators/{base,algos}.py`, `transformers_utils/config.py`,
`v1/worker/gpu/spec_decode/dspark/speculator.py`, `model_executor/models/{interfaces,qwen3_dspark}.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dspark_model.checkpoint import is_relative_path
from dspark_model.findings import Facts, Finding


def format_findings(facts: Facts) -> Iterator[Finding]:
    """All of this module's rules."""
    if facts.speculators:
        yield from _sections(facts)
        yield from _anchor(facts)
        yield from _proposals(facts)
        yield from _verifier(facts)
    else:
        yield _deepspec(facts)
    yield from _layer_ids(facts)
    yield from _mask_token(facts)
    yield from _markov(facts)
    yield from _confidence(facts)


def _sections(facts: Facts) -> Iterator[Finding]:
    top = facts.top
    if not facts.section:
        yield Finding(
            "error", "speculators_config", "missing",
            "does not recognise the folder and stops (neither speculators_config nor model_type)",
            "write the section: algorithm, proposal_methods with speculative_tokens, verifier with name_or_path",
        )  # fmt: skip
    elif facts.speculative_tokens is None:
        yield Finding(
            "error", "speculators_config.proposal_methods[0].speculative_tokens", "missing",
            "`vllm serve DIR` stops: invalid speculators config structure",
            f"write {facts.trained_proposals}, what the block was trained to propose",
        )  # fmt: skip
    if "speculators_model_type" not in top:
        yield Finding(
            "error", "speculators_model_type", "missing", "stops: not a speculators-format model", 'write "dspark"'
        )
    if top.get("model_type") not in (None, "speculators"):
        yield Finding(
            "error", "model_type", repr(top["model_type"]),
            "takes the top-level model_type before speculators_config, and transformers does not know it: stops",
            "remove the key from the top level of config.json",
        )  # fmt: skip


def _anchor(facts: Facts) -> Iterator[Finding]:
    if facts.top.get("sample_from_anchor") is None:
        yield Finding(
            "error", "sample_from_anchor", "missing",
            "takes it for false: the anchor's slot proposes nothing and the mask slots the token at their own place; "
            "a drafter trained with true (speculators' and DeepSpec's default) is then one place off: under 1 % "
            "acceptance, no error",
            'write "sample_from_anchor": true into config.json (false if it was trained so)',
            "https://github.com/vllm-project/vllm/issues/56792",
        )  # fmt: skip


def _proposals(facts: Facts) -> Iterator[Finding]:
    tokens, trained = facts.speculative_tokens, facts.trained_proposals
    if facts.top.get("block_size") is None:
        yield Finding(
            "warning", "block_size", "missing", "does not need it; speculators takes 8", "write the trained block size"
        )
    if tokens is None or trained is None or tokens == trained:
        return
    layout = f"block_size={facts.block_size}, sample_from_anchor={facts.sample_from_anchor}: {trained} trained"
    if tokens > trained:
        yield Finding(
            "warning", "speculators_config.proposal_methods[0].speculative_tokens", f"{tokens} ({layout})",
            "does not check it against block_size: the slots beyond were never trained, and each is still verified",
            f"write {trained}",
        )  # fmt: skip
    else:
        yield Finding(
            "note", "speculators_config.proposal_methods[0].speculative_tokens", f"{tokens} ({layout})",
            "proposes fewer tokens than trained, which works",
            f"write {trained} unless shorter blocks measured faster",
        )  # fmt: skip


def _verifier(facts: Facts) -> Iterator[Finding]:
    field, name = "speculators_config.verifier.name_or_path", facts.verifier_name
    if not facts.section:
        return
    if not name:
        yield Finding(
            "error", field, "missing",
            "`vllm serve DIR` swaps to this model, and stops without it",
            "write the verifier's hub id or absolute path",
        )  # fmt: skip
    elif is_relative_path(name):
        yield Finding(
            "warning", field, repr(name),
            "resolves it from the folder that the server starts in, or takes it for a hub id",
            "write a hub id 'owner/name' or an absolute path",
        )  # fmt: skip
    elif Path(name).is_absolute() and not Path(name).is_dir():
        yield Finding(
            "note", field, repr(name),
            "`vllm serve DIR` needs that folder on the serving machine; it is not on this one",
            "serve where it exists, or write the verifier's hub id",
        )  # fmt: skip


def _deepspec(facts: Facts) -> Finding:
    given = f'{{"method":"dspark","model":"DIR","num_speculative_tokens":{facts.block_size}}}'
    return Finding(
        "warning", "speculators_config", "missing: DeepSpec's own format",
        f"reads it as a draft, given a verifier: vllm serve VERIFIER --speculative-config '{given}'; `vllm serve DIR` "
        "takes the drafter for the model to serve and stops",
        "serve it that way, or convert: dspark_model.checkpoint.load_checkpoint, then save_checkpoint",
    )  # fmt: skip


def _layer_ids(facts: Facts) -> Iterator[Finding]:
    field, ids, depth = facts.layer_ids_field, facts.layer_ids, facts.verifier_num_layers
    shift = 0 if facts.speculators else 1
    found = str([i - shift for i in ids])
    if not ids:
        yield Finding("error", field, "missing", "stops: the tapped layers are required", "write the trained layer ids")
        return
    once = sorted(set(ids))
    if len(once) != len(ids):
        yield Finding(
            "error", field, f"{found} (duplicates)",
            f"captures each layer once, {len(once)} states where fc expects {len(ids)}: stops at the first request",
            "retrain with distinct ids, or add up the column groups of fc.weight that belong to one layer",
        )  # fmt: skip
    elif once != ids:
        yield Finding(
            "error", field, f"{found} (not ascending)",
            f"captures a sorted set and hands the states over as {[i - shift for i in once]}: where the trainer "
            "concatenated them in the order of the list, fc reads the wrong layers, without an error",
            "if the states came from vLLM, which sorts in training as well, write the sorted list; else reorder the "
            "column groups of fc.weight too",
        )  # fmt: skip
    if once[0] < 1:
        yield Finding(
            "warning", field, f"{found} (the embedding)",
            "taps the embedding's output where the verifier's class offers it, scaled or not as that class does",
            f"train with ids of {1 - shift} or more",
        )  # fmt: skip
    if depth is not None and once[-1] > depth:
        yield Finding(
            "error", field, f"{found}, the verifier has {depth} layers",
            "captures fewer states than fc expects: stops at the first request",
            "serve the verifier that the drafter was trained for",
        )  # fmt: skip
    elif once[-1] == depth:
        yield Finding(
            "warning", field, f"{found}, the verifier has {depth} layers",
            "hands over the last layer's output before the final norm; transformers' hidden_states ends with the "
            "normed one, and an extraction that appends the last state finds it twice",
            f"train with ids of at most {depth - 1 - shift}",
        )  # fmt: skip


def _mask_token(facts: Facts) -> Iterator[Finding]:
    mask, vocab = facts.top.get("mask_token_id"), facts.vocab_size
    if mask is None:
        yield Finding(
            "error", "mask_token_id", "missing", "stops: parallel drafting needs it", "write the id used in training"
        )
    elif vocab is not None and not 0 <= mask < vocab:
        yield Finding(
            "error", "mask_token_id", f"{mask}, the vocabulary has ids 0..{vocab - 1}",
            "looks up a row that the embedding does not have: garbage or a crash in every masked slot",
            "write the id used in training",
        )  # fmt: skip


def _markov(facts: Facts) -> Iterator[Finding]:
    kind, rank = facts.setting("markov_head_type"), facts.setting("markov_rank")
    if facts.top.get("markov_rank") is None:
        yield Finding(
            "error", "markov_rank", "missing", "stops: the model reads it without a default", "write the trained rank"
        )
    if rank == 0:
        yield Finding(
            "error", "markov_rank", "0",
            "builds an empty head: on CPU the process dies while it packs the empty matrix, elsewhere drafting without "
            "a Markov bias is untested",
            "train with a Markov head, or serve it as a DFlash drafter",
        )  # fmt: skip
    elif kind not in (None, "vanilla"):
        extra = sorted(n for n in facts.files.tensors if n.startswith(("markov_head.gate_", "markov_head.joint_")))
        yield Finding(
            "error", "markov_head_type", repr(kind),
            "builds the vanilla head whatever is named, and its loader stops at the head's further tensors as unknown "
            f"parameters ({', '.join(extra) or 'none stored: then it drafts by the vanilla rule'})",
            "train with markov_head_type 'vanilla'; dspark_model reads this head for evaluation",
        )  # fmt: skip


def _confidence(facts: Facts) -> Iterator[Finding]:
    top, stored = facts.top, facts.has_confidence_head
    if stored and not top.get("enable_confidence_head"):
        yield Finding(
            "warning" if top.get("enable_confidence_head") is None else "note",
            "enable_confidence_head", str(top.get("enable_confidence_head", "missing")).lower(),
            "takes a missing flag for false and drops the head's weights: adaptive verification falls back to an "
            "estimate",
            'write "enable_confidence_head": true to serve the head',
        )  # fmt: skip
    if not stored and top.get("enable_confidence_head"):
        yield Finding(
            "warning", "confidence_head.proj.weight", "missing, although enable_confidence_head is true",
            "disables the head without a word",
            "export the head's weights, or write enable_confidence_head false",
        )  # fmt: skip
    if stored and top.get("enable_confidence_head") and top.get("confidence_head_with_markov") is None:
        yield Finding(
            "error", "confidence_head_with_markov", "missing",
            "takes it for false and builds a head of width hidden_size: loading stops if it was trained with the "
            "Markov embedding",
            "write how it was trained (both trainers' published runs: true)",
        )  # fmt: skip
