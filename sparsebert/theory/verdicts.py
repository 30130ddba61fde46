"""Which assumptions of the universality theorems a pattern, a cycle of patterns or a learned mask satisfies."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ..analysis.tables import Table
from ..masks.patterns import CYCLES, HEAD_CONFIGURATIONS, PATTERNS, build_pattern
from ..masks.sparse_mask import SparseMask
from .conditions import NO_THEOREM, Growth, Reach, Universality, check_universality, fit_growth


DEFAULT_LENGTH = 128
DEFAULT_HEADS = 12
# Longer chains are shortened in the text.
PRINTED_TOKENS = 128
# A growth is fitted from the length up to 16 times it, or, where that exceeds this, down to a sixteenth of it.
MAX_GROWTH_LENGTH = 2048
# Values of parameters that depend on the length.
LENGTH_RULES: dict[str, Callable[[int], int]] = {"sqrt": lambda length: max(1, round(math.sqrt(length)))}

# What the theorems say of a mask with a rest.
OF_REST = (
    "every token reaches every other in one hop, but only through an average. The proofs have a token select single "
    "others, which an average does not do: the facts here are those of the mask without its rest. Of the mask with "
    "its rest nothing is proved"
)

NOTES = (
    "s: layers until every token has reached all (1.3). chain: each token attends to the one before (1.2). O(.): "
    "growth of a layer's connections, parameters fixed; a saved mask is extended by its length_policy.",
    "yes: a theorem applies, see the details. Heads that differ: facts of their union and of their intersection.",
)


@dataclass(frozen=True)
class Case:
    """
    A mask to be checked.

    Attributes:
        name (`str`): Name of the pattern, or folder or Hub id of the mask.
        mask ([`SparseMask`]): The mask.
        length (`int`): Number of tokens, n.
        setup (`dict`): Parameters, head configuration and diagonal.
        growth ([`Growth`], *optional*): Growth of the connections; `None` if the mask is defined at too few lengths.
        causal (`bool`): Whether it is the mask of a decoder.
        mixers (`tuple[str, ...]`): Token mixers that some layers of the model have instead of attention.
    """

    name: str
    mask: SparseMask
    length: int
    setup: dict[str, Any]
    growth: Growth | None
    causal: bool = False
    mixers: tuple[str, ...] = ()

    def check(self) -> Universality:
        """The verdict on the mask in its model."""
        found = check_universality(self.mask, self.length, causal=self.causal)
        if self.mask.rest != "none":
            reason = f"the theorems know no rest; without it: {found.universal}, {found.reason}"
            return replace(found, universal=NO_THEOREM, reason=reason)
        if not self.mixers:
            return found
        reason = f"the theorems assume attention in every layer, but this model has layers of {', '.join(self.mixers)}"
        return replace(found, universal=NO_THEOREM, reason=reason)


def pattern_case(
    name: str,
    length: int,
    num_heads: int = DEFAULT_HEADS,
    parameters: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Case:
    """Make the [`Case`] of a pattern; the parameter `"sqrt"` is the rounded square root of the length."""

    def build(length: int, num_heads: int) -> SparseMask:
        known = {key: _by_length(value, length) for key, value in (parameters or {}).items()}
        # No cycle has more than two patterns.
        return build_pattern(name, length, num_heads, num_layers=2, **arguments, **known)

    try:
        mask = build(length, num_heads)
    except ValueError as error:
        raise ValueError(f"pattern {name} at {length} tokens: {error}") from None
    factors = (1, 2, 4, 8, 16)
    is_short = length * factors[-1] <= MAX_GROWTH_LENGTH
    connections: dict[int, float] = {}
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


def pattern_cases(length: int, num_heads: int = DEFAULT_HEADS, **arguments: Any) -> list[Case]:
    """Make the cases of every pattern with default parameters, cycles in every head configuration that differs."""
    named = [(name, layout) for name in PATTERNS for layout in _head_configurations(name)]
    bar = tqdm(named, desc="patterns", disable=None)
    return [pattern_case(name, length, num_heads, head_configuration=layout, **arguments) for name, layout in bar]


def _head_configurations(name):
    """The head configurations that make a difference."""
    if name not in CYCLES:
        return (None,)
    has_several = CYCLES[name](2).num_layers > 1
    return tuple(HEAD_CONFIGURATIONS) if has_several else tuple(HEAD_CONFIGURATIONS)[:1]


def saved_case(
    source: str, mask: SparseMask, length: int | None = None, causal: bool = False, mixers: Sequence[str] = ()
) -> Case:
    """Make the [`Case`] of a saved mask."""
    length = mask.length if length is None else length
    mask.check_length(length)
    connections: dict[int, float] = {}
    if mask.length_policy != "error":
        # Within twice the length n^2 looks like n sqrt n.
        for halves in (2, 3, 4, 6, 8):
            other = mask.length * halves // 2
            connections[other] = mask.density_at(other, causal) * other**2
    setup: dict[str, Any] = {"causal": True} if causal else {}
    setup |= {"rest": mask.rest} if mask.rest != "none" else {}
    return Case(str(source), mask, length, setup, _growth(connections), causal, tuple(mixers))


def check_cases(cases: Sequence[Case]) -> list[Universality]:
    """Check cases one after the other, with a progress bar."""
    return [case.check() for case in tqdm(cases, desc="universality", disable=None)]


def verdict_table(cases: Sequence[Case], found: Sequence[Universality]) -> Table:
    """Verdicts as a table."""
    rows = [row for case, verdict in zip(cases, found, strict=True) for row in _rows(case, verdict)]
    return Table.of("Universality", rows, NOTES)


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


def _rows(case: Case, found: Universality) -> Iterator[dict[str, str]]:
    """Rows of the table, one for each kind of facts."""
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


def _hops(reach: Reach) -> str:
    return str(reach.hops or ("never" if reach.never else "unknown"))


def details(case: Case, found: Universality) -> str:
    """All facts of a case as text."""
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
    if case.mask.rest != "none":
        lines.append(f"  rest {case.mask.rest!r}: {OF_REST}")
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
    """The reach after 1, 2, 4, ... layers and after the last one."""
    last = len(curve)
    layers = sorted({2**k for k in range(last.bit_length())} | {last})
    shares = (f"{100 * curve[layer - 1][0]:.1f} % ({100 * curve[layer - 1][1]:.1f} %)" for layer in layers)
    return "at least (on average) after " + ", ".join(
        f"{layer}: {share}" for layer, share in zip(layers, shares, strict=True)
    )


def as_json(case: Case, found: Universality) -> dict[str, Any]:
    """All facts of a case as JSON values."""
    growth = asdict(case.growth) if case.growth else None
    return {"name": case.name, "setup": case.setup} | asdict(found) | {"growth": growth}
