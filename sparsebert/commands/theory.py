""""""

import argparse
import difflib
from pathlib import Path

import yaml
from rich.console import Console

from ..analysis.tables import Table
from ..files import write_metrics
from ..masks.patterns import CYCLES, HEAD_CONFIGURATIONS, PATTERNS
from ..theory.verdicts import DEFAULT_HEADS, DEFAULT_LENGTH, NOTES, _rows, as_json, details, pattern_case, saved_case


def _cases(options):
    """All that is asked for, before any of it is checked."""
    parameters = _parameters(options.parameters)
    own = {"--parameters": parameters, "--head_configuration": options.head_configuration}
    given = [flag for flag, value in own.items() if value]
    if options.all and given:
        raise ValueError(f"{given[0]} goes with the name of a pattern, not with --all")
    if not options.sources and not options.all:
        raise ValueError(f"expected a pattern ({', '.join(PATTERNS)}), a folder or Hub id of a mask, or --all")
    common = {"num_heads": options.num_heads, "diagonal": options.diagonal == "true", "seed": options.seed}
    length = DEFAULT_LENGTH if options.length is None else options.length
    if length < 2:
        raise ValueError(f"--length must be at least 2, got {length}")
    wanted = [(name, parameters, options.head_configuration) for name in options.sources if name in PATTERNS]
    if options.all:
        wanted += [(name, {}, layout) for name in PATTERNS for layout in _layouts(name)]
    masks = [source for source in options.sources if source not in PATTERNS]
    for source in masks:
        if not Path(source).is_dir() and "/" not in source:
            match = difflib.get_close_matches(source, PATTERNS, n=1)
            hint = f"did you mean {match[0]!r}?" if match else f"patterns: {', '.join(PATTERNS)}"
            raise ValueError(f"{source!r} is no pattern, no folder and no Hub id (owner/name); {hint}")
        if given and not wanted:
            raise ValueError(f"{given[0]} goes with the name of a pattern, {source!r} is a saved mask")
    return [
        *(
            pattern_case(name, length, parameters=known, head_configuration=layout, **common)
            for name, known, layout in wanted
        ),
        *(saved_case(source, options.length) for source in masks),
    ]


def _layouts(name):
    """Head configurations that make a difference."""
    if name not in CYCLES:
        return (None,)
    num_sets = CYCLES[name](2).num_layers
    return HEAD_CONFIGURATIONS if num_sets > 1 else HEAD_CONFIGURATIONS[:1]


def _parameters(text):
    try:
        parameters = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"--parameters {text!r} is not YAML: {error}") from error
    if not isinstance(parameters, dict):
        raise ValueError(f'--parameters must be like "{{stride: 8}}", got {text!r}')
    return parameters


def main(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m sparsebert.theory",
        description="Which assumptions of the universality theorems a pattern or mask fulfils.",
    )
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="PATTERN_OR_MASK",
        help=f"{', '.join(PATTERNS)}; or folder or Hub id of a mask or run",
    )
    parser.add_argument("--all", action="store_true", help="every pattern, cycles in every head configuration")
    parser.add_argument("--length", type=int, metavar="N", help=f"default {DEFAULT_LENGTH}, of a mask its own")
    parser.add_argument(
        "--parameters", default="{}", metavar="YAML", help='such as "{stride: 8}"; "{stride: sqrt}" follows the length'
    )
    parser.add_argument("--head_configuration", help=f"of a cycle: {', '.join(HEAD_CONFIGURATIONS)}")
    parser.add_argument("--diagonal", choices=("true", "false"), default="true", help="false: patterns without it")
    parser.add_argument("--num_heads", type=int, default=DEFAULT_HEADS, metavar="H", help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of patterns drawn at random")
    parser.add_argument("--output", type=Path, metavar="FILE", help="everything as JSON")
    options = parser.parse_args(arguments)
    if options.output and options.output.exists():
        raise FileExistsError(f"--output {options.output} exists: choose another")
    cases = _cases(options)
    found = [case.check() for case in cases]
    pairs = list(zip(cases, found, strict=True))
    table = Table.of("Universality", [row for pair in pairs for row in _rows(*pair)], NOTES)
    Console(width=119).print(table.rich())
    for pair in pairs:
        print("\n" + details(*pair))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_metrics(options.output, [as_json(*pair) for pair in pairs])
