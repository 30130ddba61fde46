"""
Universality: `python -m sparsebert.theory PATTERN_OR_MASK ... --length n`.

Which assumptions of the universality theorems a pattern, a cycle of patterns or a learned mask fulfils.
"""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..analysis.runs import read_run
from ..masks.patterns import PATTERNS, build_pattern
from ..masks.sparse_mask import SparseMask
from .conditions import NO_THEOREM, Growth, check_universality, fit_growth


DEFAULT_LENGTH = 128
DEFAULT_HEADS = 12
# Longer permutations are shortened in print.
PRINTED_TOKENS = 128
# A growth is fitted from the length on to 16 times of it, or, where that is more than this, down to its 16th part.
MAX_GROWTH_LENGTH = 2048
# Parameters that follow the length.
LENGTH_RULES = {"sqrt": lambda length: max(1, round(math.sqrt(length)))}

NOTES = (
    "s: layers until every token has reached all (1.3). chain: each token attends to the one before (1.2). O(.): of "
    "the connections of a layer, all parameters fixed; of a saved mask as its length_policy extends it.",
    "yes: a theorem applies, see the details. Heads that differ: facts of their union and of their intersection.",
)


@dataclass(frozen=True)
class Case:
    """
    What is checked.

    Args:
        name (`str`): Pattern, or folder or Hub id of a mask.
        mask ([`SparseMask`])
        length (`int`): n.
        setup (`dict`): Parameters, head configuration, diagonal.
        growth ([`Growth`], *optional*): `None` where the mask is defined at few lengths only.
        causal (`bool`): Whether it is the mask of a decoder.
        mixers (`tuple[str]`): What the model has in layers instead of attention.
    """

    name: str
    mask: SparseMask
    length: int
    setup: dict
    growth: Growth | None
    causal: bool = False
    mixers: tuple = ()

    def check(self):
        """The [`Universality`] of the mask in this model."""
        found = check_universality(self.mask, self.length, causal=self.causal)
        if not self.mixers:
            return found
        reason = f"the theorems have attention in every layer, some of this model have {', '.join(self.mixers)}"
        return replace(found, universal=NO_THEOREM, reason=reason)


def pattern_case(name, length, num_heads=DEFAULT_HEADS, parameters=None, **arguments):
    """
    A pattern as a [`Case`].

    Args:
        name, length, num_heads: As [`build_pattern`].
        parameters (`dict`, *optional*): The pattern's own; the text `"sqrt"` is the rounded square root of the length.
        arguments: `diagonal`, `seed` and `head_configuration` of [`build_pattern`].

    Raises:
        ValueError: As [`build_pattern`].
    """

    def build(length, num_heads):
        known = {key: _by_length(value, length) for key, value in (parameters or {}).items()}
        # No cycle has more than two patterns.
        return build_pattern(name, length, num_heads, num_layers=2, **arguments, **known)

    mask = build(length, num_heads)
    factors = (1, 2, 4, 8, 16)
    is_short = length * factors[-1] <= MAX_GROWTH_LENGTH
    connections = {}
    for factor in factors:
        other = length * factor if is_short else length // factor
        try:
            # Short random patterns are averaged over many heads.
            connections[other] = build(other, max(2, min(16, 4096 // other))).density * other**2
        except ValueError:  # shorter than its parameters allow
            break
    setup = mask.metadata["pattern_parameters"]
    if layout := mask.metadata.get("head_configuration"):
        setup = setup | {"head_configuration": layout}
    if arguments.get("diagonal") is False:
        setup = setup | {"diagonal": False}
    return Case(name, mask, length, setup, _growth(connections))


def _by_length(value, length):
    return LENGTH_RULES[value](length) if isinstance(value, str) and value in LENGTH_RULES else value


def saved_case(source, length=None):
    """
    A saved mask, or that of a run, as a [`Case`].

    Args:
        source (`str`): Folder or Hub id, as [`read_run`].
        length (`int`, *optional*): n; the mask's own by default.

    Raises:
        ValueError: If there is no mask, it is damaged, or it is undefined at this length.
        OSError: If the Hub has no such repository.
    """
    run = read_run(source)
    mask, config = run.mask, run.config
    length = mask.length if length is None else length
    mask.structure(length)
    connections = {}
    if mask.length_policy != "error":
        # Within twice the length n^2 looks like n sqrt n.
        for halves in (2, 3, 4, 6, 8):
            other = mask.length * halves // 2
            table = mask.to_table(other)
            connections[other] = table.count_nonzero().item() / table.numel() * other**2
    causal = config is not None and config.is_decoder
    mixers = () if config is None else tuple(sorted(set(config.token_mixers or ()) - {"attention"}))
    return Case(str(source), mask, length, {"causal": True} if causal else {}, _growth(connections), causal, mixers)


def _growth(connections):
    if len(connections) < 4 or 0 in connections.values():
        return None
    lengths = sorted(connections)
    return fit_growth(lengths, [connections[length] for length in lengths])


def _title(case):
    return ", ".join([case.name, *(f"{key}={value}" for key, value in case.setup.items())])


def _short_title(case):
    layout = case.setup.get("head_configuration")
    name = case.name if case.name in PATTERNS else Path(case.name).name
    return name + f", {layout}" * bool(layout) + ", no diagonal" * ("diagonal" in case.setup)


def _rows(case, found):
    """Texts of the table: a line for each kind of facts."""
    for index, (kind, facts) in enumerate(found.facts.items()):
        first = index == 0
        yield {
            "pattern": _short_title(case) if first else "",
            "n": str(found.length) if first else "",
            "heads": kind,
            "sparsity": f"{100 * found.sparsity:.1f} %" if first else "",
            "s": _hops(facts.reach),
            "chain": {True: "yes", False: "no", None: "unknown"}[facts.chain.exists],
            "O(.)": (case.growth.order or "?") if first and case.growth else "",
            "universal": found.universal if first else "",
        }


def _hops(reach):
    return str(reach.hops or ("never" if reach.never else "unknown"))


def details(case, found):
    """
    All facts of a case as text.

    Args:
        case ([`Case`])
        found ([`Universality`])
    """
    lines = [f"{_title(case)}, {found.length} tokens, {found.num_heads} heads, p = {found.num_patterns}"]
    lines.append(f"  universal: {found.universal} ({found.reason})")
    for kind, facts in found.facts.items():
        rows = found.length * found.num_patterns
        lines.append(f"  {kind}, {facts.connections:.0f} connections a layer")
        lacking = f"no, {facts.without_self} of {rows} rows lack it" if facts.without_self else "yes"
        lines.append(f"    1.1 self-attention: {lacking}")
        lines.append(f"    1.2 chain: {_chain(facts.chain)}")
        reason = f" ({facts.reach.reason})" * bool(facts.reach.reason)
        lines.append(f"    1.3 hops: {_hops(facts.reach)}{reason}; reached {_curve(facts.reach.curve)}")
        lines.append(f"    full attention without its diagonal: {'yes' if facts.full_but_diagonal else 'no'}")
    if case.growth:
        sizes = zip(case.growth.lengths, case.growth.connections, strict=True)
        lines.append(f"  {case.growth.order or '? (no order fits)'}: " + ", ".join(f"{n}: {c:.0f}" for n, c in sizes))
    return "\n".join(lines)


def _chain(chain):
    if not chain.exists:
        return f"{'unknown' if chain.exists is None else 'no'} ({chain.reason})"
    order = [str(token) for token in chain.order]
    if len(order) > PRINTED_TOKENS or chain.reason.startswith("identity"):
        order = [*order[:3], "...", *order[-3:]] if len(order) > 8 else order
    return f"{chain.reason}: {' '.join(order)}"


def _curve(curve):
    """The reach after 1, 2, 4, ... layers and in the end."""
    last = len(curve)
    layers = sorted({2**k for k in range(last.bit_length())} | {last})
    shares = (f"{100 * curve[layer - 1][0]:.1f} % ({100 * curve[layer - 1][1]:.1f} %)" for layer in layers)
    return "at least (on average) after " + ", ".join(
        f"{layer}: {share}" for layer, share in zip(layers, shares, strict=True)
    )


def as_json(case, found):
    """Everything of a case as numbers and texts."""
    growth = asdict(case.growth) if case.growth else None
    return {"name": case.name, "setup": case.setup} | asdict(found) | {"growth": growth}
