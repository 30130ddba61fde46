"""
Extend the position embeddings of a model, with its mask if it has one, for longer inputs.

Writes the model and its tokenizer, which then take inputs of `--length` tokens.
"""

from dataclasses import dataclass

from ..attention.model_masks import sparse_attention_of
from ..checks import check_choice, check_range
from ..files import check_other_folder, within
from ..finite_weights import check_weights
from ..hub import HubArguments, read_tokenizer, without_secrets
from ..learning.searches import SEARCHES
from ..models.inference.compiled_files import check_not_compiled
from ..models.lengthening import MAX_POSITIONS, METHODS, extend_positions
from ..models.loading import carries_mask, check_folder, load, load_any
from ..models.sentence_files import IMPORT_FIRST, check_not_a_module, copy_sentence_files
from ..output_folders import check_free, written_whole
from ._command import Command, Results


@dataclass
class LengtheningArguments(HubArguments):
    """
    What to extend.

    Args:
        model (`str`): Folder or Hub id of the model.
        length (`int`): Tokens of the longest input.
        output_dir (`str`): Folder to write, created if missing.
        method (`str`): How the new embeddings are made, see [`extend_positions`].
        length_policy (`str`, *optional*): What the mask does beyond its own length, see [`SparseMask`]; by default
            what it does so far.
        overwrite (`bool`): Replace the model in an output folder that is not empty, and remove its checkpoints.
    """

    model: str
    length: int
    output_dir: str
    method: str = METHODS[0]
    length_policy: str | None = None
    overwrite: bool = False


def command(words):
    examples = (
        "DIR_OR_HUB_ID --length 2048 --output_dir DIR",
        "DIR_OR_HUB_ID --length 1024 --method interpolate --output_dir DIR",
    )
    return Command(run, {"lengthening": LengtheningArguments}, examples, "MODEL")


def run(values):
    options = LengtheningArguments(**values["lengthening"])
    check_choice("method", options.method, METHODS)
    check_range("length", options.length, 1, MAX_POSITIONS)
    check_folder(options.model, "model", subfolder=options.subfolder)
    check_not_compiled(options.model, "model", options.subfolder)
    check_other_folder(options.output_dir, model=within(options.model, options.subfolder))
    check_free(options.output_dir, options.overwrite)
    source, hub_arguments = options.model, options.hub_arguments(options.model)
    check_not_a_module(source, **hub_arguments)
    if options.length_policy is None:
        model = load_any(source, **hub_arguments)
    elif carries_mask(source, **hub_arguments):
        model = load(source, length_policy=options.length_policy, **hub_arguments)
    else:
        raise ValueError(f"length_policy has no meaning for {source}, which has no mask")
    attention = sparse_attention_of(model)
    mask = None if attention is None else attention.search or attention.mask
    if mask is not None and mask.length_policy == "error" and options.length > mask.length:
        form = mask.form if attention.search is None else SEARCHES[attention.config.search].frozen_form
        others = "'dense'" if form == "table" else "'dense' or 'extend'"
        raise ValueError(
            f"length must be at most {mask.length} under the mask of {source}, got {options.length}: give "
            f"length_policy {others}"
        )
    tokenizer = read_tokenizer(source, **hub_arguments)
    check_weights(model, f"model {source}")
    extend_positions(model, options.length, options.method)
    tokenizer.model_max_length = options.length
    with written_whole(options.output_dir, options.overwrite) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        copy_sentence_files(source, folder, options.length, **hub_arguments)
    done = f"written to {options.output_dir}: {options.length} positions ({options.method})"
    masked = [IMPORT_FIRST] if attention else []
    return Results(without_secrets(vars(options)), notes=[done, *masked])
