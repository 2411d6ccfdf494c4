"""Findings in the stored tensors: names, shapes and dtypes from headers, vocabulary maps, values no training leaves.

Read in vLLM 0.32: `model_executor/models/{qwen3_dspark,qwen3_dflash,utils}.py`, `model_executor/model_loader`,
`v1/worker/gpu/spec_decode/eagle/utils.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch

from dspark_model.checkpoint import EMBEDDING, HEAD, VERIFIER_OR_MAP_TENSORS
from dspark_model.checkpoint_files import FLOAT_DTYPES
from dspark_model.findings import Facts, Finding
from dspark_model.foreign_config import LAYER_DEFAULTS

BYTES = {"F32": 4, "BF16": 2, "F16": 2}
PREVIEW = 4
"""Names that a finding lists before it only counts."""


def tensor_findings(facts: Facts) -> Iterator[Finding]:
    """All of this module's rules. Reads every float tensor once, a few million numbers at a time."""
    yield from _names(facts)
    yield from _dtypes(facts)
    yield from _frozen(facts)
    yield from _vocabulary(facts)
    yield from _values(facts)


def expected_shapes(facts: Facts) -> dict[str, tuple[int, ...]]:
    """What a checkpoint must bring for vLLM's model, as trained; empty where config.json lacks a size."""
    layer, rank = facts.layer, facts.setting("markov_rank")
    D, I, L = (layer.get(name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))  # noqa: E741
    N = layer.get("num_attention_heads")
    V, W = facts.vocab_size, facts.draft_vocab_size
    if not (D and I and L and N and V and W and facts.layer_ids) or rank is None:
        return {}
    M, H = layer.get("num_key_value_heads") or N, layer.get("head_dim") or LAYER_DEFAULTS["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (D, len(facts.layer_ids) * D),
        "hidden_norm.weight": (D,),
        "norm.weight": (D,),
    }
    for i in range(L):
        shapes |= {
            f"layers.{i}.{name}.weight": shape
            for name, shape in (
                ("input_layernorm", (D,)),
                ("post_attention_layernorm", (D,)),
                ("self_attn.q_proj", (N * H, D)),
                ("self_attn.k_proj", (M * H, D)),
                ("self_attn.v_proj", (M * H, D)),
                ("self_attn.o_proj", (D, N * H)),
                ("self_attn.q_norm", (H,)),
                ("self_attn.k_norm", (H,)),
                ("mlp.gate_proj", (I, D)),
                ("mlp.up_proj", (I, D)),
                ("mlp.down_proj", (D, I)),
            )
        }
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (V, rank), "markov_head.markov_w2.weight": (W, rank)}
    if facts.has_confidence_head:
        width = D + (rank if facts.setting("confidence_head_with_markov") else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    if facts.reduced_vocab:
        shapes[HEAD] = (W, D)
    return shapes


def _names(facts: Facts) -> Iterator[Finding]:
    expected, stored = expected_shapes(facts), facts.files.tensors
    if not expected:
        return
    heads = {HEAD, "d2t"} if facts.reduced_vocab else set()
    for name in sorted(heads - set(stored)):
        yield Finding(
            "error", name, "missing, with a reduced vocabulary",
            "stops: the verifier's full head cannot be shared and draft ids could not be mapped",
            "export it with the checkpoint (d2t: int64 offsets, verifier id = draft id + d2t[draft id])",
        )  # fmt: skip
    if missing := sorted(set(expected) - set(stored) - heads):
        yield Finding(
            "error", _preview(missing), "missing",
            "does not notice: the parameters keep what memory held",
            "export the whole drafter",
        )  # fmt: skip
    # The Markov head's finding names these.
    known = {*expected, *VERIFIER_OR_MAP_TENSORS}
    if facts.setting("markov_head_type") != "vanilla":
        known |= {f"markov_head.{part}_proj.{kind}" for part in ("gate", "joint") for kind in ("weight", "bias")}
    if unknown := sorted(set(stored) - known):
        files = sorted({stored[name].file.name for name in unknown})
        yield Finding(
            "error", _preview(unknown), f"unknown, in {', '.join(files)}",
            "loads all safetensors files of the folder (those that the index names, if there is one) and stops at "
            "unknown parameters",
            "remove them from the checkpoint",
        )  # fmt: skip
    for name in sorted(set(expected) & set(stored)):
        if stored[name].shape != expected[name]:
            yield Finding(
                "error", name, f"shape {list(stored[name].shape)}, config.json says {list(expected[name])}",
                "stops while loading", "export config.json and weights of the same drafter",
            )  # fmt: skip


def _dtypes(facts: Facts) -> Iterator[Finding]:
    special = ("d2t", "t2d")
    by_dtype: dict[str, list[str]] = {}
    for name, tensor in sorted(facts.files.tensors.items()):
        if name not in special:
            by_dtype.setdefault(tensor.dtype, []).append(name)
    for dtype, names in sorted(by_dtype.items()):
        if dtype not in FLOAT_DTYPES:
            yield Finding(
                "warning", _preview(names), f"stored as {dtype}",
                "needs a quantization_config that fits; without one the raw numbers are taken for weights",
                "export plain bfloat16 weights; dspark_model reads no quantised drafter",
            )  # fmt: skip
        elif dtype != "BF16":
            yield Finding(
                "note", _preview(names), f"stored as {dtype}",
                "casts weights to the verifier's dtype (the confidence head to float32)",
                "export bfloat16" + (": half the size" if dtype == "F32" else ""),
            )  # fmt: skip


def _frozen(facts: Facts) -> Iterator[Finding]:
    for name in (EMBEDDING, HEAD):
        if name in facts.files.tensors and not (name == HEAD and facts.reduced_vocab):
            tensor = facts.files.tensors[name]
            size = prod(tensor.shape) * BYTES.get(tensor.dtype, 1) / 1e6
            yield Finding(
                "note", name, f"stored, {size:.1f} MB",
                "shares the verifier's only if every number is equal; else it keeps this copy and drafts with it",
                "leave it out: the verifier's own is used",
            )  # fmt: skip


def _vocabulary(facts: Facts) -> Iterator[Finding]:
    stored, V, W = facts.files.tensors, facts.vocab_size, facts.draft_vocab_size
    if not V or not W:
        return
    if facts.speculators and facts.top.get("draft_vocab_size") is None:
        yield Finding(
            "warning", "draft_vocab_size", "missing",
            "takes the whole vocabulary; speculators takes 32000", "write the trained draft_vocab_size",
        )  # fmt: skip
    if W > V:
        yield Finding(
            "error", "draft_vocab_size", f"{W}, vocab_size is {V}",
            "proposes ids that the verifier does not have", "write the trained draft_vocab_size",
        )  # fmt: skip
    if "d2t" not in stored:
        return
    if not facts.reduced_vocab:
        yield Finding(
            "error", "d2t", "stored, with the whole vocabulary",
            "keeps no map then and stops at an unknown parameter", "remove d2t (and t2d), or write draft_vocab_size",
        )  # fmt: skip
        return
    yield from _map_findings(facts, V, W)


def _map_findings(facts: Facts, V: int, W: int) -> Iterator[Finding]:
    stored = facts.files.tensors
    if stored["d2t"].shape != (W,) or not stored["d2t"].dtype.startswith(("I", "U")):
        yield Finding(
            "error", "d2t", f"{stored['d2t'].dtype} {list(stored['d2t'].shape)}, expected I64 [{W}]",
            "stops while loading, or takes rounded ids", "write int64 offsets: verifier id = draft id + d2t[draft id]",
        )  # fmt: skip
        return
    offsets = facts.files.read("d2t").long()
    ids = torch.arange(W) + offsets
    if not 0 <= int(ids.min()) <= int(ids.max()) < V:
        absolute = 0 <= int(offsets.min()) <= int(offsets.max()) < V
        yield Finding(
            "error", "d2t", f"verifier ids {int(ids.min())}..{int(ids.max())} outside 0..{V - 1}"
            + (" (d2t holds ids instead of offsets)" if absolute else ""),
            "adds d2t to the draft id: proposes ids that do not exist",
            "write offsets: verifier id minus draft id",
        )  # fmt: skip
    elif not (ids.diff() > 0).all():
        twice = len(ids.unique()) < W
        yield Finding(
            "error" if twice else "warning", "d2t", "verifier ids repeat" if twice else "verifier ids do not ascend",
            "maps several draft ids to one token, so that their probabilities are not added up" if twice
            else "maps as it says; trainers order the head's rows by t2d, ascending, so rows and ids may not belong "
            "together",
            "write draft ids in ascending order of verifier ids, each once",
        )  # fmt: skip
    elif "t2d" in stored:
        t2d = facts.files.read("t2d").bool().flatten()
        kept = torch.zeros(V, dtype=torch.bool)
        kept[ids] = True
        if not torch.equal(t2d, kept):
            yield Finding(
                "warning", "t2d", f"marks {int(t2d.sum())} ids, not the {W} that d2t maps to",
                "ignores t2d and goes by d2t; speculators selects the verifier's rows by t2d",
                "rebuild t2d from d2t after making sure which of them the head was trained with",
            )  # fmt: skip


def _values(facts: Facts) -> Iterator[Finding]:
    broken, zero = [], []
    for name, tensor in sorted(facts.files.tensors.items()):
        if tensor.dtype not in FLOAT_DTYPES or not prod(tensor.shape):
            continue
        finite, anything = True, False
        for rows in facts.files.read_rows(name):
            finite &= bool(rows.isfinite().all())
            anything |= bool(rows.any())
        if not finite:
            broken.append(name)
        elif not anything and not name.endswith(".bias"):  # a bias may start and stay there
            zero.append(name)
    if broken:
        yield Finding(
            "error", _preview(broken), "NaN or infinite values", "drafts garbage, without an error",
            "export an earlier step",
        )  # fmt: skip
    if zero:
        yield Finding(
            "warning", _preview(zero), "all zeros", "serves it: that part of the drafter does nothing",
            "make sure that it was trained and exported",
        )  # fmt: skip


def _preview(names: list[str] | Mapping[str, object]) -> str:
    names = list(names)
    return ", ".join(names[:PREVIEW]) + (f" and {len(names) - PREVIEW} more" if len(names) > PREVIEW else "")
