"""
Train a BERT and learn its attention mask together with the weights, or train through a given mask.

A learned mask is frozen at the end of its search. Writes to `output_dir` the model with its mask, the tokenizer,
`metrics.json`, `trainer_state.json` (the log), `mask_probs.safetensors` (P before freezing), pictures (with the extra
`viz`, unless the model is dense) and TensorBoard logs.
"""

from ..analysis.reporting.repeated_runs import seeds_table
from ..analysis.reporting.reports import report_tables
from ..learning.mask_description import PATTERN_FIELDS, STATE_FIELDS, allowed_fields, fields_of_search
from ..learning.searches import SEARCHES
from ..training.pretraining.pretraining_run import SECTIONS, pretrain_seeds
from ._command import Command, Results


# What describes a search, and what a fixed mask. Layers may share a mask that is pruned, whatever it was before.
_OF_SEARCHES = {name: set(fields_of_search(name)) for name in SEARCHES}
_OF_ANY = set().union(*_OF_SEARCHES.values())
_SEARCHED = ("search", *sorted(_OF_ANY - set(allowed_fields("window")) - {"share_layers"}))
_SEARCH = (
    *(f"model.{name}" for name in _SEARCHED),
    *(f"data.{name}" for name in ("freeze_threshold", "freeze_sparsity", "search_end")),
)
_PATTERN = tuple(f"model.{name}" for name in ("pattern", *PATTERN_FIELDS) if name != "mask_length")
# P that are as near to 1/2, on both sides together, are those of a search that has not decided.
_HARDLY = 0.1


def command(words):
    examples = ("demo_dam_s", "learned_mask --text FILE --target_sparsity 0.9 --output_dir DIR")
    return Command(
        run,
        SECTIONS,
        examples,
        excluded={"model": STATE_FIELDS},
        replaced={
            "model.search": ("data.mask", *_PATTERN),
            "model.pattern": ("data.mask", "model.pattern_kwargs", "model.head_configuration", *_SEARCH),
            "data.mask": (*_SEARCH, *_PATTERN),
            **dict.fromkeys(("training.save_steps", "training.save_total_limit"), ("training.save_strategy",)),
            "model.target_sparsity": ("model.sparsity_weight",),
            "model.sparsity_weight": ("model.target_sparsity",),
            # What another search has a use for.
            **{
                f"model.search={name}": tuple(f"model.{field}" for field in sorted(_OF_ANY - of_search))
                for name, of_search in _OF_SEARCHES.items()
            },
        },
    )


def run(values):
    found = pretrain_seeds(values)
    notes = []
    for output, metrics in found.items():
        notes += [_outcome_text(outcome)] if (outcome := metrics.get("search_outcome")) else []
        notes += [*(f"picture: {picture}" for picture in sorted(output.glob("*.png"))), f"written to {output}"]
    if len(found) == 1:
        return Results(metrics, report_tables(found), notes)
    content = {str(output): metrics for output, metrics in found.items()}
    return Results(content, [*report_tables(found), seeds_table(found)], notes)


def _outcome_text(outcome):
    asked = "no sparsity" if outcome["asked"] is None else f"a sparsity of {outcome['asked']:.3f}"
    low, high = outcome["range_of_p"]
    moved = ": the search has hardly moved them, train longer" if abs(low - 0.5) + abs(high - 0.5) < _HARDLY else ""
    return (
        f"search: asked for {asked}, got {outcome['got']:.3f}; heads that keep everything: {outcome['dense_heads']}, "
        f"nothing: {outcome['empty_heads']}; P of nine in ten parameters is from {low:.3f} to {high:.3f}{moved}; "
        f"{outcome['undecided']:.1%} of the entries are kept below P = 1/2 or removed above it"
    )
