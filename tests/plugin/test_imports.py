"""What `import sparsebert` offers, and what the plain installation can do."""

import ast
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


FRESH = """
import copy, importlib, io, os, signal, sys
from contextlib import redirect_stderr

BLOCKED, OPTIONAL = set(sys.argv[2].split(",")), set(sys.argv[3].split(","))
asked = set()

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            asked.add(name.partition(".")[0])
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
os.chdir(sys.argv[1])
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] in BLOCKED else find(name, *rest)

import torch, transformers
from transformers import CONFIG_MAPPING, AutoModelForMaskedLM, BertConfig, BertForMaskedLM, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

def state():
    methods = [vars(PreTrainedModel)[name] for name in ("from_pretrained", "save_pretrained")]
    methods.append(PreTrainedModel.load_adapter)
    if "peft" in sys.modules:
        from peft import PeftModel
        methods += [vars(PeftModel)[name] for name in ("from_pretrained", "load_adapter", "save_pretrained")]
    tables = [dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_MASK_ATTENTION_FUNCTIONS), sorted(CONFIG_MAPPING)]
    for name in dir(transformers):
        if name.startswith("AutoModel") and hasattr(getattr(transformers, name), "_model_mapping"):
            tables.append(dict(getattr(transformers, name)._model_mapping._extra_content))
    return list(map(id, methods)), tables, [id(finder) for finder in sys.meta_path]

def switch(before, expected):
    sparsebert.plugin.enable()
    sparsebert.plugin.enable()
    (methods, tables, _), (old_methods, old_tables, _) = state(), before
    changed = [new != old for new, old in zip(methods, old_methods)]
    assert changed == expected, changed
    assert "sparsebert" in tables[2] and all("sparse_auto" in table for table in tables[:2])
    sparsebert.plugin.disable()
    sparsebert.plugin.disable()
    assert state() == before, "not all is restored"

for name in ("SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1"):  # Windows has none of them
    delattr(signal, name)
for name in ("killpg", "fork", "getuid", "geteuid"):
    delattr(os, name)
before = state()
asked.clear()
import sparsebert
assert state() == before, "the import changes what it should leave"
import sparsebert.analysis.pictures.charts
switch(before, [True] * 3)
assert not OPTIONAL & (asked | {*sys.modules}), "what only some functions need is imported"

sparsebert.plugin.enable()
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

for words in (["pretrain", "demo_dam_s"], ["finetune", "rte", "--model", "model"], ["theory", "bigbird"]):
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

sparsebert.plugin.disable()
sys.meta_path = [finder for finder in sys.meta_path if not isinstance(finder, Blocker)]
importlib.util.find_spec = find
import peft
switch(state(), [True] * 3 + [False, True, True])
"""


def test_a_new_process(setup, tmp_path):
    """
    Masks are learned, frozen, loaded, run, pushed and pulled without the packages of the extra `train`, and other
    libraries are as they were before the plugin is enabled, and after it is disabled.
    """
    names = [each.name for each in requirements(setup["options.extras_require"]["train"])]
    optional = {"datasets", "deepspeed", "evaluate", "matplotlib", "peft", "rich", "sklearn", "tensorboard"}
    blocked = {MODULES.get(name, name) for name in names} | {"pandas", "triton"} | optional - {"rich"}
    with HubServer() as server:
        environment = server.environment(tmp_path / "cache") | {"HF_HUB_OFFLINE": "0", "SPARSEBERT_PLUGIN": "0"}
        run_fresh(FRESH, tmp_path, ",".join(sorted(blocked)), ",".join(sorted(optional)), **environment)


def test_plain_requirements_are_few(setup):
    required = {each.name for each in requirements(setup["options"]["install_requires"])}
    assert required == {"torch", "transformers", "huggingface_hub", "numpy", "safetensors"}


def test_public_names():
    assert all(getattr(sparsebert, name) is not None for name in sparsebert.__all__)
    assert {*sparsebert.__all__} <= {*dir(sparsebert)} and len(sparsebert.__all__) == len(set(sparsebert.__all__))
    with pytest.raises(AttributeError, match="module 'sparsebert' has no attribute 'Trainer'"):
        _ = sparsebert.Trainer


def test_editors_know_the_public_names():
    """What type checkers read of the package is what it imports when it is used."""
    tree = ast.parse(Path(sparsebert.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and node.test.id == "TYPE_CHECKING")
    homes = {alias.name: node.module for node in block.body for alias in node.names}
    assert homes == sparsebert._HOME_OF and {*homes, "__version__"} == {*sparsebert.__all__}


def test_version_is_the_distribution_version(setup):
    """`setup.cfg` reads the version from the file, without importing the package."""
    assert setup["metadata"]["version"] == "attr: sparsebert.version.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+", sparsebert.__version__)
