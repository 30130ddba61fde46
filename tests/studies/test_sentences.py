"""The benchmark of sentence embeddings: what is compared, from where."""

import json

import pytest
import torch
from datasets import Dataset
from transformers import AutoModel, AutoTokenizer, BertForMaskedLM

from benchmarks.sentences import main
from sparsebert import attach, build_pattern
from studies.shared.sentence_similarity import embed, similarity


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


def test_similarity_of_pairs(checkpoints):
    texts = [" ".join(f"w{(7 * row + word) % 90}" for word in range(row % 6 + 1)) for row in range(16)]
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["stock"])
    masked = attach(AutoModel.from_pretrained(checkpoints["stock"]).eval(), build_pattern("window", 32, 4))
    embeddings, _ = embed(masked, tokenizer, texts)
    dense = torch.nn.functional.normalize(embeddings + 0.2 * torch.randn(embeddings.shape), dim=-1)
    cosines = (embeddings[:8] * embeddings[8:]).sum(-1)
    pairs = {"text": texts[:8], "text_pair": texts[8:], "label": (-cosines).tolist()}
    found, again = similarity(masked, tokenizer, Dataset.from_dict(pairs), dense)
    torch.testing.assert_close(again, embeddings)
    agreement = (embeddings * dense).sum(-1)
    assert found["spearman"] == pytest.approx(-1)
    assert found["cosine"] == pytest.approx(agreement.mean().item(), abs=1e-5)
    assert found["cosine_5"] == pytest.approx(agreement.quantile(0.05).item(), abs=1e-5)


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
