"""What `import sparsebert` offers, and what the plain installation can do."""

import configparser
import re
from pathlib import Path

import pytest
from hub_server import HubServer
from packaging.requirements import Requirement
from processes import run_fresh

import sparsebert


ROOT = Path(__file__).parents[2]
# Modules by the names of their packages, where those differ.
MODULES = {"scikit-learn": "sklearn"}


def requirements(text):
    return [Requirement(line) for line in text.split("\n") if line]


@pytest.fixture(scope="module")
def setup():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


PLAIN = """
import importlib, io, os, sys
from contextlib import redirect_stderr

BLOCKED = set(sys.argv[2].split(","))

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
os.chdir(sys.argv[1])
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] in BLOCKED else find(name, *rest)

import torch
import sparsebert
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM
from sparsebert.commands import main

fields = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
model = sparsebert.attach(BertForMaskedLM(BertConfig(vocab_size=100, **fields)), "dam_s", mask_length=16)
ids = torch.arange(5, 17)[None]
optimizer = torch.optim.AdamW(model.parameters())
model.train()(ids, labels=ids).loss.backward()
optimizer.step()
model.sparse_attention.freeze(sparsity=0.5)
model.save_pretrained("model")
loaded = AutoModelForMaskedLM.from_pretrained("model")
torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).logits)
assert sparsebert.load("model").sparse_attention.mask.sparsity > 0.3
sparsebert.extend_positions(loaded, 600)
sparsebert.plan(model)
sparsebert.SparseBertForMaskedLM(sparsebert.SparseBertConfig(pattern="bigbird", **fields)).save_pretrained("own")
assert sparsebert.ProgressivePruning and sparsebert.SearchSchedule
assert main(["push", "model", "--repo_id", "user/model"]) == 0
assert main(["push", "model", "--repo_id", "user/mask", "--mask_only"]) == 0
assert main(["pull", "user/model", "--output_dir", "pulled"]) == 0
assert main(["masks", "user/mask", "--json"]) == main(["plan", "pulled"]) == main(["--help"]) == 0
assert main(["push", "--help"]) == 0
sparsebert.attach(BertForMaskedLM(BertConfig(vocab_size=100, **fields)), "user/mask")

for words in (["pretrain", "demo_dense"], ["finetune", "rte", "--model", "model"], ["theory", "bigbird"]):
    with redirect_stderr(io.StringIO()) as said:
        assert main(words) == 2, words
    lines = [line for line in said.getvalue().splitlines() if "sparsebert" in line]
    assert len(lines) == 1 and lines[0].endswith('pip install "sparsebert[train]"'), lines
try:
    sparsebert.SparseBertTrainer
except ImportError as error:
    assert 'training needs accelerate and datasets: pip install "sparsebert[train]"' in str(error), error
else:
    raise AssertionError("no error")
assert not BLOCKED & set(sys.modules)
"""


def test_plain_installation(setup, tmp_path):
    """Masks are learned, frozen, loaded, run, pushed and pulled without the packages of the extra `train`."""
    names = [each.name for each in requirements(setup["options.extras_require"]["train"])]
    blocked = {MODULES.get(name, name) for name in names} | {"peft", "pandas", "matplotlib", "triton"}
    with HubServer() as server:
        environment = server.environment(tmp_path / "cache") | {"HF_HUB_OFFLINE": "0"}
        run_fresh(PLAIN, tmp_path, ",".join(sorted(blocked)), **environment)


def test_plain_requirements_are_few(setup):
    required = {each.name for each in requirements(setup["options"]["install_requires"])}
    assert required == {"torch", "transformers", "huggingface_hub", "numpy", "safetensors"}


@pytest.mark.parametrize("name", sparsebert.__all__)
def test_public_name_exists(name):
    assert getattr(sparsebert, name) is not None and name in dir(sparsebert)


def test_public_names():
    assert len(sparsebert.__all__) == len(set(sparsebert.__all__))
    with pytest.raises(AttributeError, match="module 'sparsebert' has no attribute 'Trainer'"):
        _ = sparsebert.Trainer


def test_version_is_the_distribution_version(setup):
    """`setup.cfg` reads the version from the file, without importing the package."""
    assert setup["metadata"]["version"] == "attr: sparsebert.version.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+", sparsebert.__version__)
