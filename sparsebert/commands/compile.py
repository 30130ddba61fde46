"""
Compile an encoder, with its mask or without one, for inference in OpenVINO.

The output folder is loaded with `sparsebert.load`, or by what calls `from_pretrained` after `import sparsebert`:
sentence-transformers, `pipeline`, `AutoModel`. It is made for this kind of machine: keep the model that it is made of.
"""

from dataclasses import dataclass
from pathlib import Path

from ..checks import Effects, check_choice, check_effects, check_range
from ..data.documents import first_texts
from ..files import METRICS_NAME, check_other_folder, within, write_metrics
from ..hub import HubArguments, read_tokenizer, without_secrets
from ..models.inference.compiled_files import check_alone, check_not_compiled, write_compiled
from ..models.inference.compiling import ENGINES, MIN_COSINE, PRECISIONS, compile, engine_module
from ..models.loading import check_folder, load_any
from ..models.sentence_files import check_not_a_module, copy_sentence_files
from ..output_folders import check_free, weights_and_checkpoints, written_whole
from ._command import Command, Results


@dataclass
class CompilingArguments(HubArguments):
    """
    What to compile, and for what.

    Args:
        model (`str`): Folder or Hub id of the model.
        output_dir (`str`): Folder to write, created if missing.
        engine (`str`): What runs the model.
        precision (`str`): `float32`, `bfloat16`, `int8`, or `auto`: the fastest on this CPU within `min_cosine`.
        data (`str`, *optional*): Text like that which the model is for, see [`load_documents`]; every document is an
            input. `int8` needs it; without it `auto` does not try `int8`, and compares the others on random tokens.
        num_texts (`int`): Number of documents to calibrate and compare with.
        min_cosine (`float`): Least mean cosine of hidden states with those in float32 that `auto` accepts.
        overwrite (`bool`): Replace what is in an output folder that is not empty.
    """

    model: str
    output_dir: str
    engine: str = "openvino"
    precision: str = "auto"
    data: str | None = None
    num_texts: int = 256
    min_cosine: float = MIN_COSINE
    overwrite: bool = False


# Fields that have no effect, by the options.
_NO_EFFECT: Effects = (
    (("num_texts",), lambda options: options.data is None and "without data"),
    (("min_cosine",), lambda options: options.precision != "auto" and f"with precision {options.precision!r}"),
)


def command(words):
    examples = (
        "DIR_OR_HUB_ID --data FILE --output_dir DIR",
        "DIR_OR_HUB_ID --precision int8 --data FILE --output_dir DIR",
    )
    return Command(run, {"compiling": CompilingArguments}, examples, "MODEL")


def run(values):
    options = CompilingArguments(**values["compiling"])
    check_choice("engine", options.engine, ENGINES)
    check_choice("precision", options.precision, ("auto", *PRECISIONS))
    check_range("num_texts", options.num_texts, 1)
    check_range("min_cosine", options.min_cosine, 0, 1, (int, float))
    check_effects(_NO_EFFECT, options)
    if options.precision == "int8" and options.data is None:
        raise ValueError("precision 'int8' needs data: texts like those that the model is for")
    engine_module(options.engine)
    check_folder(options.model, "model", subfolder=options.subfolder)
    check_not_compiled(options.model, "model", options.subfolder)
    check_other_folder(options.output_dir, model=within(options.model, options.subfolder))
    check_free(options.output_dir, options.overwrite)
    output = Path(options.output_dir)
    check_alone(output, "choose another output_dir", weights_and_checkpoints(output))
    source, hub_arguments = options.model, options.hub_arguments(options.model)
    check_not_a_module(source, **hub_arguments)
    texts = None if options.data is None else first_texts(options.data, options.num_texts)
    with written_whole(options.output_dir, options.overwrite) as folder:
        model = load_any(source, **hub_arguments)
        of_text = model.main_input_name == "input_ids"
        tokenizer = read_tokenizer(source, model.config, **hub_arguments) if of_text else None
        compile(model, options.engine, options.precision, texts, tokenizer, options.min_cosine)
        write_compiled(model, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        copy_sentence_files(source, folder, **hub_arguments)
        write_metrics(folder / METRICS_NAME, model.compiled_as)  # without which the folder is not whole
    made = model.compiled_as
    cosine = f", cosine with float32 {made['cosine']:.4f}" if "cosine" in made else ""
    done = f"written to {options.output_dir}: {options.engine}, {made['precision']}{cosine}"
    return Results(without_secrets(vars(options)) | made, notes=[done])
