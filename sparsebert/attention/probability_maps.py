"""
Probability maps: softmax, or a sparser function that turns a row of attention scores into probabilities.

A map works on the last dimension of the scores `(..., m)`. A score of -inf is absent: its probability is 0 and it gets
no gradient. A row without any score gets probabilities of 0. Every map preserves the order of the scores and ignores a
constant added to a row, so a mask may enter as a term of the scores.

To add a map, write a function of scores in which every row has at least one score, with keyword-only parameters, and
give it a row in `PROBABILITY_MAPS`.

Letters: L layers, H heads, n queries, m keys.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ..checks import check_choice, nearest
from ..masks.exported import exporting


LEARNED = "learned"
# Between 1 and this, float32 cannot tell the terms of entmax apart.
LEAST_ALPHA = 1.001
# A learned alpha stays in this interval: at 1 its gradient is undefined, from 2 on few keys are left to learn from.
LEARNED_ALPHA = (1.01, 2.0)


def _entmax_package():
    try:
        import entmax
    except ImportError as error:
        names = ", ".join(name for name, row in PROBABILITY_MAPS.items() if row.needs_entmax)
        raise ValueError(
            f"the probability maps {names} need the package entmax: pip install 'sparsebert[maps]'"
        ) from error
    return entmax


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """`exp(s_j) / sum_i exp(s_i)`."""
    return torch.softmax(scores, dim=-1)


def topk(scores: torch.Tensor, *, k: int) -> torch.Tensor:
    """
    Softmax of the k largest scores, 0 elsewhere.

    Args:
        scores (`torch.Tensor` of shape `(..., m)`): The scores.
        k (`int`): In [1, m]. Exactly k keys are kept, whichever of several equal scores that takes.

    Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Section B.1.
    """
    largest, places = scores.topk(k, dim=-1)
    return torch.zeros_like(scores).scatter(-1, places, torch.softmax(largest, dim=-1))


def sparsegen_lin(scores: torch.Tensor, *, lam: float) -> torch.Tensor:
    """
    `max(0, (s_j - tau) / (1 - lambda))`, with tau such that a row sums to 1.

    Args:
        scores (`torch.Tensor` of shape `(..., m)`): The scores.
        lam (`float`): lambda < 1. With 0 this is sparsemax; the closer to 1, the fewer keys are left.

    Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Section B.2.
    """
    return _entmax_package().sparsemax(scores / (1 - lam), dim=-1)


def sparsemax(scores: torch.Tensor) -> torch.Tensor:
    """`max(0, s_j - tau)`, with tau such that a row sums to 1: the Euclidean projection onto the simplex."""
    return _entmax_package().sparsemax(scores, dim=-1)


def entmax15(scores: torch.Tensor) -> torch.Tensor:
    """[`entmax`] with alpha = 1.5, computed exactly and faster."""
    return _entmax_package().entmax15(scores, dim=-1)


def entmax(scores: torch.Tensor, *, alpha: float | torch.Tensor) -> torch.Tensor:
    """
    `max(0, (alpha - 1) s_j - tau)^(1 / (alpha - 1))`, with tau such that a row sums to 1.

    In float32 the result is exact to 2e-5 for alpha up to 2; well above 3, nearly equal scores differ by rounding.

    Args:
        scores (`torch.Tensor` of shape `(..., m)`): The scores.
        alpha (`float` or `torch.Tensor`): 1, which is softmax, or at least `LEAST_ALPHA`. A tensor with all values
            above 1 is broadcast over the rows `(..., 1)` and gets a gradient.

    Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Section B.3.
    """
    if not torch.is_tensor(alpha):
        if alpha == 1:
            return torch.softmax(scores, dim=-1)
        alpha = torch.tensor(alpha, dtype=scores.dtype, device=scores.device)
    halvings = 50 if scores.dtype == torch.float64 else 30  # of an interval that is at most 1 wide
    return _entmax_package().entmax_bisect(scores, alpha.to(scores.dtype), dim=-1, n_iter=halvings)


def _is_number(value, kinds=(int, float)):
    return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)


def _check_k(k, length):
    if not (_is_number(k, int) and 1 <= k <= length):
        raise ValueError(f"k of topk must be a whole number from 1 to the {length} keys, got {k!r}")


def _check_lam(lam, length):
    if not (_is_number(lam) and lam < 1):
        raise ValueError(f"lam of sparsegen_lin must be less than 1, got {lam!r}")


def _check_alpha(alpha, length):
    if not (_is_number(alpha) and (alpha == 1 or alpha >= LEAST_ALPHA)):
        raise ValueError(f"alpha of entmax must be 1 (softmax) or at least {LEAST_ALPHA}, got {alpha!r}")


class MapFunction:
    """
    A probability map as a function of any scores, rows without a score included.

    Args:
        function (`Callable`): The map of rows that have a score: `(scores, **parameters) -> probabilities`, both of
            shape `(..., m)`.
        checks (`Mapping`, *optional*): For each parameter, a function of its value and of m that raises a `ValueError`
            if the value is out of its range. Tensors are not checked.
        needs_entmax (`bool`, *optional*, defaults to `False`): Whether the map needs the package entmax.
    """

    def __init__(
        self,
        function: Callable[..., torch.Tensor],
        checks: Mapping[str, Callable[[Any, int], None]] | None = None,
        needs_entmax: bool = False,
    ):
        functools.update_wrapper(self, function)
        self.function = function
        self.checks = dict(checks or {})
        self.needs_entmax = needs_entmax
        self.parameters = [
            name for name, field in inspect.signature(function).parameters.items() if field.kind is field.KEYWORD_ONLY
        ]

    def check(self, parameters: Mapping[str, Any], length: int) -> None:
        """Check the values of some parameters for rows of `length` keys."""
        for name, value in parameters.items():
            if name in self.checks and not torch.is_tensor(value):
                self.checks[name](value, length)

    def __call__(self, scores: torch.Tensor, **parameters: Any) -> torch.Tensor:
        if not exporting():  # where k may be a symbol
            self.check(parameters, scores.shape[-1])
        live = (scores > -torch.inf).any(-1, keepdim=True)
        return self.function(scores.masked_fill(~live, 0.0), **parameters).masked_fill(~live, 0.0)


PROBABILITY_MAPS: dict[str, MapFunction] = {
    "softmax": MapFunction(softmax),
    "topk": MapFunction(topk, checks={"k": _check_k}),
    "sparsegen_lin": MapFunction(sparsegen_lin, checks={"lam": _check_lam}, needs_entmax=True),
    "sparsemax": MapFunction(sparsemax, needs_entmax=True),
    "entmax15": MapFunction(entmax15, needs_entmax=True),
    "entmax": MapFunction(entmax, checks={"alpha": _check_alpha}, needs_entmax=True),
}


def check_probability_map(name: str, parameters: Mapping[str, Any], length: int) -> None:
    """
    Check a map and its parameters as they stand in a configuration, where `alpha` may be `"learned"`; `length` is the
    number of keys of the longest row.
    """
    check_choice("probability_map", name, PROBABILITY_MAPS)
    row = PROBABILITY_MAPS[name]
    for key in parameters:
        if key not in row.parameters:
            raise nearest(f"parameter of probability map {name!r}:", key, row.parameters)
    for key in row.parameters:
        if key not in parameters:
            raise ValueError(f"the probability map {name!r} needs the parameter {key!r} in probability_map_kwargs")
    row.check({key: value for key, value in parameters.items() if (key, value) != ("alpha", LEARNED)}, length)


class Float32Module(nn.Module):
    """
    A module whose parameters stay float32 when a model is cast, as by `model.to(torch.bfloat16)`: at the size of mask
    logits, bfloat16 does not resolve a step of the optimizer, and they are saved and loaded in float32.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        def uncast(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            cast = tensor.dtype == torch.float32 and result.is_floating_point() and result.dtype != tensor.dtype
            return tensor.to(result.device) if cast else result

        return super()._apply(uncast, recurse)


class ProbabilityMap(Float32Module):
    """
    The map of a model's attention.

    A learned alpha is the module's only parameter: `alpha_logits` of shape `(L, H)`, otherwise `None`. Alpha starts at
    1.5 and grows with the sigmoid of the logits within `LEARNED_ALPHA`.

    Args:
        name (`str`): A key of `PROBABILITY_MAPS`.
        parameters (`dict`, *optional*): The map's parameters, see [`check_probability_map`].
        num_layers (`int`): L.
        num_heads (`int`): H.

    Raises:
        ValueError: If the map needs the package entmax and it is not installed.

    Source: Adaptively Sparse Transformers (arXiv 1909.00015), Section 4, for a learned alpha.
    """

    alpha_logits: nn.Parameter | None

    def __init__(self, name: str, parameters: Mapping[str, Any] | None, num_layers: int, num_heads: int):
        super().__init__()
        self.name = name
        self.arguments = dict(parameters or {})
        self.register_parameter("alpha_logits", None)
        if PROBABILITY_MAPS[name].needs_entmax:
            _entmax_package()
        if self.arguments.get("alpha") == LEARNED:
            self.alpha_logits = nn.Parameter(torch.empty(num_layers, num_heads))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set a learned alpha to 1.5."""
        if self.alpha_logits is not None:
            low, high = LEARNED_ALPHA
            start = (1.5 - low) / (high - low)
            init.constant_(self.alpha_logits, math.log(start / (1 - start)))

    def alpha(self) -> torch.Tensor | None:
        """The learned alpha of every layer and head, float32 `(L, H)`, or `None`."""
        if self.alpha_logits is None:
            return None
        low, high = LEARNED_ALPHA
        return low + (high - low) * torch.sigmoid(self.alpha_logits.float())

    def forward(self, num_keys: int) -> tuple[Callable[[torch.Tensor], torch.Tensor] | None, ...]:
        """
        The functions that one forward applies to its scores `(B, H, n, m)`: one per layer, or one for all layers;
        `None` for softmax.
        """
        if self.name == "softmax":
            return (None,)
        function, arguments = PROBABILITY_MAPS[self.name], dict(self.arguments)
        if (alphas := self.alpha()) is not None:
            return tuple(functools.partial(function, alpha=alpha[:, None, None]) for alpha in alphas)
        if "k" in arguments:
            arguments["k"] = min(arguments["k"], num_keys)  # an input shorter than k keeps all its keys
        return (functools.partial(function, **arguments),)
