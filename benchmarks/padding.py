"""
Padded batches against the same batches without their padding, at the lengths of real tasks.

    python -m benchmarks.padding [--tasks rte mrpc imdb] [--resume]
    python -m benchmarks.padding --count TASK TOKENIZER FILE ...    # writes benchmarks/lengths.json anew for one task

Tokens per second are real tokens, without padding, of inference and of a training step (classification, dropout,
AdamW). The lengths are drawn from the histograms in `benchmarks/lengths.json`, which were counted on the training
sets. `--count` reads .tsv files of GLUE, or .jsonl with the text as `text`, also as .gz or .xz.
"""

import contextlib
import copy
import csv
import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from sparsebert import SparseBertConfig, SparseBertForSequenceClassification, build_pattern
from sparsebert.files import open_text

from .shared.masks_by_name import build_mask
from .shared.measure import (
    WrongResult,
    cpu_seconds,
    cuda_wall_seconds,
    interleaved,
    process_seconds,
    speed_up,
    summary,
)
from .shared.report import (
    DROPOUT,
    FORWARD,
    argument_parser,
    earlier_cells,
    make_table,
    prepare,
    ratio_text,
    write_json,
)


LENGTHS = Path(__file__).with_name("lengths.json")
VOCABULARY, POSITIONS = 30522, 512
# Maximum number of tokens, and sequences in a batch.
TASKS = {"rte": (256, 32), "mrpc": (128, 32), "imdb": (512, 16)}
MODELS = {
    "MiniLM": {"hidden_size": 384, "num_attention_heads": 12, "num_hidden_layers": 6, "intermediate_size": 1536},
    "BERT-base": {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "intermediate_size": 3072},
}
STOCK, GROUPED = "stock sdpa", "stock sdpa, by length"
# Mask and whether padding is skipped.
OURS = {
    "dense, padded": ("dense", False),
    "dense, skipped": ("dense", True),
    "mask, padded": ("dam_s", False),
    "mask, skipped": ("dam_s", True),
}


def read_texts(path):
    """The texts of a file, or pairs of them."""
    with open_text(path, newline=None) as file:
        if ".jsonl" in path.suffixes:
            return [(json.loads(line)["text"],) for line in file]
        rows = list(csv.reader(io.StringIO(file.read()), delimiter="\t", quoting=csv.QUOTE_NONE))
    header, rows = rows[0], rows[1:]
    # RTE ends with the label, MRPC begins with it.
    pair = (-2, None) if header[0].startswith("Quality") else (-3, -1)
    return [tuple(row[slice(*pair)]) for row in rows]


def count_lengths(task, tokenizer, paths):
    """Write the histogram of a task's lengths, special tokens included, into `benchmarks/lengths.json`."""
    texts = [text for path in paths for text in read_texts(path)]
    words = AutoTokenizer.from_pretrained(tokenizer)
    encoded = words(*(list(part) for part in zip(*texts, strict=True)), verbose=False)["input_ids"]
    counts = sorted(Counter(map(len, encoded)).items())
    lengths = json.loads(LENGTHS.read_text()) if LENGTHS.is_file() else {}
    lengths[task] = {"examples": len(encoded), "vocabulary": len(words), "counts": dict(counts)}
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(lengths.items()))
    LENGTHS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def draw_lengths(task, number, most, seed):
    """`number` lengths of a task, cut at `most`."""
    counts = json.loads(LENGTHS.read_text())[task]["counts"]
    lengths, weights = np.array(list(map(int, counts))), np.array(list(counts.values()))
    drawn = np.random.default_rng(seed).choice(lengths, number, p=weights / weights.sum())
    return np.minimum(drawn, most)


def make_batches(lengths, size, device):
    """Padded batches of random tokens, `size` sequences each, in this order."""
    batches = []
    for part in np.split(lengths, len(lengths) // size):
        real = torch.arange(int(part.max())) < torch.from_numpy(part)[:, None]
        ids = torch.where(real, torch.randint(5, VOCABULARY, real.shape), 0)
        labels = torch.arange(size) % 2
        batch = {"input_ids": ids, "attention_mask": real.long(), "labels": labels}
        batches.append({name: values.to(device) for name, values in batch.items()})
    return batches


def make_models(sizes, options):
    """System to model, all with the same weights; ours share those of the stock model."""
    fields = sizes | {"vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS}
    fields |= {"attention_probs_dropout_prob": options.dropout, "hidden_dropout_prob": options.dropout}
    stock = BertForSequenceClassification(BertConfig(**fields, attn_implementation="sdpa")).to(options.device)
    models = {STOCK: stock, GROUPED: stock}
    for name, (mask, skip) in OURS.items():
        config = SparseBertConfig(**fields, frozen=True, mask_length=POSITIONS, skip_padding=skip)
        model = SparseBertForSequenceClassification(config)
        heads = sizes["num_attention_heads"]
        dense = build_pattern("dense", POSITIONS, heads)
        model.set_mask(dense if mask == "dense" else build_mask(mask, POSITIONS, heads, options.seed))
        model.to(options.device).load_state_dict(stock.state_dict())
        own = dict(model.named_modules())
        for path, module in stock.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                setattr(own[path], key, parameter)
        models[name] = model
    return models


def check(models, batches):
    """Outputs and gradients without padding are those with it, and a dense mask is no mask."""
    for names in ((STOCK, "dense, padded", "dense, skipped"), ("mask, padded", "mask, skipped")):
        results = []
        for name in names:
            model = copy.deepcopy(models[name]).eval()
            output = model(**batches[0])
            output.loss.backward()
            results.append((output.logits.detach(), model.get_input_embeddings().weight.grad))
        for name, result in zip(names[1:], results[1:], strict=True):
            for got, want in zip(result, results[0], strict=True):
                error, scale = (got - want).abs().max().item(), want.abs().max().item()
                if not error <= 1e-3 * scale:
                    raise WrongResult(f"{name}: off by {error:.2e} of {scale:.2e}")


def measured(task, size_name, options):
    """Yield the records of one task and one model, a record per phase."""
    most, size = TASKS[task]
    if options.quick:
        size = 4
    lengths = draw_lengths(task, options.batches * size, most, options.seed)
    orders = {False: make_batches(lengths, size, options.device)}
    orders[True] = make_batches(np.sort(lengths), size, options.device)
    sizes = MODELS[size_name] | ({"num_hidden_layers": 1} if options.quick else {})
    models = make_models(sizes, options)
    check(models, orders[False])
    optimizer = torch.optim.AdamW(models[STOCK].parameters(), lr=0.0, fused=True)
    autocast = torch.autocast(options.device, options.dtype, enabled=options.dtype != torch.float32)
    for phase in options.phases:
        training = phase != FORWARD

        def run(name, training=training):
            for batch in orders[name == GROUPED]:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(torch.set_grad_enabled(training))
                    stack.enter_context(autocast)
                    loss = models[name](**batch).loss
                if training:
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()

        for model in models.values():
            model.train(training)
        timer = cuda_wall_seconds if options.device == "cuda" else cpu_seconds
        timer = process_seconds if options.cpu_time else timer
        functions = {name: lambda name=name, run=run: run(name) for name in models}
        times = interleaved(functions, timer, options.seconds, options.rounds)
        tokens = int(lengths.sum())
        places = {name: sum(b["input_ids"].numel() for b in orders[name == GROUPED]) for name in models}
        systems = {name: summary(each) for name, each in times.items()}
        for entry in systems.values():
            entry["tokens_per_second"] = tokens / entry["median_ms"] * 1e3
        ratios = {
            f"{name} / {base}": speed_up(times[base], times[name])
            for name, bases in {
                "dense, skipped": (STOCK, GROUPED, "dense, padded"),
                "mask, skipped": (STOCK, GROUPED, "mask, padded"),
            }.items()
            for base in bases
        }
        print(f"{task}, {size_name}, {phase}: done", flush=True)
        yield {
            "task": task,
            "model": size_name,
            "phase": phase,
            "dtype": str(options.dtype).removeprefix("torch."),
            "threads": options.threads,
            "timer": timer.__name__,
            "sequences": len(lengths),
            "batch": size,
            "mean_length": float(lengths.mean()),
            "padding": {"as drawn": 1 - tokens / places[STOCK], "by length": 1 - tokens / places[GROUPED]},
            "systems": systems,
            "speed_up": ratios,
        }


def tables(records):
    """Speed of all systems, and ratios of those that skip padding."""
    names = [STOCK, GROUPED, *OURS]
    head = ("task", "model", "phase")
    speed = [
        (
            *(record[key] for key in head),
            f"{100 * record['padding']['as drawn']:.0f} / {100 * record['padding']['by length']:.0f} %",
            *(f"{record['systems'][name]['tokens_per_second']:,.0f}" for name in names),
        )
        for record in records
    ]
    pairs = list(records[0]["speed_up"])
    ratios = [
        (*(record[key] for key in head), *(ratio_text(record["speed_up"][name]) for name in pairs))
        for record in records
    ]
    return {
        "speed": make_table("Real tokens per second", (*head, "padding", *names), speed),
        "ratios": make_table("Speed-up [95 % interval]", (*head, *pairs), ratios),
    }


def command_line():
    parser = argument_parser(
        "benchmarks.padding", "Padded batches against batches without padding.", (FORWARD, DROPOUT)
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["MiniLM"])
    parser.add_argument("--batches", type=int, default=2, help="batches of a round")
    parser.add_argument("--resume", action="store_true", help="keep the cells that the output holds already")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time, on a machine that others use too")
    parser.add_argument("--count", nargs="+", metavar=("TASK TOKENIZER", "FILE"), help="count the lengths of a task")
    parser.set_defaults(rounds=4, seconds=20.0)
    return parser


def run(arguments=None):
    parser = command_line()
    options = prepare(parser, arguments)
    if options.count:
        task, tokenizer, *files = options.count
        return count_lengths(task, tokenizer, list(map(Path, files)))
    if options.output.name == "padding_cpu":
        options.output = options.output.with_name("padding")
    keys = ("task", "model", "phase", "dtype")
    records = earlier_cells(parser, options, keys) if options.resume else []
    dtype, phases = str(options.dtype).removeprefix("torch."), options.phases
    for model in options.models:
        for task in options.tasks:
            done = {tuple(record[key] for key in keys) for record in records}
            options.phases = [phase for phase in phases if (task, model, phase, dtype) not in done]
            if options.phases:
                for record in measured(task, model, options):
                    records.append(record)
                    write_json(options, records)
    for table in tables(records).values():
        print(f"\n{table.markdown()}", end="")


if __name__ == "__main__":
    run()
