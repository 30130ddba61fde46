"""Manual masks brought to a given sparsity, to compare a learned one with at equal cost."""

from ..checks import check_range
from .patterns import build_pattern


def _strides(length, _):
    return [{"stride": stride} for stride in range(2, length + 1)]


def _windows(length, _):
    return [{"window_size": size} for size in range(1, length // 2)]


def _windows_and(name, extra):
    return lambda length, _: [
        {"window_size": size, name: min(size + more, length)} for size in range(length // 2) for more in extra
    ]


# How each pattern's parameters are varied; what is not named keeps its default. Those with two parameters grow both.
VARIED = {
    "strided": _strides,
    "fixed": _strides,
    "logsparse": lambda length, _: [{}],
    "star": _windows,
    "bigbird": _windows_and("num_random_keys", (0, 1, 2)),
    "longformer": _windows_and("num_global_tokens", (0, 1, 2)),
    "window": lambda length, _: [{"window_size": size, "num_global_tokens": 2} for size in range(length)],
    "random": lambda length, sparsity: [{"sparsity": sparsity}],
    "strided_cycle": _strides,
    "fixed_cycle": _strides,
    "star_cycle": _windows,
}


def matched_patterns(sparsity, length, num_heads, num_layers=1, seed=0):
    """
    Every pattern that removes a choosable share of the entries, with the parameters that come nearest to `sparsity`.

    Args:
        sparsity (`float`): Fraction of entries removed, in [0, 1).
        length (`int`): n, at least 8.
        num_heads, num_layers, seed (`int`): As [`build_pattern`].

    Returns:
        `dict`: [`SparseMask`] by the pattern's name; its metadata say the parameters. `logsparse` has none, so it is
        what it is.
    Raises:
        ValueError: If `sparsity` or `length` is out of range.
    """
    check_range("sparsity", sparsity, 0, 1, kinds=(int, float))
    check_range("length", length, 8)
    masks = {}
    for name, varied in VARIED.items():
        # One head is enough to choose by: those drawn at random differ a little.
        distances = [
            (abs(build_pattern(name, length, 1, num_layers, seed=seed, **parameters).sparsity - sparsity), index)
            for index, parameters in enumerate(varied(length, sparsity))
        ]
        parameters = varied(length, sparsity)[min(distances)[1]]
        masks[name] = build_pattern(name, length, num_heads, num_layers, seed=seed, **parameters)
    return masks
