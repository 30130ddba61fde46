"""The benchmark of sentence embeddings: what is compared, from where."""

import json

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertForMaskedLM

from benchmarks.sentences import main
from sparsebert import attach, build_pattern
from sparsebert.training.sentence_similarity import embed


def test_embeddings_do_not_depend_on_the_batch(checkpoints):
    model = AutoModel.from_pretrained(checkpoints["stock"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["stock"])
    sentences = ["w1 w2 w3 w4", "w5", "w6 w7 w8", "w1 w1"]
    together, lengths = embed(model, tokenizer, sentences, batch_size=3)
    alone = torch.cat([embed(model, tokenizer, [sentence])[0] for sentence in sentences])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
    assert lengths == [6, 3, 5, 4]
    states = model(**tokenizer("w5", return_tensors="pt")).last_hidden_state[0].mean(0)
    torch.testing.assert_close(together[1], states / states.norm(), atol=1e-5, rtol=1e-4)


def test_table(checkpoints, glue_folder, tmp_path, capsys):
    mask = build_pattern("window", 32, 4, window_size=2)
    mask.save_pretrained(tmp_path / "mask")
    attach(BertForMaskedLM.from_pretrained(checkpoints["stock"]), mask).save_pretrained(tmp_path / "model")
    given = ["--model", checkpoints["stock"], "--data", str(glue_folder), "--output", str(tmp_path / "rows.json")]
    main([*given, "--masks", str(tmp_path / "mask"), str(tmp_path / "model"), "--sparsities", "0.9"])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows["dense"]["cosine"] == 1 and rows["dense"]["input_sparsity"] == 0
    assert rows["mask"] == pytest.approx(rows["model"], abs=1e-5)
    assert rows["mask"]["sparsity"] > rows["mask"]["input_sparsity"] > 0.1 and rows["mask"]["cosine"] < 1
    assert rows["random for 0.9"]["sparsity"] == pytest.approx(0.9, abs=1e-3)
    printed = capsys.readouterr().out
    assert all(f"| {name} " in printed for name in rows)
