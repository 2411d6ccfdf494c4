"""A transformers verifier as decoding uses it: fed in pieces, rewound after rejections, its states kept.

Shape letters: T tokens fed, F fused aux width, N tokens fed at once, V vocabulary.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from dspark_model.config import DrafterConfig


class VerifierRun:
    """One text under a verifier.

    Keeps keys and values between feeds where rejected ones can be cropped away. Elsewhere (recurrent layers, windowed
    caches) each feed reads the whole text again: slower, never wrong.
    """

    aux_TF: Tensor
    """Fused states of all tokens fed and not rewound, in the order of the layer ids."""

    def __init__(self, model: PreTrainedModel, config: DrafterConfig) -> None:
        """Nothing fed yet.

        Args:
            model: causal language model in eval mode.
            config: of the drafter that reads the states.

        Raises:
            ValueError: the drafter was made for a verifier of other sizes, or the verifier is in training mode.
        """
        if model.training:
            raise ValueError("the verifier is in training mode, where dropout changes what it emits: call eval() on it")
        _check_sizes(model, config)
        self._model, self._layer_ids = model, config.aux_hidden_state_layer_ids
        cache = DynamicCache(config=model.config)
        croppable = not model._is_stateful and all(type(layer) is DynamicLayer for layer in cache.layers)
        self._cache = cache if croppable else None
        # transformers renamed the argument and drops the old name in 5.40.
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._ids: list[int] = []
        self.aux_TF = torch.empty(0, config.aux_width, dtype=model.dtype, device=model.device)

    def feed(self, ids: list[int]) -> Tensor:
        """Append tokens; logits [N, V] of what follows each of them."""
        self._ids += ids
        options = {"use_cache": False} if self._cache is None else {"use_cache": True, self._cache_name: self._cache}
        run_1N = torch.tensor([self._ids if self._cache is None else ids], device=self._model.device)
        output = self._model(input_ids=run_1N, output_hidden_states=True, **options)
        # Ids are below num_layers (DrafterConfig checks), where hidden_states[i] is the state after i layers.
        aux_NF = torch.cat([output.hidden_states[i][0] for i in self._layer_ids], -1)
        self.aux_TF = aux_NF if self._cache is None else torch.cat([self.aux_TF, aux_NF])
        return output.logits[0, -len(ids) :]

    def rewind(self, count: int) -> None:
        """Forget the last `count` tokens."""
        length = len(self._ids) - count
        self._ids, self.aux_TF = self._ids[:length], self.aux_TF[:length]
        if self._cache is not None and count:  # early releases of transformers 5 read crop(0) as "keep nothing"
            self._cache.crop(-count)


def _check_sizes(model: PreTrainedModel, config: DrafterConfig) -> None:
    verifier = model.config.get_text_config()
    for name, found, expected in (
        ("vocab_size", verifier.vocab_size, config.verifier_vocab_size),
        ("hidden_size", verifier.hidden_size, config.hidden_size),
        ("num_hidden_layers", verifier.num_hidden_layers, config.verifier_num_layers),
    ):
        if found != expected:
            raise ValueError(
                f"the verifier has {name}={found}, the drafter was made for {expected}: decode with its own verifier"
            )
