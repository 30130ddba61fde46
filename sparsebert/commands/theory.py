"""
Check which assumptions of the universality theorems a pattern, a cycle of patterns or a saved mask meets.

With `--mappings`, check the contextual mappings of the proofs instead, exactly and on every input (`--figure FILE`
draws the selective shifts). With `--maps`, show how much scores must be scaled until each probability map is nearly a
hardmax. These two are in `studies/`, which a checkout of the repository has and the installed package has not.
"""

from dataclasses import dataclass

from ..analysis.pictures.figures import check_picture
from ..analysis.saved_runs import is_pattern, read_saved_mask
from ..hub import HubArguments
from ..theory.verdicts import (
    DEFAULT_HEADS,
    DEFAULT_LENGTH,
    as_json,
    check_cases,
    details,
    pattern_case,
    pattern_cases,
    saved_case,
    verdict_table,
)
from ._checkout import study
from ._command import Command, Results


@dataclass
class TheoryArguments(HubArguments):
    """
    What to check.

    Args:
        sources (`list[str]`): Names of patterns; folders or Hub ids of masks or runs.
        all (`bool`): Check every pattern, cycles in every head configuration.
        length (`int`, *optional*): Tokens; by default 128, for a saved mask its own length.
        parameters (`dict`, *optional*): Parameters of the pattern, such as `{stride: 8}`; `{stride: sqrt}` follows the
            length.
        head_configuration (`str`, *optional*): How a cycle of patterns is laid out.
        num_heads (`int`): Heads of a pattern.
        without_diagonal (`bool`): Remove the diagonal of the patterns.
        seed (`int`): Seed of random patterns.
        mappings (`bool`): Check the contextual mappings of the proofs instead.
        figure (`str`, *optional*): Picture to draw of the selective shifts, with `mappings`.
        maps (`bool`): Show the scales of the probability maps instead.
    """

    sources: list[str] | None = None
    all: bool = False
    length: int | None = None
    parameters: dict | None = None
    head_configuration: str | None = None
    num_heads: int = DEFAULT_HEADS
    without_diagonal: bool = False
    seed: int = 0
    mappings: bool = False
    figure: str | None = None
    maps: bool = False


def command(words):
    examples = ("bigbird window", 'strided_cycle --head_configuration union --parameters "{stride: sqrt}"')
    return Command(run, {"theory": TheoryArguments}, examples, "[PATTERN_OR_MASK ...]")


def run(values):
    options = TheoryArguments(**values["theory"])
    _check(options, values["theory"].keys())
    if options.mappings:
        proofs = study("proofs.contextual_mappings")
        checks = proofs.standard_checks()
        if options.figure:
            proofs.plot_shifts(options.figure)
        written = [f"written: {options.figure}"] if options.figure else []
        return Results([check.as_json() for check in checks], [proofs.mappings_table(checks)], written)
    if options.maps:
        proofs = study("proofs.hardmax_scales")
        scales = proofs.standard_scales()
        return Results([scale.as_json() for scale in scales], [proofs.scales_table(scales)])
    cases = _cases(options)
    pairs = list(zip(cases, check_cases(cases), strict=True))
    table = verdict_table(cases, [found for _, found in pairs])
    return Results([as_json(*pair) for pair in pairs], [table], ["\n" + details(*pair) for pair in pairs])


def _check(options, given_fields):
    kinds = {"--all": options.all, "--mappings": options.mappings, "--maps": options.maps, "names": options.sources}
    given = [name for name, value in kinds.items() if value]
    if not given:
        raise ValueError("expected names of patterns, folders or Hub ids of masks, --all, --mappings or --maps")
    if len(given) > 1 and set(given) != {"--all", "names"}:
        raise ValueError(f"{given[0]} and {given[1]} exclude each other")
    if options.figure and not options.mappings:
        raise ValueError("--figure needs --mappings")
    named = any(map(is_pattern, options.sources or ()))
    for fields, possible in (
        (("parameters", "head_configuration"), named and not options.all),
        (("num_heads", "without_diagonal", "seed"), named or options.all),
    ):
        if (unused := sorted(given_fields & fields)) and not possible:
            raise ValueError(f"--{unused[0]} needs the name of a pattern")
    if "length" in given_fields and (options.mappings or options.maps):
        raise ValueError(f"--length has no meaning with {given[0]}")
    options.hub_arguments(*(source for source in options.sources or () if not is_pattern(source)))
    if options.length is not None and options.length < 2:
        raise ValueError(f"--length must be at least 2, got {options.length}")
    if options.figure:
        check_picture(options.figure, "figure")


def _cases(options):
    """All that is asked for, before any of it is checked."""
    length = DEFAULT_LENGTH if options.length is None else options.length
    common = {"diagonal": not options.without_diagonal, "seed": options.seed}
    saved_sources = [source for source in options.sources or () if not is_pattern(source)]
    hub_arguments = options.hub_arguments(*saved_sources)
    cases = []
    for name in filter(is_pattern, options.sources or ()):
        layout = {"head_configuration": options.head_configuration}
        cases.append(pattern_case(name, length, options.num_heads, options.parameters, **layout, **common))
    if options.all:
        cases += pattern_cases(length, options.num_heads, **common)
    for source in saved_sources:
        saved = read_saved_mask(source, **hub_arguments)
        cases.append(saved_case(source, saved.mask, options.length, saved.is_decoder, saved.token_mixers))
    return cases
