"""
Token mixers: what a layer can have instead of self-attention.

A mixer is a module that replaces BERT's `attention.self`, and a row of `MIXERS`. The linear layer W_O, dropout,
residual and layer norm after it stay. Padded positions contribute nothing to the others.

Letters: B batch, n length, D hidden size, F filters, k length of a filter.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.bert.modeling_bert import BertSelfAttention

from ...checks import check_choice


if TYPE_CHECKING:
    from ...attention.mask_inputs import MaskInputs

NUM_FILTERS = 16
FILTER_LENGTH = 128


class TokenMixer(nn.Module):
    """
    Base of the mixers: each has a method `mix` of the input `(B, n, D)` of a layer and of its real tokens,
    `(B or 1, n, 1)`, 1 for a real token and 0 for padding.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()

    def mix(self, hidden_states: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """The output of the layer, `(B, n, D)`."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        mask_inputs: "MaskInputs | None" = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Mix `hidden_states` of shape `(B, n, D)`. Returns the same shape, and `None` for the probabilities."""
        if attention_mask is not None and attention_mask.dim() == 4:
            raise ValueError(
                "token_mixers other than 'attention' do not support a 4-D attention_mask, got one of shape "
                f"{tuple(attention_mask.shape)}: use a 2-D padding mask"
            )
        if mask_inputs is None:
            raise RuntimeError("a token mixer was called without its base model, which prepares the padding")
        if mask_inputs.padding is None:
            return self.mix(hidden_states, hidden_states.new_ones(1, hidden_states.shape[1], 1)), None
        return self.mix(hidden_states, mask_inputs.padding[..., None].to(hidden_states.dtype)), None


class AverageAttention(TokenMixer):
    """
    The mean of all real tokens, at every position: attention with the weights 1/n. It has no parameters, since a value
    projection before the mean would only multiply W_O.

    Source: Are Transformers Universal Approximators (arXiv 1912.10077), Section D.
    """

    def mix(self, hidden_states: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        mean = (hidden_states * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
        return mean.expand_as(hidden_states)


class BProj(TokenMixer):
    """
    `X W_P`, which together with W_O and the residual is the bi-linear projection `X + W_O X W_P`. W_P is n x n, with n
    the model's `max_position_embeddings`, so all inputs must have exactly this length.

    Source: arXiv 1912.10077, Section 5.1.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.positions = nn.Linear(config.max_position_embeddings, config.max_position_embeddings, bias=False)

    def mix(self, hidden_states: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        expected = self.positions.in_features
        if hidden_states.shape[1] != expected:
            raise ValueError(
                f"the token mixer 'bproj' takes inputs of exactly {expected} tokens (max_position_embeddings), got "
                f"{hidden_states.shape[1]}: pad them to that length"
            )
        return self.positions((hidden_states * real).transpose(1, 2)).transpose(1, 2)


class SepConv(TokenMixer):
    """
    A gated linear unit and a depth-wise convolution along the text, which together with W_O are a separable
    convolution. Each of its 16 filters of length 128 serves D / 16 neighboring channels. Position i reads the
    positions i - 64 to i + 63.

    Source: arXiv 1912.10077, Sections 5.2 and D; the unit and the sharing of filters: Pay Less Attention (arXiv
    1901.10430), Section 3.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.gated = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.filters = nn.Conv1d(NUM_FILTERS, NUM_FILTERS, FILTER_LENGTH, groups=NUM_FILTERS, bias=False)  # (F, 1, k)

    def mix(self, hidden_states: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        # Padding is zeroed after the gated unit, which has a bias.
        values = nn.functional.glu(self.gated(hidden_states), dim=-1) * real  # (B, n, D)
        batch, length, size = values.shape
        rows = values.view(batch, length, NUM_FILTERS, -1).permute(0, 3, 2, 1)  # (B, D / F, F, n)
        rows = nn.functional.pad(rows.flatten(0, 1), (FILTER_LENGTH // 2, (FILTER_LENGTH - 1) // 2))
        mixed = self.filters(rows).view(batch, -1, NUM_FILTERS, length)
        return mixed.permute(0, 3, 2, 1).reshape(batch, length, size)


MIXERS: dict[str, type[nn.Module]] = {
    "attention": BertSelfAttention,
    "sepconv": SepConv,
    "bproj": BProj,
    "average": AverageAttention,
}


def check_token_mixers(config: PreTrainedConfig) -> None:
    """Check that there is one mixer per layer, and that the model can have it."""
    names = config.token_mixers
    if names is None:
        return
    for name in names:
        check_choice("a name in token_mixers", name, tuple(MIXERS))
    if len(names) != config.num_hidden_layers:
        raise ValueError(
            f"token_mixers must have one name per layer, got {len(names)} names for num_hidden_layers "
            f"{config.num_hidden_layers}"
        )
    others = sorted(set(names) - {"attention"})
    if others and config.is_decoder:
        raise ValueError(f"token_mixers must all be 'attention' in a decoder: {others[0]!r} reads future tokens")
    if "sepconv" in others and config.hidden_size % NUM_FILTERS:
        raise ValueError(
            f"token_mixers 'sepconv' shares {NUM_FILTERS} filters between the channels: hidden_size must be a "
            f"multiple of {NUM_FILTERS}, got {config.hidden_size}"
        )
    if config.num_attention_layers == 0 and (config.search is not None or config.frozen or config.pattern != "dense"):
        raise ValueError(
            "token_mixers leave no layer with attention, so there is nothing to mask: set pattern 'dense', no search"
        )


def put_mixers(model: PreTrainedModel) -> None:
    """Replace the self-attention of BERT's layers by the `token_mixers` of its configuration."""
    config = model.config
    if config.token_mixers is None:
        return
    bert: Any = model.base_model
    for layer, name in zip(bert.encoder.layer, config.token_mixers, strict=True):
        if not isinstance(layer.attention.self, MIXERS[name]):
            layer.attention.self = MIXERS[name](config)


def fixed_length(config: PreTrainedConfig) -> int | None:
    """The length that all inputs of a model must have, or `None` if it may vary."""
    return config.max_position_embeddings if "bproj" in (getattr(config, "token_mixers", None) or ()) else None
