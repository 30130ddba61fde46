"""Parameters of a mask to its entries: every form, length and length policy, by the definition."""

import itertools

import pytest
import torch

from sparsebert.masks.expansion import FORMS, LENGTH_POLICIES, expand, parameter_index


N, BLOCK = 7, 3


def parameters(form, symmetric, dtype=torch.float64):
    """`(L, H, K)`, all different and none 0."""
    size = {"offsets": N - 2, "blocks": -(-N // BLOCK), "table": N * (N + 1) // 2 if symmetric else N * N}[form]
    size = 2 * size - 1 if form != "table" and not symmetric else size
    return torch.arange(1, 2 * 3 * size + 1, dtype=dtype).view(2, 3, size)


def entry(values, form, symmetric, policy, i, j):
    """One entry by the definition, of layer 1 and head 2; `off` is -1 and `on` is -2."""
    values = values[1, 2]
    if policy == "dense" and max(i, j) >= N:
        return -2
    if form == "table" and max(i, j) >= N:
        return -1
    if form == "table" and symmetric:
        pairs = [(row, column) for row in range(N) for column in range(row + 1)]
        return values[pairs.index((max(i, j), min(i, j)))]
    parameter = {"offsets": i - j, "blocks": i // BLOCK - j // BLOCK, "table": i * N + j}[form]
    if form != "table":
        parameter = abs(parameter) if symmetric else parameter + len(values) // 2
    return values[parameter] if 0 <= parameter < len(values) else -1


CASES = list(itertools.product(FORMS, (True, False)))


@pytest.mark.parametrize("length", [1, 4, N, N + 4])
@pytest.mark.parametrize("policy", LENGTH_POLICIES)
@pytest.mark.parametrize("form, symmetric", CASES)
def test_entry_by_entry(form, symmetric, policy, length):
    values = parameters(form, symmetric)
    options = {"length_policy": policy, "symmetric": symmetric, "off": -1.0, "on": -2.0}
    if policy == "error" and length > N:
        with pytest.raises(ValueError, match=r"input of 11 tokens is longer than the mask \(7\).*set length_policy"):
            expand(values, form, length, N, BLOCK, **options)
        return
    table = expand(values, form, length, N, BLOCK, **options)
    wanted = [[entry(values, form, symmetric, policy, i, j) for j in range(length)] for i in range(length)]
    assert table.shape == (2, 3, length, length)
    assert torch.equal(table[1, 2], torch.tensor(wanted, dtype=torch.float64))
    index = parameter_index(form, length, N, symmetric, BLOCK, size=values.shape[-1])
    assert torch.equal(expand(values, form, length, N, BLOCK, index=index, **options), table)


@pytest.mark.parametrize("length", [1, 8, N, N + 4])
def test_tiles_of_more_queries_than_keys(length):
    values = torch.arange(1, 14.0)  # of the distances -6 to 6
    table = expand(values[None, None], "blocks", length, N, 1, symmetric=False, off=-1.0, query_block_size=BLOCK)
    wanted = [[i // BLOCK * BLOCK - j for j in range(length)] for i in range(length)]
    wanted = [[d + 7.0 if abs(d) < 7 else -1.0 for d in row] for row in wanted]
    assert torch.equal(table[0, 0], torch.tensor(wanted))


@pytest.mark.parametrize("form, symmetric", CASES)
def test_gradients(form, symmetric):
    values = parameters(form, symmetric).requires_grad_()
    weights = torch.randn(2, 3, N, N, dtype=torch.float64)
    table = expand(values, form, N, N, BLOCK, symmetric=symmetric, off=0.0, on=1.0)
    (table * weights).sum().backward()
    wanted = torch.zeros_like(values)
    index = parameter_index(form, N, N, symmetric, BLOCK, size=values.shape[-1])
    for parameter in range(values.shape[-1]):
        wanted[..., parameter] = (weights * (index == parameter)).sum((-1, -2))
    torch.testing.assert_close(values.grad, wanted)


def test_compiles_without_a_graph_break():
    values = parameters("offsets", True)
    compiled = torch.compile(
        lambda values: expand(values, "offsets", N + 2, N, length_policy="dense", off=0.0, on=1.0),
        backend="eager",
        fullgraph=True,
    )
    wanted = expand(values, "offsets", N + 2, N, length_policy="dense", off=0.0, on=1.0)
    assert torch.equal(compiled(values), wanted)
