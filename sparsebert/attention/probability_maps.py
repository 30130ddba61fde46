"""
Probability maps: what turns a row of attention scores into probabilities, softmax or a sparser map.

A map is a function of scores `(..., m)` and of its own keyword parameters, and a row of `PROBABILITY_MAPS`. It works
on the last dimension. A score of -inf counts as absent: its probability is 0 and it gets no gradient; where all of a
row are absent, all its probabilities are 0. Every map leaves the order of the scores alone and ignores a constant
added to a row, so a mask may enter as a term of the scores.

Letters: L layers, H heads, n queries, m keys.
"""

import difflib
import functools
import inspect
import math

import torch
from torch import nn
from transformers import initialization as init


LEARNED = "learned"
# Between 1 and this, float32 cannot tell the terms of entmax apart.
LEAST_ALPHA = 1.001
# A learned alpha stays in this interval: at 1 the gradient is undefined, from 2 on few keys are left to learn from.
LEARNED_ALPHA = (1.01, 2.0)


def _rowwise(function):
    """A map of rows that may be all absent, out of one of rows with a score."""

    @functools.wraps(function)
    def mapped(scores, **parameters):
        live = (scores > -torch.inf).any(-1, keepdim=True)
        return function(scores.masked_fill(~live, 0.0), **parameters).masked_fill(~live, 0.0)

    return mapped


def _entmax_package():
    try:
        import entmax
    except ImportError as error:
        raise ValueError(
            "the probability maps sparsegen_lin, sparsemax, entmax15 and entmax need the package entmax: "
            "pip install 'sparsebert[maps]'"
        ) from error
    return entmax


@_rowwise
def softmax(scores):
    """`exp(s_j) / sum_i exp(s_i)`."""
    return torch.softmax(scores, dim=-1)


@_rowwise
def topk(scores, *, k):
    """
    Softmax of the k largest scores, 0 elsewhere.

    Args:
        scores (`torch.Tensor` of shape `(..., m)`)
        k (`int`): In [1, m]. Of equal scores at the border, only as many are kept as make k.

    Raises:
        ValueError: If `k` is out of its range.

    Source: O(n) Connections are Expressive Enough (arXiv 2006.04862), Section B.1.
    """
    _check_k(k, scores.shape[-1])
    largest, places = scores.topk(k, dim=-1)
    return torch.zeros_like(scores).scatter(-1, places, torch.softmax(largest, dim=-1))


@_rowwise
def sparsegen_lin(scores, *, lam):
    """
    `max(0, (s_j - tau) / (1 - lambda))`, tau such that a row sums to 1.

    Args:
        scores (`torch.Tensor` of shape `(..., m)`)
        lam (`float`): lambda < 1. 0 is sparsemax; the closer to 1, the fewer keys are left.

    Raises:
        ValueError: If `lam` is not less than 1.

    Source: arXiv 2006.04862, Section B.2.
    """
    _check_lam(lam)
    return _entmax_package().sparsemax(scores / (1 - lam), dim=-1)


@_rowwise
def sparsemax(scores):
    """`max(0, s_j - tau)`, tau such that a row sums to 1: the Euclidean projection onto the simplex."""
    return _entmax_package().sparsemax(scores, dim=-1)


@_rowwise
def entmax15(scores):
    """[`entmax`] with alpha = 1.5, exactly and faster."""
    return _entmax_package().entmax15(scores, dim=-1)


@_rowwise
def entmax(scores, *, alpha):
    """
    `max(0, (alpha - 1) s_j - tau)^(1 / (alpha - 1))`, tau such that a row sums to 1.

    Args:
        scores (`torch.Tensor` of shape `(..., m)`)
        alpha (`float` or `torch.Tensor`): 1, which is softmax, or at least `LEAST_ALPHA`; 2 is sparsemax. A tensor,
            all of it above 1, is broadcast over the rows `(..., 1)` and gets a gradient. In float32 it is exact to
            2e-5 up to 2; well above 3, nearly equal scores are told apart by rounding.

    Raises:
        ValueError: If `alpha` is out of its range.

    Source: arXiv 2006.04862, Section B.3.
    """
    if not torch.is_tensor(alpha):
        _check_alpha(alpha)
        if alpha == 1:
            return torch.softmax(scores, dim=-1)
        alpha = torch.tensor(alpha, dtype=scores.dtype, device=scores.device)
    halvings = 50 if scores.dtype == torch.float64 else 30  # of an interval that is at most 1 wide
    return _entmax_package().entmax_bisect(scores, alpha.to(scores.dtype), dim=-1, n_iter=halvings)


PROBABILITY_MAPS = {
    function.__name__: function for function in (softmax, topk, sparsegen_lin, sparsemax, entmax15, entmax)
}


def _is_number(value, kinds=(int, float)):
    return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)


def _check_k(k, length):
    if not (_is_number(k, int) and 1 <= k <= length):
        raise ValueError(f"k of topk must be a whole number from 1 to the {length} keys, got {k!r}")


def _check_lam(lam):
    if not (_is_number(lam) and lam < 1):
        raise ValueError(f"lam of sparsegen_lin must be less than 1, got {lam!r}")


def _check_alpha(alpha):
    if not (_is_number(alpha) and (alpha == 1 or alpha >= LEAST_ALPHA)):
        raise ValueError(f"alpha of entmax must be 1 (softmax) or at least {LEAST_ALPHA}, got {alpha!r}")


_CHECKS = {"lam": _check_lam, "alpha": _check_alpha}


def check_probability_map(name, parameters, length):
    """
    Whether a map and its parameters, as in a configuration, can be used.

    Args:
        name (`str`): A name of `PROBABILITY_MAPS`.
        parameters (`dict`): `k` of topk, `lam` of sparsegen_lin, `alpha` of entmax, which may be `"learned"`.
        length (`int`): Keys of the longest row.

    Raises:
        ValueError: If the name is unknown, or a parameter is unknown, missing or out of its range.
    """
    if name not in PROBABILITY_MAPS:
        raise ValueError(f"probability_map must be one of {', '.join(PROBABILITY_MAPS)}, got {name!r}")
    own = [key for key in inspect.signature(PROBABILITY_MAPS[name]).parameters if key != "scores"]
    for key in parameters:
        if key not in own:
            near = difflib.get_close_matches(str(key), own, n=1)
            allowed = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(own) or 'none'}"
            raise ValueError(f"unknown parameter {key!r} of the probability map {name!r}; {allowed}")
    for key in own:
        if key not in parameters:
            raise ValueError(f"the probability map {name!r} needs the parameter {key!r} in probability_map_kwargs")
        if key == "k":
            _check_k(parameters[key], length)
        elif (key, parameters[key]) != ("alpha", LEARNED):
            _CHECKS[key](parameters[key])


def hardmax_scale(name, margin, error, length, **parameters):
    """
    A factor t of the scores that makes a map nearly the hardmax: wherever the largest score of a row is `margin` above
    all others, `map(t * scores)` gives it at least `1 - error`.

    Args:
        name (`str`): A name of `PROBABILITY_MAPS`.
        margin (`float`): zeta > 0.
        error (`float`): eta in (0, 1].
        length (`int`): m, keys of a row.
        parameters: Of the map.

    Returns:
        `float`: t > 0.
    Raises:
        ValueError: If something is out of its range.

    Source: arXiv 2006.04862, Assumption 2 and Section B. There lambda is at least 0; for a negative one, t is larger
    by the factor 1 - lambda.
    """
    if not (_is_number(margin) and margin > 0):
        raise ValueError(f"margin must be more than 0, got {margin!r}")
    if not (_is_number(error) and 0 < error <= 1):
        raise ValueError(f"error must be in (0, 1], got {error!r}")
    check_probability_map(name, parameters, length)
    if parameters.get("alpha") == LEARNED:
        raise ValueError("alpha of entmax must be a number here, got 'learned'")
    alpha = {"entmax15": 1.5}.get(name, parameters.get("alpha"))
    if name in ("softmax", "topk") or alpha == 1:
        rivals = parameters.get("k", length) - 1
        t = math.log(rivals * (1 - error) / error) / margin if rivals and error < 1 else 0.0
    elif alpha is None:
        t = (1 - error) * max(1.0, 1 - parameters.get("lam", 0.0)) / margin
    else:
        t = 1 / (margin * (alpha - 1))
    return max(t, 1e-3 / margin)


class ProbabilityMap(nn.Module):
    """
    The map of a model's attention. Its only parameter is `alpha_logits` of shape `(L, H)`, or `None` where no alpha is
    learned; alpha grows with their sigmoid within `LEARNED_ALPHA`, from 1.5 on.

    Args:
        name (`str`): A name of `PROBABILITY_MAPS`.
        parameters (`dict`, *optional*): Of the map, see [`check_probability_map`].
        num_layers, num_heads (`int`): L, H.

    Raises:
        ValueError: If the map needs a package that is not installed.

    Source of a learned alpha: Adaptively Sparse Transformers (arXiv 1909.00015), Section 4.
    """

    def __init__(self, name, parameters, num_layers, num_heads):
        super().__init__()
        self.name = name
        self.arguments = dict(parameters or {})
        self.register_parameter("alpha_logits", None)
        if name not in ("softmax", "topk"):
            _entmax_package()
        if self.arguments.get("alpha") == LEARNED:
            self.alpha_logits = nn.Parameter(torch.empty(num_layers, num_heads))
            self.reset_parameters()

    def reset_parameters(self):
        if self.alpha_logits is not None:
            low, high = LEARNED_ALPHA
            start = (1.5 - low) / (high - low)
            init.constant_(self.alpha_logits, math.log(start / (1 - start)))

    def alpha(self):
        """The learned alpha of every layer and head, float32 `(L, H)`, or `None`."""
        if self.alpha_logits is None:
            return None
        low, high = LEARNED_ALPHA
        return low + (high - low) * torch.sigmoid(self.alpha_logits.float())

    def forward(self, num_keys):
        """
        What the attention of one forward applies to scores `(B, H, n, m)`.

        Args:
            num_keys (`int`): m.

        Returns:
            `tuple`: Per layer, or one for all: a function of the scores; `None` for softmax.
        """
        if self.name == "softmax":
            return (None,)
        function, arguments = PROBABILITY_MAPS[self.name], dict(self.arguments)
        if self.alpha_logits is not None:
            return tuple(functools.partial(function, alpha=alpha[:, None, None]) for alpha in self.alpha())
        if "k" in arguments:
            arguments["k"] = min(arguments["k"], num_keys)  # an input shorter than k keeps all its keys
        return (functools.partial(function, **arguments),)
