"""The benchmarks run, report what they should, and refuse to time what is wrong."""

import json
import shlex
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BertModel

from benchmarks import attention, encoders, layer, long_inputs, model, pretrain, rest, search
from benchmarks.gpu import lease, model as gpu_model, run as queue
from benchmarks.shared import report
from benchmarks.shared.masks_by_name import build_mask, kept
from benchmarks.shared.measure import WrongResult, interleaved, speed_up
from benchmarks.shared.systems import DENSE, HEAD_SIZE, SYSTEMS, Gate, eager, make_case
from benchmarks.shared.training_steps import OPTIONS, make_step
from sparsebert.attention.kernels import sdpa
from sparsebert.attention.kernels.bias_operator import bias_attention
from sparsebert.commands import main
from sparsebert.masks.tiles import tile_shares


REPORT_FIELDS = {"command", "commit", "date", "hardware", "quick", "tokens", "cells"}
CELL_FIELDS = {"mask", "density", "n", "batch", "heads", "dtype", "phase", "systems", "best_dense", "auto", "speed_up"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """MKL is not asked for its instructions, which takes a process, and encoders know few words."""
    monkeypatch.setattr(report, "_mkl", lambda: None)
    for module in (encoders, long_inputs):
        monkeypatch.setattr(module, "VOCABULARY", 100)


def cells_of(run, tmp_path, *arguments):
    """The cells that a quick run writes, after checks of what all reports have."""
    output = tmp_path / "report"
    run(["--quick", "--threads", "1", "--device", "cpu", "--output", str(output), *arguments])
    found = json.loads((tmp_path / "report.json").read_text())
    assert REPORT_FIELDS <= set(found)
    assert found["hardware"]["cpu"] and found["hardware"]["torch"] == torch.__version__
    for cell in found["cells"]:
        assert CELL_FIELDS <= set(cell)
        for entry in cell["systems"].values():
            assert 0 < entry["q25_ms"] <= entry["median_ms"] <= entry["q75_ms"] and entry["rounds"] >= 2
            assert entry["error"] < (1e-4 if cell["dtype"] == "float32" else 0.05)
    return found["cells"]


def test_a_rest_is_timed_against_none(tmp_path, capsys):
    rest.main(["--quick", "--threads", "1", "--output", str(tmp_path / "report")])
    report = json.loads((tmp_path / "report.json").read_text())
    assert REPORT_FIELDS <= set(report) and len(report["cells"]) == 4
    for cell in report["cells"]:
        assert set(cell["systems"]) == {"none", "mean"} and cell["speed_up"]["low"] <= cell["speed_up"]["ratio"]
    assert "| bfloat16 | 32 | training |" in capsys.readouterr().out


def options(**fields):
    defaults = {"device": "cpu", "dtype": torch.float32, "tokens": 96, "heads": 2, "seed": 0}
    return SimpleNamespace(**defaults | fields)


def test_attention_runs_every_system_in_every_phase(tmp_path, capsys):
    cells = cells_of(attention.main, tmp_path, "--lengths", "48")
    assert [(cell["mask"], cell["phase"]) for cell in cells] == [
        (mask, phase) for mask in ("dam_s", "toeplitz64") for phase in ("forward", "training", "training with dropout")
    ]
    for cell in cells:
        assert set(DENSE) <= set(cell["systems"]) and cell["best_dense"] in DENSE
        assert cell["auto"]["choice"] in cell["systems"]
        for entries in cell["speed_up"].values():
            assert all(entry["low"] <= entry["ratio"] <= entry["high"] for entry in entries.values())
    assert "| `dam_s` |" in capsys.readouterr().out


def test_sweep_times_dense_attention_once_for_all_densities(tmp_path, capsys):
    arguments = ("--sweep", "--lengths", "48", "--phases", "training")
    cells = cells_of(attention.main, tmp_path, *arguments, "--tokens", "48")
    assert len(cells) == 2 * len(attention.DENSITIES)
    for dtype in ("float32", "bfloat16"):
        times = [cell["systems"]["sdpa"] for cell in cells if cell["dtype"] == dtype]
        assert len(times) == len(attention.DENSITIES) and all(entry == times[0] for entry in times)
    assert "| `dam_s:0.05` |" in capsys.readouterr().out


def test_padded_inputs_pass_the_gate(tmp_path):
    cells = cells_of(attention.main, tmp_path, "--padded", "--masks", "window:8", "--lengths", "40", "--no_auto")
    assert cells and all(cell["padded"] and cell["auto"] is None for cell in cells)


@pytest.mark.parametrize("benchmark, backend", [(layer.run, "sparse_eager"), (model.run, "sparse_auto")])
def test_models_report_tokens_per_second(benchmark, backend, tmp_path):
    cells = cells_of(benchmark, tmp_path, "--backend", backend)
    assert all(list(cell["systems"])[-1] == backend for cell in cells)
    assert [cell["phase"] for cell in cells] == ["forward", "training with dropout"]
    for cell in cells:
        for entry in cell["systems"].values():
            assert entry["tokens_per_second"] == pytest.approx(cell["batch"] * cell["n"] / entry["median_ms"] * 1e3)


def test_encoders_in_three_precisions(tmp_path, capsys):
    output = tmp_path / "encoders"
    arguments = ["--quick", "--threads", "1", "--models", "MiniLM", "--output", str(output), "--resume"]
    arguments += ["--engines", "pytorch"]
    encoders.run([*arguments, "--lengths", "32"])
    (first,) = json.loads((tmp_path / "encoders.json").read_text())["cells"]
    encoders.run([*arguments, "--lengths", "32", "64"])
    kept, second = json.loads((tmp_path / "encoders.json").read_text())["cells"]
    assert kept.items() >= first.items() and kept["command"].endswith("--lengths 32") and "command" not in second
    assert (second["n"], second["batch"]) == (64, 1)
    assert (tmp_path / "encoders.png").stat().st_size > 0
    for cell in (first, second):
        kinds = (*encoders.KINDS, encoders.LIMIT)
        assert list(cell["systems"]) == [f"{kind} {p}" for kind in kinds for p in encoders.PRECISIONS]
        assert set(cell["speed_up"]) == {*encoders.PRECISIONS, "best", "limit"}
        for name, entry in cell["systems"].items():
            tokens = cell["batch"] * cell["n"]
            assert entry["tokens_per_second"] == pytest.approx(tokens / entry["median_ms"] * 1e3)
            assert entry["cosine"] == pytest.approx(1, abs=1e-6 if name.endswith("float32") else 0.02)
            assert (entry["cosine"] < 1 - 1e-7) == (not name.endswith("float32"))
        for kind, best in cell["best"].items():
            times = {name: entry["median_ms"] for name, entry in cell["systems"].items() if name.startswith(kind)}
            assert times[best] == min(times.values())
    assert "best against best" in capsys.readouterr().out


def test_encoders_without_a_precision_lose_no_cell(tmp_path, capsys):
    arguments = ["--quick", "--threads", "1", "--models", "MiniLM", "--output", str(tmp_path / "encoders"), "--resume"]
    arguments += ["--engines", "pytorch"]
    encoders.run([*arguments, "--lengths", "32", "--precisions", "float32", "bfloat16"])
    encoders.run([*arguments, "--lengths", "64", "--precisions", "float32", "int8"])
    cells = json.loads((tmp_path / "encoders.json").read_text())["cells"]
    assert [set(cell["speed_up"]) for cell in cells] == [
        {"float32", precision, "best", "limit"} for precision in ("bfloat16", "int8")
    ]
    rates = encoders.tables(cells)["rates"]
    assert rates.columns[3:] == [f"{kind} {p}" for p in encoders.PRECISIONS for kind in encoders.KINDS]
    assert [list(map(bool, row[5:])) for row in rates.rows] == [[True, True, False, False], [False, False, True, True]]
    for words, said in (
        (["--precisions", "int8"], "must hold float32"),
        (["--lengths", "64", "--precisions", "float32", "bfloat16"], "has MiniLM at 64 tokens without bfloat16"),
        (["--seed", "5"], "was measured with seed 0, not 5: choose another --output"),
    ):
        with pytest.raises(SystemExit):
            encoders.run([*arguments, *words])
        assert said in capsys.readouterr().err


@pytest.fixture
def encoder_words(tmp_path, tiny_config, word_tokenizer):
    config = tiny_config(BertConfig, num_attention_heads=2)
    BertModel(config).save_pretrained(tmp_path / "model")
    word_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(f"w{i}" for i in range(90)))
    words = ["--quick", "--weights", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), "--models"]
    return [*words, "--mask", "window:4", "--output", str(tmp_path / "out"), "--engines", "pytorch", "openvino"]


def test_encoders_with_weights_and_text(encoder_words, tmp_path, monkeypatch):
    monkeypatch.setattr(encoders, "FIXED", "float32 openvino")  # int8 takes longer
    encoders.run([*encoder_words, "--precisions", "float32", "--lengths", "64"])
    (cell,) = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert cell["model"] == str(tmp_path / "model") and cell["n"] == 64  # more than its 40 positions
    assert "--text text.txt" in json.loads((tmp_path / "out.json").read_text())["command"]  # not where it was
    assert set(cell["speed_up"]) == {"float32", "float32 openvino", "float32 openvino static", "best", "limit"}
    for system in ("sparse float32 openvino", "dense float32 openvino static", "sparse float32 openvino static"):
        assert cell["systems"][system]["cosine"] == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_encoders_of_texts_of_mixed_lengths(encoder_words, tmp_path, monkeypatch):
    pytest.importorskip("sentence_transformers")
    monkeypatch.setattr(encoders, "FIXED", "float32 openvino")
    encoders.run([*encoder_words, "--precisions", "float32", "--lengths", "40", "--encode"])
    (cell,) = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert not any(system.endswith("static") for system in cell["systems"])
    assert cell["inputs"] == "encode" and set(cell["best"]) == {"dense", "sparse", "diagonal"}


@pytest.mark.slow
def test_encoders_in_every_engine(encoder_words, tmp_path):
    pytest.importorskip("onnxruntime")
    encoders.run([*encoder_words, "onnxruntime", "--lengths", "32"])
    (cell,) = json.loads((tmp_path / "out.json").read_text())["cells"]
    engines = {
        "dense int8 onnxruntime",
        "dense float32 onnxruntime",
        "sparse int8 openvino",
        "dense int8 openvino static",
    }
    assert engines <= set(cell["systems"])
    assert all(entry["cosine"] > 0.9 for entry in cell["systems"].values())


def test_long_inputs_are_measured():
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    arguments = (600, torch.get_num_threads(), 0, sizes)
    runs = {name: [long_inputs.measured(name, *arguments)] for name in long_inputs.SYSTEMS}
    assert all(run["seconds"] > 0 and run["peak_bytes"] >= 0 for (run,) in runs.values())
    (row,) = long_inputs.table([{"n": 600, "systems": runs}]).rows
    assert row[0] == "600" and len(row) == 9


@pytest.mark.slow  # a new process for each run
def test_long_inputs_take_turns(tmp_path, capsys):
    arguments = ["--quick", "--threads", "1", "--rounds", "1", "--output", str(tmp_path / "long")]
    long_inputs.run([*arguments, "--lengths", "256"])
    (cell,) = json.loads((tmp_path / "long.json").read_text())["cells"]
    assert list(cell["systems"]) == list(long_inputs.SYSTEMS)
    for runs in cell["systems"].values():
        assert all(run["seconds"] > 0 and run["peak_bytes"] >= 0 for run in runs)
    (row,) = long_inputs.table([cell]).rows
    assert row[0] == "256" and len(row) == 9 and "256 tokens: done" in capsys.readouterr().out


def test_search_reports_time_and_memory(tmp_path, capsys):
    output = tmp_path / "search"
    arguments = ["--quick", "--threads", "1", "--device", "cpu", "--searches", "dam_s", "soft", "--padded"]
    search.run([*arguments, "--output", str(output)])
    cells = json.loads((tmp_path / "search.json").read_text())["cells"]
    assert [(cell["search"], cell["phase"]) for cell in cells] == [
        (name, phase) for name in ("dam_s", "soft") for phase in ("training with dropout", "training")
    ]
    for cell in cells:
        systems = cell["systems"]
        assert list(systems) == ["eager", "sdpa", "sparse_auto", "sparse_eager"]
        assert all(entry["median_ms"] > 0 and entry["peak_bytes"] > 0 for entry in systems.values())
        assert systems["sparse_auto"]["error"] < 1e-3
    assert "| memory / `sdpa` |" in capsys.readouterr().out


@pytest.mark.parametrize("system", [*pretrain.SYSTEMS, *(f"dense+{name}" for name in OPTIONS if name != "compile")])
def test_steps_of_pretraining_learn(system, monkeypatch):
    optimizers, made = [], torch.optim.AdamW

    def make_optimizer(*arguments, **fields):
        optimizers.append(made(*arguments, **fields))
        return optimizers[-1]

    monkeypatch.setattr(torch.optim, "AdamW", make_optimizer)
    spec = {"size": "tiny", "n": 64, "batch": 2, "dropout": 0.1, "device": "cpu", "dtype": "float32", "seed": 0}
    step, loss = make_step(spec | {"system": system})
    weights = optimizers[0].param_groups[0]["params"]
    before = [weight.detach().clone() for weight in weights]
    expected = make_step(spec | {"system": "stock"})[1]
    if system.startswith("dense"):
        assert loss == pytest.approx(expected, rel=1e-2 if "bf16" in system else 1e-5)
    for _ in range(3):
        step()
    assert not any(torch.equal(*pair) for pair in zip(weights, before, strict=True))


def test_a_wrong_loss_is_not_timed():
    right = {"stock": 10.0, "dense": 10.0001, "dam_s": 3.0, "dense+bf16": 10.1, "frozen+compile": 4.0}
    pretrain.check(right, "float32")
    with pytest.raises(WrongResult, match="dense has the loss 10.2, stock 10.0"):
        pretrain.check({"stock": 10.0, "dense": 10.2}, "float32")
    with pytest.raises(WrongResult, match="frozen.compile has the loss 4.1, frozen 4.0"):
        pretrain.check({"frozen": 4.0, "frozen+compile": 4.1}, "float32")


@pytest.mark.slow
def test_pretraining_steps_are_timed_once(tmp_path, capsys):
    output = tmp_path / "pretrain"
    command = ["--quick", "--threads", "1", "--device", "cpu", "--output", str(output), "--systems", "stock", "dense"]
    pretrain.run([*command, "dam_s"])
    written = json.loads((tmp_path / "pretrain.json").read_text())
    (cell,) = written["cells"]
    for entry in cell["results"].values():
        assert entry["peak_bytes"] > 12 * 30522 * 32 and entry["rounds"] == 2  # the embeddings and their moments
        assert entry["tokens_per_second"] == pytest.approx(64 / entry["median_ms"] * 1e3)
    assert set(cell["speed_up"]) == {"stock", "dense"} and set(cell["speed_up"]["dense"]) == {"stock", "dam_s"}
    pretrain.run([*command, "dam_s"])
    assert json.loads((tmp_path / "pretrain.json").read_text()) == written
    pretrain.run([*command])
    assert len(json.loads((tmp_path / "pretrain.json").read_text())["cells"]) == 2
    assert "Peak memory" in capsys.readouterr().out


def pretraining_cell(n, rates, ratios, **fields):
    """A row of `benchmarks.pretrain`: tokens per second by system, and ratios by the system that is compared with."""
    results = {
        name: {"tokens_per_second": rate, "median_ms": 1.0, "q25_ms": 1.0, "q75_ms": 1.0, "peak_bytes": rate * 2**20}
        for name, rate in rates.items()
    }
    entries = {
        other: {name: {"ratio": r, "low": r - 0.1, "high": r + 0.1} for name, r in found.items()}
        for other, found in ratios.items()
    }
    own = {"size": "base", "n": n, "batch": 4, "dtype": "float32", "dropout": 0.1, "threads": 2}
    return own | {"systems": list(rates), "results": results, "speed_up": entries} | fields


def test_rows_that_were_measured_in_parts_are_one_row():
    cells = [
        pretraining_cell(512, {"stock": 100, "dense": 200}, {"stock": {"dense": 2.0}, "dense": {"stock": 0.5}}),
        pretraining_cell(512, {"dense": 210, "dam_s": 220}, {"dense": {"dam_s": 1.1}}),
        pretraining_cell(128, {"stock": 110, "dense": 300}, {"stock": {"dense": 3.0}}),
        pretraining_cell(512, {"dense": 200, "dense+bf16": 100}, {"dense": {"dense+bf16": 0.5}}),
    ]
    plain, options = pretrain.groups(cells).items()
    tables = pretrain.tables(plain[1])
    assert tables["speed"].columns == ["model", "n", "batch", "stock", "dense", "dam_s"]
    assert tables["speed"].rows == [
        ["base", "128", "4", "110", "300", ""],
        ["base", "512", "4", "100", "200", ""],  # the machine may have been faster in the second part
    ]
    assert [row[-1] for row in tables["memory"].rows] == ["", "220"]
    assert [row[3:] for row in tables["ratios"].rows] == [
        ["3.00 [2.90, 3.10]", ""],
        ["2.00 [1.90, 2.10]", "1.10 [1.00, 1.20]"],
    ]
    tables = pretrain.option_tables(options[1])
    assert dict(zip(tables["options.memory"].columns, tables["options.memory"].rows[0], strict=True)) == {
        "model": "base", "n": "512", "system": "dense", "bf16": "0.50",
        "all_logits": "", "unfused": "", "compile": "", "checkpoint": "",
    }  # fmt: skip
    assert tables["options.ratios"].rows[0][5] == "0.50 [0.40, 0.60] slower"


def wrong_mask_gradient(query, key, value, bias, *rest):
    return bias_attention(query, key, value, 1.01 * bias, *rest)


def test_search_stops_at_a_wrong_operator(tmp_path, monkeypatch):
    monkeypatch.setattr(sdpa, "bias_attention", wrong_mask_gradient)
    with pytest.raises(WrongResult, match="sparse_auto .*gradient of the mask is off"):
        search.run(["--quick", "--threads", "1", "--searches", "soft", "--output", str(tmp_path / "search")])


def wrong_output(case, gradients, dropout):
    function, tensors = eager(case, gradients, dropout)
    return lambda *inputs: function(*inputs) * 1.001, tensors


def wrong_gradient(case, gradients, dropout):
    function, tensors = eager(case, gradients, dropout)
    return lambda query, key, value: function(query, key.detach() + 0.999 * (key - key.detach()), value), tensors


def one_entry_too_many(case, gradients, dropout):
    keep = case.keep.clone()
    keep[0, 0, 3, (~keep[0, 0, 3]).nonzero()[0]] = True
    return eager(replace(case, keep=keep), gradients, dropout)


def not_finite(case, gradients, dropout):
    function, tensors = eager(case, gradients, dropout)
    return lambda *inputs: function(*inputs) / torch.zeros(()), tensors


WRONG = [wrong_output, wrong_gradient, one_entry_too_many, not_finite]


@pytest.mark.parametrize("system", WRONG, ids=lambda system: system.__name__)
def test_a_wrong_system_is_not_timed(system, tmp_path, monkeypatch):
    monkeypatch.setitem(SYSTEMS, "wrong", system)
    arguments = ["--quick", "--device", "cpu", "--lengths", "32", "--masks", "dam_u:0.3", "--systems", "sdpa", "wrong"]
    assert attention.main([*arguments, "--output", str(tmp_path / "x")]) == 1
    for cell in json.loads((tmp_path / "x.json").read_text())["cells"]:
        assert "sdpa" in cell["systems"] and "wrong" not in cell["systems"]
        assert cell["wrong"]["wrong"].startswith("wrong (dam_u:0.3, 32 tokens")


class AnotherMask(torch.autograd.Function):
    """Attention whose backward draws its dropout anew."""

    @staticmethod
    def forward(ctx, query, key, value, function):
        ctx.function = function
        ctx.save_for_backward(query, key, value)
        return function(query, key, value)

    @staticmethod
    def backward(ctx, grad):
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        return *torch.autograd.grad(output, inputs, grad), None


def forgets_its_mask(case, gradients, dropout):
    function, tensors = eager(case, gradients, dropout)
    return lambda *inputs: AnotherMask.apply(*inputs, function), tensors


def never_drops(case, gradients, dropout):
    return eager(case, gradients, 0.0)


def does_not_rescale(case, gradients, dropout):
    function, tensors = eager(case, gradients, dropout)
    return lambda *inputs: function(*inputs) * (1 - dropout), tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gate_checks_dropout(dtype, monkeypatch):
    gate = Gate(make_case("dam_s:0.3", 64, options(tokens=512, dtype=dtype)))
    for name in (*DENSE, "sparse_cpu"):
        gate.check(name, dropout=0.1)
    for system, said in (
        (forgets_its_mask, "backward of value"),
        (never_drops, "same probabilities, or none"),
        (does_not_rescale, "on average"),
    ):
        monkeypatch.setitem(SYSTEMS, "wrong", system)
        with pytest.raises(WrongResult, match=said):
            gate.check("wrong", dropout=0.1)


def test_memory_counts_all_tensors_of_a_mask():
    case = make_case("dam_s:0.3", 64, options())
    size = {name: sum(form.nbytes for form in SYSTEMS[name](case, False, 0.0)[1]) for name in ("sdpa", "sparse_flex")}
    assert size["sdpa"] == 2 * 64 * 64
    assert size["sparse_flex"] > size["sdpa"]  # the table that its function reads, and lists of tiles


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="it is installed")
def test_a_rival_that_is_not_installed_is_refused_by_name():
    with pytest.raises(ValueError, match="needs the package flash-attn-4"):
        SYSTEMS["flex_flash"](make_case("dam_s", 64, options()), False, 0.0)


def test_inputs_are_in_the_layout_of_the_host():
    case = make_case("dam_s", 32, options())
    assert case.query.shape == (3, 2, 32, HEAD_SIZE) and case.query.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("length", [128, 512, 1024])
def test_random_masks_have_the_density_they_are_named_for(length):
    assert 1 - build_mask("dam_s", length, 4).sparsity == pytest.approx(0.09, abs=0.02)
    assert 1 - build_mask("dam_s:0.4", length, 4).sparsity == pytest.approx(0.4, abs=0.02)
    assert 1 - build_mask("dam_u", length, 4).sparsity == pytest.approx(0.21, abs=0.01)
    tiles = build_mask("toeplitz64:0.5", length, 4)
    assert tile_shares(tiles.structure()[0], 64)[0] == pytest.approx(0.5, abs=0.1)
    assert tiles.structure()[0].diagonal(dim1=-2, dim2=-1).all()


def test_learned_masks_are_read_and_repeated_over_heads(tmp_path):
    mask = build_mask("dam_s", 32, 2)
    mask.save_pretrained(tmp_path / "learned")
    read = build_mask(f"learned:{tmp_path / 'learned'}", 32, 4)
    assert torch.equal(read.to_table()[0], mask.to_table()[0].repeat_interleave(2, dim=0))
    layers = mask.replace(
        keep=mask.keep.repeat(2, 1, 1), rest="mean", rest_bias=torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    )
    layers.save_pretrained(tmp_path / "layers")
    name = f"learned:{tmp_path / 'layers'}"
    assert build_mask(f"{name}@1", 32, 4).rest_bias.tolist() == [[3.0, 3.0, 4.0, 4.0]]
    assert build_mask(name, 32, 2, all_layers=True) == layers and build_mask(name, 32, 2) != layers
    with pytest.raises(ValueError, match="2 heads, which do not divide 3"):
        build_mask(f"learned:{tmp_path / 'learned'}", 32, 3)
    with pytest.raises(ValueError, match="unknown mask 'band'"):
        build_mask("band", 32, 2)


def test_special_tokens_follow_the_padding():
    padding = torch.arange(8) < torch.tensor([[8], [5]])
    left = kept(build_mask("dam_s:0.3", 8, 1), 8, padding.flip(1))
    assert left[1, 0, 3, 3:].all() and left[1, 0, 3:, 3].all() and not left[1, 0, :, :3].any()
    keep = kept(build_mask("toeplitz64", 8, 1), 8, padding)
    assert torch.equal(keep[1, 0].any(-1), padding[1])
    table = kept(build_mask("dam_s:0.3", 8, 1), 8, padding)
    assert table[1, 0, 4, :5].all() and table[1, 0, :5, 4].all() and not table[1, 0, :, 5:].any()


def test_systems_take_turns():
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in "abc"}

    def timer(function):
        function()
        return 1.0

    times = interleaved(functions, timer, seconds=0, min_rounds=3)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert all(len(values) == 3 for values in times.values())


def test_interval_of_a_ratio_holds_it_and_grows_with_noise():
    generator = torch.Generator().manual_seed(0)
    ours = 1 + 0.01 * torch.randn(30, generator=generator)
    quiet, noisy = (2 + noise * torch.randn(30, generator=generator) for noise in (0.01, 0.5))
    steady, shaky = (speed_up(times.tolist(), ours.tolist()) for times in (quiet, noisy))
    assert steady["low"] <= steady["ratio"] <= steady["high"] and steady["ratio"] == pytest.approx(2, rel=0.02)
    assert shaky["high"] - shaky["low"] > 5 * (steady["high"] - steady["low"])


@pytest.mark.slow
def test_queue_goes_on_after_failures_and_keeps_reports(tmp_path):
    entry = queue.Entry(
        "three commands",
        (
            "-c \"import sys; open(sys.argv[1] + '.json', 'w').write('[1]')\" {output}",
            "-c 'import sys; print(\"broken\"); sys.exit(3)'",
            "-c 'import time; time.sleep(60)'",
        ),
    )
    result = queue.run_entry(7, entry, tmp_path, limit=2)
    assert result["status"] == "failed: 0, 3, timed out"
    written = json.loads((tmp_path / "7.json").read_text())
    assert written["reports"] == {"1": [1]} and written["machine"]["torch"] == torch.__version__
    assert "broken" in (tmp_path / "7.log").read_text()
    assert queue.row(result).startswith("| 7 | failed: 0, 3, timed out, ")


@pytest.mark.slow
def test_queue_lists_and_refuses(capsys):
    assert queue.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert len(queue.ENTRIES) == 13 and all(f"{number}. " in listed for number in queue.ENTRIES)
    with pytest.raises(SystemExit):
        queue.main(["16"])
    assert "there is no entry 16, only 1, 2, 3, " in capsys.readouterr().err


@pytest.mark.slow
def test_lease_at_tiny_size(tmp_path, monkeypatch):
    """Its parts write their cells, without an error; the lease puts them together and outlives what fails."""
    for part in ("finite", "models", "auto"):
        assert lease.main([part, "--tiny", "--device", "cpu", "--output", str(tmp_path / part)]) == 0
        cells = json.loads((tmp_path / f"{part}.json").read_text())["cells"]
        assert cells and not any("errors" in cell for cell in cells)
    assert [cell["choice"] for cell in cells] == ["sparse_cpu", "sparse_sdpa", "sparse_cpu"]
    cells = json.loads((tmp_path / "models.json").read_text())["cells"]
    assert [cell["phase"] for cell in cells] == list(lease.PHASES)
    assert all({"dense", "dam_s sparse_cpu", "dam_b sparse_sdpa"} <= set(cell["systems"]) for cell in cells)

    write = "-c \"open('{output}.json', 'w').write('[1]'); exit(3)\""
    stages = (20, {"wrong": write, "slow": "-c 'import time; time.sleep(60)'"}), (20, {"right": "-c 'print(7)'"})
    monkeypatch.setattr(queue, "LEASE", stages)
    monkeypatch.setattr(queue, "LEASE_LEAST", 0.1)
    monkeypatch.setattr(queue, "machine", lambda: {"gpu": None})
    parts = queue.run_lease(tmp_path / "lease", limit=1.5)["parts"]
    assert json.loads((tmp_path / "lease" / "lease.json").read_text())["parts"] == parts
    assert parts["wrong"]["status"] == 3 and parts["wrong"]["report"] == [1]
    assert parts["slow"]["status"] == "timed out" and parts["right"]["status"] == "not started"


@pytest.mark.parametrize("number", queue.ENTRIES)
def test_commands_of_the_queue_are_understood(number, tmp_path, monkeypatch):
    monkeypatch.chdir(queue.ROOT)
    for command in queue.ENTRIES[number].commands:
        words = shlex.split(command.replace("{output}", str(tmp_path)))
        if words[:2] == ["-m", "pytest"]:
            files = words[words.index("-m", 1) + 2 :]
            assert files and all(Path(file).is_file() for file in files)
        elif words[1] == "sparsebert":
            assert main([*words[2:], "--list_cells"]) == 0
        elif words[1] == "benchmarks.gpu.model":
            assert gpu_model.command_line().parse_args(words[2:]).compare == Path("{folder}")
        else:
            modules = {"attention": attention, "layer": layer, "model": model, "pretrain": pretrain}
            options = modules[words[1].removeprefix("benchmarks.")].command_line().parse_args(words[2:])
            assert options.device == "cuda" and options.output == tmp_path
            assert modules[words[1].removeprefix("benchmarks.")] is pretrain or all(
                build_mask(name, 128, 12) for name in options.masks
            )


def test_missing_inputs_end_with_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        words = ["--weights", "no/model", "--lengths", "32", "--device", "cpu", "--output", str(tmp_path / "out.json")]
        encoders.run(words)
    error = capsys.readouterr().err.rpartition("error: ")[2]
    assert ended.value.code == 2 and len(error) > 20 and error.count("\n") == 1 and not list(tmp_path.iterdir())
