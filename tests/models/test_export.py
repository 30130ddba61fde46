"""Exported and traced models: right at other shapes than the example's, no larger than they must be, or refused."""

import copy
import io
import itertools
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from test_attach import IMAGES, MODELS, SHARED, base_model

import sparsebert
from sparsebert import SparseBertModel, SparseMask, attach, build_pattern, sparse_dot_product_attention
from sparsebert.masks.exported import exported_structure
from sparsebert.models.architectures import attention_modules
from sparsebert.models.bert import modeling_frozen_sparsebert


LAYERS, HEADS, MASK_LENGTH, POSITIONS = 2, 4, 24, 40
# Batch size, length, padding at the left of the last sequence and at the right of the first.
EXAMPLE = (2, 10, 1, 2)
SHAPES = ((1, 7, 0, 2), (3, MASK_LENGTH, 4, 0), (2, 2, 0, 0), (3, 13, 3, 5))
# Arguments of `random_mask`.
MASKS = {
    "offsets": {"form": "offsets", "special_tokens": "first"},
    "blocks": {"form": "blocks", "special_tokens": "first_last", "length_policy": "dense"},
    "table": {"special_tokens": "first_last", "diagonal": False},
    "last position": {"special_tokens": "first_last", "last_token": "position", "diagonal": True},
    "longer table": {"special_tokens": "first", "length_policy": "dense"},
    "empty rows": {"density": 0.05},
    "signed offsets": {"form": "offsets", "symmetric": False, "special_tokens": "first", "special_rows": False},
    "signed blocks": {"form": "blocks", "symmetric": False, "special_tokens": "first_last"},
    "slabs": {"form": "blocks", "symmetric": False, "special_tokens": "first_last", "query_block_size": 20},
    "columns": {"special_tokens": "first_last", "special_rows": False, "diagonal": True},
}
MODEL_HEADS = (
    "ForPreTraining",
    "ForMaskedLM",
    "LMHeadModel",
    "ForNextSentencePrediction",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)


def random_mask(form="table", density=0.4, layers=LAYERS, **fields):
    shape, block_size = {"offsets": ((9,), None), "blocks": ((3,), 10), "table": ((24, 24), None)}[form]
    shape = shape if fields.get("symmetric", True) else (2 * shape[0] - 1,)
    draws = torch.rand(layers, HEADS, *shape, generator=torch.Generator().manual_seed(0))
    return SparseMask(draws < density, MASK_LENGTH, form, block_size, **fields)


@pytest.fixture
def make(tiny_config):
    """`make(mask, head, **fields)`: a model in evaluation, of a class of ours; `attached=True` for a stock one."""

    def build(mask="table", head="Model", attached=False, layers=LAYERS, **fields):
        torch.manual_seed(0)
        mask = random_mask(layers=layers, **MASKS[mask])
        causal = head == "LMHeadModel"
        if causal and mask.special_tokens == "first_last":
            mask = mask.replace(special_tokens="first")
        usual = {"num_hidden_layers": layers, "is_decoder": causal, "use_cache": False, "initializer_range": 0.2}
        fields = usual | fields
        if attached:
            model = getattr(transformers, f"Bert{head}")(tiny_config(transformers.BertConfig, **fields))
            attach(model, mask, allow_empty_rows=True)
        else:
            config = tiny_config(pattern="dense", mask_length=MASK_LENGTH, allow_empty_rows=True, **fields)
            model = getattr(sparsebert, f"SparseBert{head}")(config)
            model.set_mask(mask)
        return model.eval()

    return build


def batch(size, length, left, right, head="Model"):
    generator = torch.Generator().manual_seed(length)
    choices = 2 if head == "ForMultipleChoice" else 1
    real = torch.ones(size * choices, length, dtype=torch.long)
    real[-1, :left] = 0
    real[0, length - right :] = 0
    ids = torch.randint(5, 100, real.shape, generator=generator)
    shape = (size, choices, length) if choices > 1 else (size, length)
    return {"input_ids": ids.view(shape), "attention_mask": real.view(shape)}


def sizes(head="Model", longest=MASK_LENGTH, shortest=2):
    """`dynamic_shapes`: any batch size, and any length up to `longest`, or `None` for what torch makes of it."""
    length = torch.export.Dim.AUTO if longest is None else torch.export.Dim("length", min=shortest, max=longest)
    dims = {0: torch.export.Dim("batch"), 2 if head == "ForMultipleChoice" else 1: length}
    return {"input_ids": dims, "attention_mask": dims}


def export(model, head="Model", longest=MASK_LENGTH, shortest=2, strict=False):
    shapes = sizes(head, longest, shortest)
    return torch.export.export(model, (), batch(*EXAMPLE, head=head), dynamic_shapes=shapes, strict=strict)


def values(outputs):
    outputs = outputs.values() if isinstance(outputs, dict) else outputs
    return [value for value in outputs if torch.is_tensor(value)]


def check(run, model, head="Model", shapes=SHAPES):
    """`run(**inputs)` gives what the model gives, at all shapes."""
    for shape in shapes:
        inputs = batch(*shape, head=head)
        with torch.no_grad():
            want, got = values(model(**inputs)), values(run(**inputs))
        assert want and len(got) == len(want), shape
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fields", MASKS.values(), ids=MASKS)
def test_structure_for_any_length(fields):
    mask = random_mask(**fields)
    longest = MASK_LENGTH if mask.length_policy == "error" else POSITIONS
    for length in (1, 7, MASK_LENGTH, longest):
        assert torch.equal(exported_structure(mask, length, torch.device("cpu")), mask.structure(length)), length
    if mask.length_policy == "error":
        with pytest.raises(ValueError, match="25 tokens is longer than the mask"):
            exported_structure(mask, MASK_LENGTH + 1, torch.device("cpu"))


def test_exported_program_serves_other_shapes(make):
    model = make()
    program = export(model)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    check(torch.export.load(file).module(), model)
    # What the graph holds of the mask is its bits, once.
    buffers = {name for name, _ in model.named_buffers()}
    masks = [value for name, value in program.constants.items() if name not in buffers]
    assert [mask.shape for mask in masks] == [(LAYERS, HEADS, MASK_LENGTH, MASK_LENGTH)]
    assert masks[0].dtype == torch.bool
    with torch.no_grad():
        inputs = batch(*SHAPES[-1])
        masked = model(**inputs)[0]
        model.set_mask(build_pattern("dense", length=MASK_LENGTH, num_heads=HEADS))
        assert (model(**inputs)[0] - masked).abs().max() > 0.01  # in these tests, a mask that is lost would be seen


def test_lengths_beyond_the_mask(make):
    model = make("offsets", attached=True, head="ForSequenceClassification", layers=1)  # policy extend
    check(export(model, longest=POSITIONS).module(), model, shapes=[(1, POSITIONS, 0, 0), (2, 31, 5, 1)])
    model = make("table", layers=1)  # policy error
    with pytest.raises(RuntimeError, match=rf"length.* <= {MASK_LENGTH}"):  # in the words of torch.export
        export(model, longest=POSITIONS)
    program = export(model, longest=None).module()
    with pytest.raises((AssertionError, RuntimeError), match=str(MASK_LENGTH)):
        program(**batch(1, MASK_LENGTH + 1, 0, 0))


@pytest.mark.parametrize("rest", ["none", "mean"])
def test_traced_model_serves_other_shapes(make, rest):
    model = make("offsets", attached=True)
    model.set_mask(model.sparse_attention.mask.replace(rest=rest))
    model.set_attn_implementation("sparse_measure")  # where sizes vary there is nothing to measure
    traced = torch.jit.trace(model, example_kwarg_inputs=batch(*EXAMPLE), strict=False)
    model.set_attn_implementation("sparse_auto")
    check(traced, model, shapes=(*SHAPES, (1, POSITIONS, 0, 1)))


@pytest.mark.parametrize("rest", ["none", "mean"])
def test_model_without_padding(make, rest):
    """Nor special tokens, so that nothing says how many keys there are but their number."""
    model = make("empty rows")
    model.set_mask(model.sparse_attention.mask.replace(rest=rest))
    ids, length = batch(*EXAMPLE)["input_ids"], torch.export.Dim("length", max=MASK_LENGTH)
    traced = torch.jit.trace(model, ids, strict=False)
    program = torch.export.export(model, (ids,), dynamic_shapes=({0: torch.export.Dim("batch"), 1: length},)).module()
    for shape, run in itertools.product(SHAPES, (traced, program)):
        ids = batch(*shape)["input_ids"]
        with torch.no_grad():
            torch.testing.assert_close(values(run(ids)), values(model(ids)), rtol=1e-5, atol=1e-5)


def test_documented_commands_run(checkpoints, tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    page = (Path(__file__).parents[2] / "docs" / "exporting.md").read_text(encoding="utf-8")
    shutil.copytree(checkpoints["window"], tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S):
        exec(block, names)
    model, example = names["model"], names["example"]
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(names["logits"]), model(**example).logits, rtol=1e-5, atol=1e-5)
    program = torch.export.load("model.pt2").module()
    for run in (program, session_run(names["session"])):

        def with_types(run=run, **inputs):
            return run(**inputs, token_type_ids=torch.zeros_like(inputs["input_ids"]))

        check(with_types, model, shapes=(*SHAPES, (1, POSITIONS, 3, 0)))


def session_run(session):
    """A session of ONNX Runtime as a function of tensors."""

    def run(**inputs):
        outputs = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        return [torch.from_numpy(value) for value in outputs]

    return run


def check_onnx(model, folder, head, program):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    program = torch.onnx.export(program, verbose=False)
    held = sum(value.const_value.nbytes for value in program.model.graph.initializers.values())
    # A tied weight may be held twice, as one and transposed.
    weights = sum(weight.nbytes for weight in (*model.state_dict().values(), *model.buffers()))
    assert held < weights + model.sparse_attention.mask.keep.nbytes + 1024
    program.save(folder / "model.onnx")
    run = session_run(runtime.InferenceSession(folder / "model.onnx"))
    check(run, model, head)
    if head == "Model" and model.sparse_attention.mask.length_policy == "error":
        with pytest.raises(Exception, match="by 25"):
            run(**batch(1, MASK_LENGTH + 1, 0, 0))


SAVED = [
    (name, policy)
    for name in MASKS
    for policy in ("extend", "dense", "error")
    if policy != "extend" or MASKS[name].get("form", "table") != "table"
]


@pytest.fixture
def saved(tiny_config, tmp_path):
    """`saved(mask, head, **fields)`: a model of the code that is saved beside it, and its mask."""

    def build(name, head="Model", **fields):
        mask = random_mask(layers=1, **MASKS[name] | fields)
        mask.save_pretrained(tmp_path)
        torch.manual_seed(0)
        config = tiny_config(transformers.BertConfig, num_hidden_layers=1, initializer_range=0.2)
        model = getattr(modeling_frozen_sparsebert, f"Bert{head}")(config)
        model.set_mask_files([(tmp_path / name).read_bytes() for name in modeling_frozen_sparsebert.FILES])
        return model.eval(), mask

    return build


@pytest.mark.parametrize("name, policy", SAVED)
def test_structure_in_saved_code(saved, name, policy):
    model, mask = saved(name, length_policy=policy)
    for length in (1, 7, MASK_LENGTH, MASK_LENGTH if policy == "error" else POSITIONS):
        table = modeling_frozen_sparsebert.expand(model.keep, model.mask, length)
        assert torch.equal(table, mask.structure(length)), length
    if policy == "error":
        with pytest.raises(ValueError, match="25 tokens is longer than the mask"):
            modeling_frozen_sparsebert.expand(model.keep, model.mask, MASK_LENGTH + 1)


def check_saved(model, policy):
    bounded = policy == "error"
    beyond = () if bounded else ((1, POSITIONS, 0, 0), (2, 31, 5, 1))
    check(export(model, longest=MASK_LENGTH if bounded else POSITIONS).module(), model, shapes=(*SHAPES, *beyond))


@pytest.mark.parametrize("name, policy", [("offsets", "extend"), ("blocks", "error")])
def test_saved_code_is_exported_for_any_length(saved, name, policy):
    """The code that runs a model without this package."""
    model, _ = saved(name, length_policy=policy)
    check_saved(model, policy)
    if policy == "error":
        with pytest.raises(RuntimeError, match=rf"length.* <= {MASK_LENGTH}"):
            export(model, longest=POSITIONS)


@pytest.mark.slow
@pytest.mark.parametrize("name, policy", SAVED)
def test_saved_code_is_exported_for_every_form(saved, name, policy):
    model, _ = saved(name, "ForSequenceClassification", length_policy=policy)
    check_saved(model, policy)
    traced = torch.jit.trace(model, example_kwarg_inputs=batch(*EXAMPLE), strict=False)
    check(traced, model)
    if policy == "error":
        with pytest.raises(RuntimeError, match=str(MASK_LENGTH)):
            traced(**batch(1, MASK_LENGTH + 1, 0, 0))


@pytest.mark.slow
def test_attentions_are_exported(make):
    model = make(output_attentions=True)
    inputs = batch(*EXAMPLE)
    program = export(model).module()
    with torch.no_grad():
        got, want = program(**inputs).attentions, model(**inputs).attentions
    assert len(got) == LAYERS
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["sparse_cpu", "sparse_triton", "sparse_flex"])
def test_backends_with_kernels_are_refused(make, name):
    model = make()
    model.set_attn_implementation(name)
    message = (
        f"{name} cannot run here: it does not support torch.export.* Use sparse_eager, sparse_sdpa or sparse_auto"
    )
    with pytest.raises(ValueError, match=message):
        export(model)
    with pytest.raises(ValueError, match=message):
        torch.jit.trace(model, example_kwarg_inputs=batch(*EXAMPLE), strict=False)


def test_searching_model_is_refused_until_frozen(tiny_config):
    model = SparseBertModel(tiny_config(search="dam_s", mask_length=MASK_LENGTH, num_hidden_layers=1)).eval()
    with pytest.raises(ValueError, match="end the search first"):
        export(model)
    with pytest.raises(ValueError, match="end the search first"):
        torch.jit.trace(model, example_kwarg_inputs=batch(*EXAMPLE), strict=False)
    model.freeze(sparsity=0.5)
    # Exported before it was ever run: what is kept for later runs must not be symbols and tensors without values.
    twin = copy.deepcopy(model)
    program = export(model).module()
    for shape in SHAPES:
        inputs = batch(*shape)
        with torch.no_grad():
            assert torch.equal(model(**inputs)[0], twin(**inputs)[0])
    check(program, model)


class _Attention(torch.nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, query, padding):
        return sparse_dot_product_attention(query, query, query, self.mask, padding, layer=1)


@pytest.mark.slow
def test_function_is_exported():
    module = _Attention(random_mask(**MASKS["blocks"]))
    rows = {0: torch.export.Dim("batch"), 2: torch.export.Dim("length", min=2, max=POSITIONS)}
    padding = batch(*EXAMPLE)["attention_mask"].bool()
    example = (torch.randn(2, HEADS, 10, 8), padding)
    program = torch.export.export(module, example, dynamic_shapes=(rows, {0: rows[0], 1: rows[2]}))
    for shape in SHAPES:
        padding = batch(*shape)["attention_mask"].bool()
        query = torch.randn(shape[0], HEADS, shape[1], 8)
        torch.testing.assert_close(program.module()(query, padding), module(query, padding), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_every_form(make, tmp_path, mask):
    model = make(mask)
    program = export(model)
    check(program.module(), model)
    check_onnx(model, tmp_path, "Model", program)
    check(torch.jit.trace(model, example_kwarg_inputs=batch(*EXAMPLE), strict=False), model)


@pytest.mark.slow
@pytest.mark.parametrize("head", MODEL_HEADS)
def test_every_head(make, tmp_path, head):
    model = make("table", head)
    program = export(model, head)
    check(program.module(), model, head)
    check_onnx(model, tmp_path, head, program)
    attached = make("offsets", head, attached=True)
    check(export(attached, head).module(), attached, head)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in IMAGES])
def test_every_architecture(name):
    model = base_model(name).eval()
    layers = 1 if name in SHARED else len(attention_modules(model))
    draws = torch.rand(layers, HEADS, MASK_LENGTH, MASK_LENGTH, generator=torch.Generator().manual_seed(0))
    attach(model, SparseMask(draws < 0.4, MASK_LENGTH, special_tokens="first_last"), allow_empty_rows=True)
    shapes = [shape for shape in SHAPES if shape[1] > 2]  # MobileBERT itself asks whether the length is 2
    check(export(model, shortest=3).module(), model, shapes=shapes)


MIXED = {"token_mixers": ["attention", "sepconv", "average", "attention"], "num_hidden_layers": 4}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask, strict, fields",
    [
        ("offsets", True, {}),
        ("table", True, {}),
        ("table", False, {"probability_map": "topk", "probability_map_kwargs": {"k": 3}}),
        ("table", False, {"probability_map": "entmax15"}),
        ("table", False, MIXED),
    ],
)
def test_strict_export_maps_and_mixers(make, mask, strict, fields):
    model = make(mask, **fields)
    shortest = 3 if "probability_map" in fields else 2
    shapes = [shape for shape in SHAPES if shape[1] >= shortest]
    check(export(model, shortest=shortest, strict=strict).module(), model, shapes=shapes)
