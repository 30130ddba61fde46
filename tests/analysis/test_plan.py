"""What a mask costs to run, as it is printed before training."""

import json

import pytest
import torch
from transformers import BertConfig, BertModel

from sparsebert import SparseBertModel, SparseMask, attach, build_pattern, plan
from sparsebert.analysis.plans import saved_plan
from sparsebert.attention.backends import BACKENDS


HEADS = 3


def brute_force_tiles(table, size):
    """Fraction of tiles of `(H, n, n)` that hold an entry."""
    length = table.shape[-1]
    starts = range(0, length, size)
    live = [table[h, i : i + size, j : j + size].any() for h in range(len(table)) for i in starts for j in starts]
    return sum(map(int, live)) / len(live)


def make_mask(length=70, **fields):
    keep = torch.zeros(2, HEADS, length, length, dtype=torch.bool)
    keep[0, 0, :20, 30:33] = True
    keep[0, 1] = torch.rand(length, length) < 0.004
    keep[1] = True
    return SparseMask(keep, length, special_tokens="first_last", **fields)


@pytest.mark.parametrize("length", [None, 33])
def test_figures(length):
    mask = make_mask()
    result = plan(mask, length)
    n = length or 70
    assert result.length == n and (result.device, result.dtype) == ("cpu", torch.float32)
    assert result.sparsity == pytest.approx(1 - mask.to_table(n).float().mean().item())
    heads = mask.keep[..., :n, :n].flatten(0, 1)  # without the special tokens
    assert result.live_tiles == pytest.approx({size: brute_force_tiles(heads, size) for size in (16, 32, 64, 128)})
    assert set(result.choices) == {"inference", "training", "training with dropout"}
    assert all(name in BACKENDS and reason for name, reason in result.choices.values())


def test_choices_are_those_of_auto():
    sparse, half = build_pattern("window", 128, HEADS), build_pattern("random", 256, HEADS, sparsity=0.6)
    assert {name for name, _ in plan(sparse).choices.values()} == {"sparse_cpu"}
    chosen = {phase: name for phase, (name, _) in plan(half).choices.items()}
    assert chosen == dict.fromkeys(["inference", "training"], "sparse_sdpa") | {"training with dropout": "sparse_cpu"}
    assert "0.400 is above 0.300" in plan(half).choices["inference"][1]
    for dtype in (torch.float64, torch.bfloat16):
        assert plan(half, 64, dtype=dtype).choices["inference"][0] != "sparse_cpu"
    assert plan(half, 64, head_size=300).choices["training"][0] == "sparse_sdpa"


def test_saved_masks_and_models(tmp_path, tiny_config):
    mask = make_mask()
    mask.save_pretrained(tmp_path / "mask")
    assert saved_plan(tmp_path / "mask", 33) == plan(mask, 33)
    model = SparseBertModel(tiny_config(pattern="dense", mask_length=16, is_decoder=True)).bfloat16()
    model.save_pretrained(tmp_path / "decoder")
    result = saved_plan(tmp_path / "decoder")
    assert result == plan(model) and result.dtype == torch.bfloat16
    attached = attach(BertModel(tiny_config(BertConfig)), build_pattern("window", 16, 4))
    attached.save_pretrained(tmp_path / "attached")
    assert saved_plan(tmp_path / "attached", device="cuda") == plan(attached, device="cuda")


def test_text_table_and_json():
    """All say the same."""
    mask = make_mask()
    result = plan(mask, 33, dtype=torch.bfloat16)
    head, tiles, *choices = str(result).splitlines()
    assert repr(result) == str(result)  # an interactive session shows it
    assert head == f"33 tokens, cpu, bfloat16: {100 * result.sparsity:.1f} % of the entries removed"
    shares = ", ".join(f"{size}: {100 * share:.1f} %" for size, share in result.live_tiles.items())
    assert tiles == f"live tiles by tile size  {shares}"
    assert [line.split("  ")[0] for line in choices] == ["inference", "training", "training with dropout"]
    table = result.table()
    assert table.title == head and table.notes == (f"live tiles by tile size: {shares}",)
    assert {phase: (name, reason) for phase, name, reason in table.rows} == result.choices
    read = json.loads(json.dumps(result.as_json()))
    assert (read["length"], read["dtype"], read["sparsity"]) == (33, "bfloat16", result.sparsity)
    assert read["live_tiles"] == {str(size): share for size, share in result.live_tiles.items()}
    assert {phase: tuple(choice.values()) for phase, choice in read["choices"].items()} == result.choices


def test_of_models(tiny_config):
    """Of a decoder future keys are removed as well; the kernel for CPUs takes heads of up to 256 numbers."""
    model = SparseBertModel(tiny_config(pattern="bigbird", mask_length=32)).bfloat16()
    result = plan(model)
    assert (result.length, result.dtype) == (32, torch.bfloat16)
    assert result.sparsity == pytest.approx(model.sparse_attention.sparsity())
    model.set_attn_implementation("sparse_eager")
    assert plan(model).choices["inference"] == (
        "sparse_eager",
        "set in the model; sparse_auto would take " + ": ".join(result.choices["inference"]),
    )
    decoder = SparseBertModel(tiny_config(pattern="dense", mask_length=16, is_decoder=True))
    assert plan(decoder).sparsity == pytest.approx(1 - 17 / 32)
    assert plan(decoder, 32).live_tiles == {16: 0.75, 32: 1.0, 64: 1.0, 128: 1.0}
    sizes = {"num_attention_heads": 1, "num_hidden_layers": 1, "pattern": "window", "mask_length": 32}
    for size, expected in ((256, "sparse_cpu"), (260, "sparse_sdpa")):
        choices = plan(SparseBertModel(tiny_config(hidden_size=size, **sizes))).choices
        assert choices["training"][0] == expected


def test_on_cuda():
    """The choice for a machine that is not here."""
    pytest.importorskip("triton")
    blocks = SparseMask(torch.arange(16).repeat(HEADS, 1) % 8 == 0, 1024, "blocks", 64)
    scattered = build_pattern("random", 1024, HEADS)
    half = plan(blocks, device="cuda", dtype=torch.bfloat16).choices
    assert {name for name, _ in half.values()} == {"sparse_sdpa"}
    assert "no self-check of sparse_triton has passed on that GPU yet" in half["training with dropout"][1]
    assert "no self-check of sparse_triton and sparse_flex has passed" in half["inference"][1]
    assert "not sparse_triton: in float32" in plan(blocks, device="cuda").choices["training with dropout"][1]
    assert "100 % of the 64 x 64 tiles" in plan(scattered, device="cuda").choices["inference"][1]
    assert "at most 256 tokens" in plan(blocks, 128, device="cuda").choices["inference"][1]


def test_what_has_no_plan(tmp_path, tiny_config):
    (tmp_path / "empty").mkdir()
    searching = SparseBertModel(tiny_config())
    searching.save_pretrained(tmp_path / "model")
    for find, subject, said in (
        (saved_plan, tmp_path / "empty", "empty"),
        (saved_plan, tmp_path / "model", "this model is still searching"),
        (plan, searching, "this model is still searching: freeze it"),
        (plan, BertModel(tiny_config(BertConfig)), "BertModel carries no sparse attention"),
    ):
        with pytest.raises(ValueError, match=said):
            find(subject)
    with pytest.raises(ValueError, match="input of 71 tokens is longer than the mask"):
        plan(make_mask(), 71)
