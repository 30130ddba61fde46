"""Shared by all tests: no network, a fixed seed, tiny models."""

import os


os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported

import pytest  # noqa: E402
import torch  # noqa: E402

from sparsebert import SparseBertConfig  # noqa: E402


TINY = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def tiny_config():
    """`tiny_config(**fields)`: 2 layers, 4 heads, hidden size 32, 100 words, 40 positions, no dropout."""

    def make(config_class=SparseBertConfig, **fields):
        return config_class(**TINY | fields)

    return make
