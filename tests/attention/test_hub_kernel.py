"""Attention as a kernel of Transformers' kernel hub: its layout, and stock models that run through it."""

import ast
import base64
import gc
import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import TINY
from huggingface_hub import constants
from transformers import BertConfig, BertModel
from transformers.utils import is_kernels_available
from transformers.utils.import_utils import KERNELS_MAX_VERSION, KERNELS_MIN_VERSION

from benchmarks.write_hub_kernel import BACKENDS, COMPILED, NAME, VERSION, write
from sparsebert import SparseMask, attach, build_pattern, sparse_dot_product_attention
from sparsebert.attention.hub_kernel import _READ, flash_attn_forward, set_mask


REPOSITORY = f"organization/{NAME}"
# Code of a process that does not import this package. The lines by hand are what the library `kernels` and
# `transformers.integrations.hub_kernels` do with a folder that holds a kernel; then the kernel checks itself.
LOADS = """
import importlib.util, json, sys
from pathlib import Path
import torch
from transformers import BertModel, AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

name, built, folder, output = sys.argv[1:]
"""
BY_HAND = """
identity = json.loads(Path(built, "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(identity, Path(built, "__init__.py"))
kernel = sys.modules[identity] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
assert hasattr(kernel, "flash_attn_forward") and hasattr(kernel, "supports_flash_attn")
AttentionInterface.register("by_hand", kernel.flash_attn_forward)
AttentionMaskInterface.register("by_hand", sdpa_mask)
model = BertModel.from_pretrained(folder, attn_implementation="by_hand").eval()
process = importlib.import_module(f"{identity}.attention.choosing.self_check_process")
results = importlib.import_module(f"{identity}.attention.choosing.self_check_results")
setting = results.Setting("float32", 16, length=64)
(outcome,) = process.run_self_checks("cpu", [(setting, ("sparse_cpu",))], lengths=(5,))
assert "sparse_cpu" in outcome.passed(), outcome
"""
BY_TRANSFORMERS = """
model = BertModel.from_pretrained(folder, attn_implementation=f"{name}@v0", allow_all_kernels=True).eval()
"""
# Run here and there.
COMPUTES = """
torch.manual_seed(0)
ids = torch.randint(100, (2, 20))
padding = (torch.arange(20) < torch.tensor([20, 13])[:, None]).long()
states = [model(ids).last_hidden_state, model(ids, attention_mask=padding).last_hidden_state]
states[1].square().mean().backward()
results = [*(state.detach() for state in states), model.encoder.layer[0].attention.self.query.weight.grad]
"""
SAVES = """
assert "sparsebert" not in sys.modules
torch.save(results, output)
"""


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    return write(tmp_path_factory.mktemp("kernel") / "repository", REPOSITORY)


@pytest.fixture(scope="module")
def built(variants):
    """The one for this machine: with compiled libraries if there are some."""
    return variants[0]


def test_layout(variants):
    """Libraries for one kind of machine are in a variant for it, and what runs anywhere in one for each backend."""
    assert (variants[0].parents[1] / "README.md").is_file()
    assert {path.name for path in variants} - {COMPILED} == {f"torch-{backend}" for backend in BACKENDS}
    for built in variants:
        metadata = json.loads((built / "metadata.json").read_text())
        assert built.parent.name == "build" and (metadata["name"], metadata["version"]) == (NAME, VERSION)
        assert metadata["id"].isidentifier() and f"-{metadata['backend']['type']}" in built.name
        files = {path.relative_to(built).as_posix(): path for path in built.rglob("*") if path.is_file()}
        assert files.pop("metadata.json") and {"__init__.py", "attention/kernels/csr_attention.cpp"} <= set(files)
        assert any(name.endswith(".so") for name in files) == (built.name == COMPILED)
        for name, digest in metadata["digest"]["files"].items():
            assert base64.b64decode(digest) == hashlib.sha256(files.pop(name).read_bytes()).digest()
        assert not files


def test_the_kernel_stands_on_its_own(built):
    """It imports nothing of this package by name, nor parts that it lacks; its operators are in its own namespace."""
    identity = json.loads((built / "metadata.json").read_text())["id"]
    operators = 0
    for path in built.rglob("*.py"):
        text = path.read_text()
        assert "ops.sparsebert." not in text and '"sparsebert::' not in text and 'Library("sparsebert"' not in text
        operators += text.count(f"torch.ops.{identity}.")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                assert not any(alias.name.split(".")[0] == "sparsebert" for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level:
                folder = path.parents[node.level - 1]
                target = folder.joinpath(*(node.module or "").split("."))
                for found in [target] if node.module else [target / alias.name for alias in node.names]:
                    assert found.with_suffix(".py").is_file() or (found / "__init__.py").is_file(), (path, found)
            elif isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] != "sparsebert"
    assert operators >= 4


@pytest.fixture
def tiny_bert():
    return BertModel(BertConfig(**TINY)).eval()


needs_kernels = pytest.mark.skipif(
    not is_kernels_available(),
    reason=f"transformers {transformers.__version__} needs the library kernels from {KERNELS_MIN_VERSION} to below "
    f"{KERNELS_MAX_VERSION}, which is not installed",
)


@pytest.mark.parametrize(
    "loading",
    [pytest.param(BY_HAND, id="by hand"), pytest.param(BY_TRANSFORMERS, id="by transformers", marks=needs_kernels)],
)
def test_a_stock_model_runs_through_the_kernel(loading, built, tiny_bert, tmp_path):
    """With a mask beside its weights, as attached to it here. The kernel's self-check imports the kernel only."""
    computed = {"torch": torch, "model": attach(tiny_bert, build_pattern("bigbird", 40, 4))}
    computed["model"].save_pretrained(tmp_path / "model")
    exec(COMPUTES, computed)
    hidden = tmp_path / "sparsebert.py"  # stands for the package, where both are installed
    hidden.write_text("raise SystemExit('the package was imported')")
    code = LOADS + loading + COMPUTES + SAVES
    result = subprocess.run(
        [sys.executable, "-c", code, REPOSITORY, built, tmp_path / "model", tmp_path / "states"],
        capture_output=True,
        text=True,
        env=os.environ | {"LOCAL_KERNELS": f"{REPOSITORY}={built.parents[1]}", "PYTHONPATH": str(tmp_path)},
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    torch.testing.assert_close(torch.load(tmp_path / "states"), computed["results"], atol=1e-5, rtol=1e-4)


def attention(model, hidden=32, **changes):
    layer = model.encoder.layer[0].attention.self
    query = key = value = torch.randn(1, 4, 20, hidden // 4)
    fields = {"query": query, "key": key, "value": value, "attention_mask": None, **changes}
    return flash_attn_forward(layer, **fields)[0]


def test_a_mask_is_set_or_refused(tiny_bert):
    with pytest.raises(ValueError, match=r"there is no mask beside the weights of '', call set_mask\(model, mask\)"):
        attention(tiny_bert)
    set_mask(tiny_bert, build_pattern("window", 40, 4))
    one = attention(tiny_bert)
    set_mask(tiny_bert, SparseMask(torch.ones(4, 40, 40, dtype=torch.bool), 40))
    assert one.shape == (1, 20, 4, 8) and not torch.allclose(one, attention(tiny_bert))
    for key in (torch.randn(1, 4, 21, 8), torch.randn(1, 2, 20, 8)):
        with pytest.raises(ValueError, match="self-attention of whole inputs"):
            attention(tiny_bert, key=key)


def test_arguments_reach_the_attention_of_their_layer(tiny_bert):
    """A mask per layer, scale, dropout, and causality, which goes by the module if it is not given."""
    mask = SparseMask(torch.rand(2, 4, 20, 20) < 0.5, 20, special_tokens="first")
    set_mask(tiny_bert, mask)
    states = torch.randn(3, 1, 4, 20, 8).unbind(0)
    for index, layer in enumerate(tiny_bert.encoder.layer):
        module = layer.attention.self
        for own, given in ((False, None), (True, None), (True, False), (False, True)):
            module.is_causal, results = own, []
            for causal in (False, True):
                torch.manual_seed(1)
                fields = {"layer": index, "dropout_p": 0.4, "is_causal": causal, "scale": 0.2}
                results.append(sparse_dot_product_attention(*states, mask, **fields).transpose(1, 2))
            torch.manual_seed(1)
            got = flash_attn_forward(module, *states, None, scaling=0.2, dropout=0.4, is_causal=given)[0]
            assert torch.equal(got, results[own if given is None else given]) and not torch.equal(*results)


def test_a_shared_mask_has_the_rest_of_every_layer(tiny_bert):
    mask = SparseMask(torch.rand(4, 20) < 0.5, 20, "offsets", rest="mean", rest_bias=3 * torch.randn(2, 4))
    set_mask(tiny_bert, mask)
    states = torch.randn(3, 1, 4, 20, 8).unbind(0)
    for index, layer in enumerate(tiny_bert.encoder.layer):
        got = flash_attn_forward(layer.attention.self, *states, None)[0]
        assert torch.equal(got, sparse_dot_product_attention(*states, mask, layer=index).transpose(1, 2))


def test_a_mask_is_that_of_its_own_model(tiny_bert, tmp_path):
    """Models that are loaded in turn have configurations with the same `id`."""
    folders, masks = [tmp_path / "window", tmp_path / "star"], []
    for folder in folders:
        attach(BertModel(BertConfig(**TINY)), build_pattern(folder.name, 40, 4)).save_pretrained(folder)
    for folder in folders * 2:
        model = BertModel.from_pretrained(folder, config=BertConfig.from_pretrained(folder))
        attention(model)
        masks.append(model.encoder.layer[0].attention.self.sparse_mask)
        assert masks[-1] == SparseMask.from_pretrained(folder)
        del model
        gc.collect()
        assert not _READ  # nothing that could be taken for the mask of the next


def test_a_mask_is_that_of_the_revision(tmp_path, monkeypatch):
    """In the cache of the Hub are two, of which the branch has the second."""
    repository, masks = tmp_path / "models--user--bert", []
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(40 * "b")
    for commit, pattern in (("a", "window"), ("b", "star")):
        masks.append(build_pattern(pattern, 40, 4))
        masks[-1].save_pretrained(repository / "snapshots" / (40 * commit))
    for commit, expected in ((40 * "a", masks[0]), (None, masks[1])):
        model = BertModel(BertConfig(**TINY))
        model.config._name_or_path, model.config._commit_hash = "user/bert", commit
        attention(model)
        assert model.encoder.layer[0].attention.self.sparse_mask == expected


def test_what_is_more_than_padding_is_refused(tiny_bert):
    set_mask(tiny_bert, build_pattern("window", 40, 4))
    apart = torch.ones(1, 1, 20, 20, dtype=torch.bool)
    apart[..., :10, 10:] = apart[..., 10:, :10] = False
    with pytest.raises(ValueError, match=r"removes more than padding, .*: use sparsebert.attach"):
        attention(tiny_bert, attention_mask=apart)
    with pytest.raises(ValueError, match="of four dimensions must be bool, got torch.float32"):
        attention(tiny_bert, attention_mask=torch.zeros(1, 1, 20, 20))
    for name in ("sliding_window", "softcap"):
        with pytest.raises(ValueError, match=f"BertSelfAttention needs an attention with {name}"):
            attention(tiny_bert, **{name: 4})
    assert attention(tiny_bert, sliding_window=None).shape == (1, 20, 4, 8)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_in_every_form_is_the_same(causal):
    model = BertModel(BertConfig(**TINY, is_decoder=causal)).eval()
    set_mask(model, build_pattern("logsparse", 40, 4).replace(special_tokens="none"))
    padding = torch.arange(20)[None] < 13
    outputs = []
    rows = torch.ones(20, 20, dtype=torch.bool)
    whole = padding[:, None, None] & (rows.tril() if causal else rows)
    for form in (padding, padding.long(), whole, whole.long(), padding[:, None, None], whole):
        torch.manual_seed(1)
        outputs.append(attention(model, attention_mask=form))
    assert all(outputs[0].equal(output) for output in outputs)
    if causal:
        with pytest.raises(ValueError, match="removes more than padding"):
            attention(model, attention_mask=whole, is_causal=False)
    else:
        assert (outputs[0][:, 13:] == 0).all()
