"""The cost model counts what models do and need."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForPreTraining

from benchmarks.cost_model import (
    MODELS,
    Machine,
    all_reduce_seconds,
    checkpoint_bytes,
    compared,
    forward_flops,
    main,
    num_logits,
    num_parameters,
)
from sparsebert import SparseBertConfig, SparseBertForPreTraining


@pytest.mark.parametrize("name", MODELS)
def test_parameters(name):
    with torch.device("meta"):
        model = BertForPreTraining(MODELS[name])
    assert num_parameters(MODELS[name]) == model.num_parameters()


def test_operations_are_those_of_the_model(tiny_config):
    config = tiny_config(BertConfig, attn_implementation="eager")
    model, ids = BertForPreTraining(config), torch.randint(5, 100, (1, 24))
    with FlopCounterMode(display=False) as counter:
        model(ids)
    assert sum(forward_flops(config, 24, predicted=1.0).values()) == counter.get_total_flops()
    full, sparse = (forward_flops(config, 24, density=density) for density in (1.0, 0.25))
    assert sparse["attention"] == full["attention"] / 4 and sparse["linear"] == full["linear"]


@pytest.mark.parametrize("search", ["dam_s", "dam_b", "dam_u"])
def test_logits_and_checkpoints_are_those_of_the_search(search, tiny_config, tmp_path):
    config = tiny_config(SparseBertConfig, search=search, mask_length=40)
    model = SparseBertForPreTraining(config)
    assert num_logits(config, 40, search) == model.sparse_attention.mask_logits.numel()
    optimizer = torch.optim.AdamW(model.parameters())
    output = model(torch.randint(5, 100, (1, 40)))
    (output.prediction_logits.sum() + output.seq_relationship_logits.sum()).backward()
    optimizer.step()
    held = [tensor for state in optimizer.state.values() for tensor in state.values() if tensor.dim()]
    written = 4 * sum(tensor.numel() for tensor in [*held, *model.parameters()])
    assert checkpoint_bytes(config, 40, search) == written


def test_an_all_reduce_follows_the_slowest_link():
    machine = Machine(links=100.0, network=10.0)
    assert [all_reduce_seconds(1000, gpus, machine) for gpus in (1, 2, 8, 64)] == pytest.approx([0, 10, 17.5, 196.875])


def test_whole_models_are_near_what_their_layers_say():
    ratios = {(row["phase"], row["n"], row["system"]): row["predicted"] / row["measured"]
              for row in compared() if row["report"] == "model"}  # fmt: skip
    assert len(ratios) == 12
    for (phase, _, system), ratio in ratios.items():
        if phase == "forward" or system == "sparse_auto":
            assert 0.7 < ratio < 1.3
        else:  # dense training keeps the scores of all layers, which a layer alone does not show
            assert 0.4 < ratio < 1


def test_all_tables_are_printed(capsys):
    main([])
    printed = capsys.readouterr().out.splitlines()
    assert [line.count("---") for line in printed if line.startswith("| ---")] == [7, 8, 8, 10]
