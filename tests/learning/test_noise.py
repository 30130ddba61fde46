"""Gumbel noise under data parallelism: every process draws its own, or all share that of the first."""

import pytest
import torch
from processes import run_ranks


# The seeds of the processes are alike, as a Trainer sets them, or not.
CHILD = """
import torch
from torch.nn.parallel import DistributedDataParallel
from sparsebert import SparseBertConfig, SparseBertForMaskedLM

sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
         "intermediate_size": 16, "max_position_embeddings": 24}
for share_noise in (False, True):
    for seeds_differ in (False, True):
        torch.manual_seed(0)
        config = SparseBertConfig(**sizes, search="dam_u", share_noise=share_noise, sparsity_weight=0.01)
        model = SparseBertForMaskedLM(config).train()
        attention = model.sparse_attention
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(5 + rank * seeds_differ)
        samples = []
        for step in range(3):
            ids = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            parallel(input_ids=ids, labels=ids).loss.backward()
            samples.append(attention._sample.detach().flatten().tolist())
            optimizer.step()
        weights = {name: weight for name, weight in model.named_parameters()}
        found[f"{share_noise}, {seeds_differ}"] = {
            "samples": samples,
            "gradients": {name: weight.grad.double().sum().item() for name, weight in weights.items()},
            "logits": attention.mask_logits.flatten().tolist(),
        }
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two processes had after three steps, by `share_noise` and whether their seeds differ."""
    return run_ranks(CHILD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("seeds_differ", [False, True], ids=["same seeds", "other seeds"])
@pytest.mark.parametrize("share_noise", [False, True], ids=["own", "shared"])
def test_noise_of_two_processes(ranks, share_noise, seeds_differ):
    first, second = (rank[f"{share_noise}, {seeds_differ}"] for rank in ranks)
    assert first["logits"] == second["logits"] and first["gradients"] == second["gradients"]
    drawn, other = (torch.tensor(rank["samples"]) for rank in (first, second))
    assert not torch.equal(drawn[0], drawn[1])
    if share_noise:
        assert torch.equal(drawn, other)
        return
    # P is near 1/2: half a turn takes nearly every entry to the other side, another seed half of them.
    apart = (drawn != other).float().mean().item()
    assert apart == pytest.approx(0.5, abs=0.05) if seeds_differ else apart > 0.95
    assert drawn.mean() == pytest.approx(0.5, abs=0.05) and other.mean() == pytest.approx(0.5, abs=0.05)
