"""The fields that `attach` takes by name, for editors and type checkers; [`MaskFields`] says what they mean."""

from typing import TypedDict


class MaskUse(TypedDict, total=False):
    """How a mask is used: for any mask or search."""

    allow_empty_rows: bool
    diagonal: str | None
    last_token: str | None
    length_policy: str | None
    rest: str | None
    skip_padding: bool
    special_rows: bool | None


class PatternConfig(MaskUse, total=False):
    """Fields of a pattern."""

    mask_length: int | None
    head_configuration: str | None
    mask_seed: int
    pattern_kwargs: dict | None


class SearchConfig(MaskUse, total=False):
    """Fields of a search."""

    block_size: int
    hard: bool | None
    initial_decay: float | int | None
    initial_sparsity: float | int | None
    mask_constant: float | int | None
    mask_form: str | None
    mask_length: int | None
    mask_logit_scale: float | int
    noise_scale: float | int | None
    query_block_size: int | None
    share_layers: bool
    share_noise: bool
    sparsity_ramp: float | int
    sparsity_scope: str
    sparsity_warmup: float | int
    sparsity_weight: float | int
    special_tokens: str | None
    symmetric: bool
    target_sparsity: float | int | None
    temperature: float | int
    temperature_end: float | int | None


class AttachFields(PatternConfig, SearchConfig, total=False):
    """All of these, and where on the Hub a mask is."""

    revision: str | None
    subfolder: str | None
    token: str | None
