import copy
import gzip
import json
import logging
import lzma
import random

import numpy as np
import pytest
import torch
from conftest import write_compressed as write
from transformers import AutoTokenizer, BertTokenizerFast

from sparsebert.data.documents import load_documents
from sparsebert.data.examples import pretraining_collator, pretraining_dataset
from sparsebert.data.tokenization import check_tokenizer, train_tokenizer


WORDS = "the of red blue house walks sees tree river quickly under small world cat dog bird sings".split()


def make_documents(number, seed=0, paragraphs=6):
    """Documents whose sentences end with a word of their own document, so that their origin can be seen."""
    rng = random.Random(seed)
    return [
        [
            " ".join(" ".join(rng.choices(WORDS, k=rng.randint(4, 9))).capitalize() + f" d{index}." for _ in range(3))
            for _ in range(paragraphs)
        ]
        for index in range(number)
    ]


@pytest.fixture(scope="module")
def documents():
    return make_documents(60)


@pytest.fixture(scope="module")
def tokenizer(documents):
    return train_tokenizer(documents, vocab_size=400)


class TestFiles:
    @pytest.mark.parametrize("ending", [".txt", ".txt.gz", ".txt.xz"])
    def test_text(self, tmp_path, ending):
        file = write(tmp_path / f"a{ending}", b"\xef\xbb\xbfOne  two\r\nthr\0ee\r\n\r\n \n\nfour\n\t\n")
        assert list(load_documents(file, "all")) == [["One two", "three"], ["four"]]

    @pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.xz"])
    def test_jsonl(self, tmp_path, ending):
        rows = [{"text": "One\n\ntwo  x", "id": 1}, {"text": " \n"}, {"text": "\u017elu\u0165"}]
        file = write(tmp_path / f"a{ending}", "\n".join(map(json.dumps, rows)) + "\n\n")
        assert list(load_documents(str(file), "all")) == [["One", "two x"], ["\u017elu\u0165"]]

    @pytest.mark.parametrize("ending", [".tokens", ".raw.gz"])
    def test_wikitext(self, tmp_path, ending):
        text = " \n = One = \n \n a b . \n c \n \n = = Part = = \n \n x = y \n \n = Two ( 2 ) = \n \n d \n"
        articles = [["= One =", "a b .", "c", "= = Part = =", "x = y"], ["= Two ( 2 ) =", "d"]]
        assert list(load_documents(write(tmp_path / f"a{ending}", text), "all")) == articles

    def test_several_files_in_order(self, tmp_path):
        files = [write(tmp_path / name, f"{name}\n") for name in ("b.txt", "a.txt")]
        assert list(load_documents(files, "all")) == [["b.txt"], ["a.txt"]]

    def test_names_are_checked_before_reading(self, tmp_path):
        good = write(tmp_path / "a.txt", "x")
        with pytest.raises(FileNotFoundError, match="missing.txt"):
            load_documents([good, tmp_path / "missing.txt"], "all")
        for name in ("a.pdf", "a.gz", "noending"):
            with pytest.raises(ValueError, match=r"its name must end in .*\.jsonl.*\.xz"):
                load_documents([good, write(tmp_path / name, "x")], "all")
        (tmp_path / "directory.txt").mkdir()
        with pytest.raises(ValueError, match="directory.txt"):
            load_documents(tmp_path / "directory.txt", "all")
        with pytest.raises(ValueError, match="empty"):
            load_documents([], "all")

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("a.txt", b"good\nb\xffd\n", r"a\.txt:2: not UTF-8 .* byte 1 "),
            ("a.txt", "text".encode("utf-16"), r"a\.txt:1: not UTF-8"),
            ("a.jsonl", '{"text": "a"}\n\n{"body": "a"}', r'a\.jsonl:3: .*"text", got fields \[\'body\'\]'),
            ("a.jsonl", '{"text": 1}', r"a\.jsonl:1: "),
            ("a.jsonl", "[1]", r"a\.jsonl:1: .*list"),
            ("a.jsonl", "{text", r"a\.jsonl:1: not a JSON object"),
            ("a.jsonl", f'{{"text": {"1" * 5000}}}', r"a\.jsonl:1: not a JSON object"),
            ("a.txt", "", "no paragraph of text in .*a.txt"),
            ("a.txt.xz", " \n\0\n", "no paragraph of text"),
            ("a.jsonl", '{"text": ""}', "no paragraph of text"),
        ],
    )
    def test_malformed_files(self, tmp_path, name, content, message):
        with pytest.raises(ValueError, match=message):
            list(load_documents(write(tmp_path / name, content), "all"))

    @pytest.mark.parametrize(("ending", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress)])
    def test_corrupt_archives(self, tmp_path, ending, compress):
        content = compress(random.Random(0).randbytes(1000).hex().encode())
        for name, data in (("cut", content[:200]), ("not", b"plain text")):
            file = tmp_path / f"{name}.txt{ending}"
            file.write_bytes(data)
            with pytest.raises(ValueError, match=f"{file.name}: corrupt {ending} file"):
                list(load_documents(file, "all"))


class TestLoadDocuments:
    def test_splits_are_disjoint_complete_and_independent_of_order(self, tmp_path):
        documents = [[f"paragraph {i}", "other"] for i in range(1000)]
        file, backwards = (
            write(tmp_path / f"{step}.txt", "\n\n".join(map("\n".join, documents[::step]))) for step in (1, -1)
        )
        train, validation = (list(load_documents(file, split, holdout_every=10)) for split in ("train", "validation"))
        assert sorted(train + validation) == sorted(documents) == sorted(load_documents(file, "all"))
        assert 60 < len(validation) < 140
        assert list(load_documents([backwards], "validation", holdout_every=10)) == validation[::-1]

    def test_builtin(self, tmp_path, monkeypatch):
        from sparsebert.data import builtin_corpus as corpus

        small = corpus.builtin_documents(("json", "email"))
        monkeypatch.setattr(corpus, "builtin_documents", lambda: small)
        loaded = list(load_documents("builtin", "all"))
        assert sorted(loaded) == sorted(document.paragraphs for document in small)

    def test_bad_arguments(self, tmp_path):
        file = write(tmp_path / "a.txt", "text")
        for source, settings, message in (
            (file, {"split": "test"}, "split must be one of 'train', .* got 'test'"),
            (file, {"holdout_every": 1}, "holdout_every must be an integer of at least 2, got 1"),
            ("hub:a/b:c:d", {}, "hub:owner/name"),
            ("bultin", {}, "bultin"),
            (file, {"split": "validation", "holdout_every": 10**6}, "'validation' of .* is empty, .* in 1000000"),
        ):
            with pytest.raises((ValueError, FileNotFoundError), match=message):
                list(load_documents(source, **settings))


class TestTokenizer:
    def test_survives_saving(self, tokenizer, tmp_path):
        tokenizer.save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        assert isinstance(loaded, BertTokenizerFast)
        text = ("The RED house d\u00f3g.", "sees [MASK]")
        assert dict(loaded(*text)) == dict(tokenizer(*text))
        assert loaded.convert_ids_to_tokens(range(5)) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        assert loaded("red", "dog").token_type_ids == [0, 0, 0, 1, 1]

    def test_learns_words_and_respects_size_and_case(self, documents, tokenizer):
        assert train_tokenizer(iter(documents), vocab_size=400).get_vocab() == tokenizer.get_vocab()
        assert len(tokenizer) <= 400
        assert tokenizer.tokenize("River quickly") == ["river", "quickly"]
        assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
        assert "The" in train_tokenizer(documents, vocab_size=400, lowercase=False).get_vocab()

    def test_reads_no_more_than_it_needs(self):
        def stream():
            yield ["some words to learn " * 10]
            pytest.fail("read on")

        train_tokenizer(stream(), vocab_size=100, max_characters=100)

    def test_bad_arguments(self, documents):
        with pytest.raises(ValueError, match="vocab_size must be at least .*, got 20"):
            train_tokenizer(documents, vocab_size=20)
        with pytest.raises(ValueError, match="no text"):
            train_tokenizer([[" "]], vocab_size=100)

    def test_check_tokenizer(self, tokenizer):
        check_tokenizer(tokenizer, len(tokenizer))
        with pytest.raises(ValueError, match=f"has {len(tokenizer)} tokens .* vocab_size={len(tokenizer) - 1}"):
            check_tokenizer(tokenizer, len(tokenizer) - 1)
        broken = BertTokenizerFast(vocab=tokenizer.get_vocab(), mask_token=None)
        with pytest.raises(ValueError, match="no mask_token"):
            check_tokenizer(broken, 10_000)


class TestPacked:
    def test_rows(self, documents, tokenizer):
        dataset = pretraining_dataset(documents, tokenizer, max_length=32)
        ids = np.array(dataset["input_ids"][:])
        assert set(dataset.column_names) == {"input_ids", "token_type_ids", "special_tokens_mask"}
        assert ids.shape[1] == 32
        assert (ids[:, 0] == tokenizer.cls_token_id).all() and (ids[:, -1] == tokenizer.sep_token_id).all()
        assert not np.array(dataset["token_type_ids"][:]).any()
        special = np.isin(ids, [tokenizer.cls_token_id, tokenizer.sep_token_id])
        assert (np.array(dataset["special_tokens_mask"][:]) == special).all()
        # The text is complete and in order.
        packed, expected = ids[:, 1:-1].ravel().tolist(), []
        for document in documents:
            for found in tokenizer(document, add_special_tokens=False).input_ids:
                expected += found
            expected.append(tokenizer.sep_token_id)
        assert packed == expected[: len(packed)] and len(expected) - len(packed) <= 31

    def test_special_tokens_in_the_text_are_words(self, documents, tokenizer):
        """ "[CLS]" in a text would begin a document, and "[MASK]" would be a token to predict."""
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<dog>"]})
        text = [["the [CLS] house [SEP] [MASK] [PAD] sees", "<dog> sees"], *documents[:3]]
        rows = pretraining_dataset(text, tokenizer, max_length=32, pack_documents=True)
        first = rows["input_ids"][0]
        words = tokenizer.convert_ids_to_tokens(first)
        assert words[0] == "[CLS]" and words[-1] == "[SEP]" and words.count("[CLS]") == words.count("[SEP]")
        assert not {"[MASK]", "[PAD]"} & set(words)
        # Other special tokens stay what they are.
        assert "<dog>" in words and words.index("[SEP]") > words.index("<dog>")
        for table in (rows, pretraining_dataset(text, tokenizer, max_length=32, nsp=True)):
            ids = np.array([row[0] for row in table["input_ids"][:]])
            assert (ids == tokenizer.cls_token_id).all()
            assert tokenizer.mask_token_id not in {token for row in table["input_ids"][:] for token in row}

    def test_max_tokens_bounds_rows_and_reading(self, documents, tokenizer):
        def stream():
            yield from documents * 100
            pytest.fail("read everything")

        assert len(pretraining_dataset(stream(), tokenizer, max_length=32, max_tokens=1000)) == 1000 // 32


@pytest.fixture(scope="module")
def pairs(tokenizer):
    return pretraining_dataset(make_documents(200), tokenizer, max_length=64, nsp=True, seed=3)


class TestNextSentence:
    def test_rows_are_pairs(self, pairs, tokenizer):
        for row in pairs:
            ids, types = row["input_ids"], row["token_type_ids"]
            assert 5 <= len(ids) <= 64
            first = ids.index(tokenizer.sep_token_id)
            assert ids[0] == tokenizer.cls_token_id and ids[-1] == tokenizer.sep_token_id
            assert ids.count(tokenizer.sep_token_id) == 2
            assert types == [0] * (first + 1) + [1] * (len(ids) - first - 1)
            assert 0 < first - 1 and first + 2 < len(ids)
            assert [i for i, special in enumerate(row["special_tokens_mask"]) if special] == [0, first, len(ids) - 1]
        assert max(map(len, pairs["input_ids"][:])) == 64
        assert 0.4 < np.mean(pairs["next_sentence_label"][:]) < 0.6

    def test_labels_mean_what_the_host_means(self, tokenizer):
        # Sentences of numbered words: B is next exactly if its first word follows the last one of A.
        documents = [[f"A{d} s{i} x. " * 3 for i in range(9)] for d in range(40)]
        own = train_tokenizer(documents, vocab_size=600)
        dataset = pretraining_dataset(documents, own, max_length=48, nsp=True)
        for row in dataset:
            ids, sep = row["input_ids"], row["input_ids"].index(own.sep_token_id)
            words = (own.decode(part).split() for part in (ids[1:sep], ids[sep + 1 : -1]))
            from_a, from_b = ({word for word in part if word[0] == "a" and word[1:].isdigit()} for part in words)
            if from_a and from_b:
                assert (from_a == from_b) == (row["next_sentence_label"] == 0)
        assert set(dataset["next_sentence_label"][:]) == {0, 1}

    def test_all_text_is_used_but_for_the_second_segments_of_other_documents(self, word_tokenizer):
        # Paragraphs of two words, seven of which fill a row, so that nothing is cut off.
        words = [[f"w{44 * document + i}" for i in range(44)] for document in range(2)]
        documents = [[" ".join(own[i : i + 2]) for i in range(0, 44, 2)] for own in words]
        for seed in range(4):
            rows = pretraining_dataset(documents, word_tokenizer, 17, nsp=True, seed=seed, short_seq_prob=0.0)
            used = set()
            for row in rows:
                ids = row["input_ids"]
                used |= set(ids[: row["token_type_ids"].index(1)] if row["next_sentence_label"] else ids)
            assert used >= set(word_tokenizer.convert_tokens_to_ids(sum(words, [])))
            assert set(rows["next_sentence_label"][:]) == {0, 1}

    def test_long_segments_are_cut_at_both_ends(self, word_tokenizer):
        documents = [[" ".join(f"w{i}" for i in range(40))] * 2 for _ in range(20)]
        rows = pretraining_dataset(documents, word_tokenizer, 23, nsp=True, short_seq_prob=0.0)["input_ids"][:]
        assert all(len({row[place] for row in rows}) > 3 for place in (1, -2)) and max(map(len, rows)) == 23

    def test_long_documents_under_a_limit(self, word_tokenizer):
        """Reading stops when the second document has begun."""
        documents = [[" ".join(f"w{i % 40}" for i in range(30))] * 3000 for _ in range(3)]
        rows = pretraining_dataset(documents, word_tokenizer, 32, nsp=True, max_tokens=1000)["input_ids"][:]
        assert 900 < sum(map(len, rows)) <= 1000

    def test_arguments(self, tokenizer):
        def rows(number=20, **settings):
            return pretraining_dataset(make_documents(number), tokenizer, 64, nsp=True, **settings)["input_ids"][:]

        assert rows() == rows(seed=0) != rows(seed=1)
        short, long = (np.mean([*map(len, rows(50, short_seq_prob=share))]) for share in (1.0, 0.0))
        assert short < long - 10
        assert 900 < sum(map(len, rows(100, max_tokens=1000))) <= 1000
        with pytest.raises(ValueError, match="at least 2 documents, got 1"):
            rows(1)


class TestPretrainingDatasetErrors:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"max_length": 7}, "max_length must be an integer of at least 8, got 7"),
            ({"max_length": 64, "max_tokens": 63}, "max_tokens must be at least max_length=64, got 63"),
            ({"max_length": 64, "short_seq_prob": 1.5}, "short_seq_prob must be a number from 0 to 1, got 1.5"),
        ],
    )
    def test_arguments(self, tokenizer, arguments, message):
        with pytest.raises(ValueError, match=message):
            pretraining_dataset((pytest.fail("read before the check") for _ in range(1)), tokenizer, **arguments)

    def test_too_little_text(self, tokenizer):
        for text in ([], [[" "]], [["red house"]]):
            with pytest.raises(ValueError, match="too few for one row of max_length=64"):
                pretraining_dataset(text, tokenizer, 64)

    def test_warnings(self, tokenizer, caplog):
        with caplog.at_level(logging.WARNING):
            pretraining_dataset([["the red house walks", "\u200b", "the red house walks"] * 20], tokenizer, 16)
        assert "58 of 60 paragraphs (97%) repeat" in caplog.text
        assert "Skipped 20 pieces of text" in caplog.text


class TestCollator:
    def test_masks_and_pads(self, tokenizer):
        examples = list(pretraining_dataset(make_documents(300), tokenizer, 64, nsp=True).select(range(256)))
        batch = pretraining_collator(tokenizer, pad_to_multiple_of=64)(examples)
        assert set(batch) == {"input_ids", "token_type_ids", "attention_mask", "labels", "next_sentence_label"}
        assert batch["next_sentence_label"].tolist() == [row["next_sentence_label"] for row in examples]
        assert all(batch[name].shape == (256, 64) for name in set(batch) - {"next_sentence_label"})
        lengths = torch.tensor([len(row["input_ids"]) for row in examples])
        assert (batch["attention_mask"].sum(1) == lengths).all()

        chosen = batch["labels"] != -100
        original = torch.where(chosen, batch["labels"], batch["input_ids"])
        for row, ids in zip(examples, original.tolist(), strict=True):
            assert ids[: len(row["input_ids"])] == row["input_ids"]
        assert not set(batch["labels"][chosen].tolist()) & {0, 2, 3}
        assert abs(chosen.sum() / (lengths - 3).sum() - 0.15) < 0.02
        masked = (batch["input_ids"] == tokenizer.mask_token_id)[chosen].float().mean()
        assert abs(masked - 0.8) < 0.05

    def test_masking_without_a_seed_is_dynamic(self, tokenizer):
        examples = list(pretraining_dataset(make_documents(20), tokenizer, 64).select(range(8)))
        collator = pretraining_collator(tokenizer)
        assert not collator(examples)["labels"].equal(collator(examples)["labels"])

    @pytest.mark.parametrize("nsp", [False, True], ids=["packed", "pairs"])
    def test_masking_is_a_function_of_seed_epoch_and_example(self, tokenizer, nsp):
        """In any order, batch, padding and process, without the global generator."""
        examples = list(pretraining_dataset(make_documents(40), tokenizer, 64, nsp).select(range(12)))

        def masked(epoch, order, seed=1, size=12, pad=None):
            collator = pretraining_collator(tokenizer, pad_to_multiple_of=pad, seed=seed)
            collator.set_epoch(epoch)
            found = {}
            for start in range(0, 12, size):
                chosen = order[start : start + size]
                batch = collator([dict(examples[index]) for index in chosen])
                for index, ids, labels in zip(chosen, batch["input_ids"], batch["labels"], strict=True):
                    length = len(examples[index]["input_ids"])
                    assert (labels[length:] == -100).all()
                    found[index] = ids[:length].tolist(), labels[:length].tolist()
            return [found[index] for index in range(12)]

        state = torch.get_rng_state()
        first = masked(0, range(12))
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(5)
        assert masked(0, range(12)[::-1], size=5, pad=128) == first
        others = [masked(1, range(12)), masked(0, range(12), seed=2), masked(2, range(12))]
        assert all(other[index] != first[index] for other in others for index in range(12))
        collator = pretraining_collator(tokenizer, seed=1)
        evaluation = collator.for_evaluation()
        before = evaluation(examples)["labels"]
        collator.set_epoch(5)
        assert evaluation(examples)["labels"].equal(before) and not collator(examples)["labels"].equal(before)

    def test_seeded_masking_has_the_shares_of_the_host(self, tokenizer):
        examples = list(pretraining_dataset(make_documents(300), tokenizer, 64))
        batch = pretraining_collator(tokenizer, 0.3, seed=0)(examples)
        ids = torch.tensor([row["input_ids"] for row in examples])
        chosen, changed = batch["labels"] != -100, batch["input_ids"] != ids
        assert not chosen[:, [0, -1]].any() and not (changed & ~chosen).any()
        assert torch.equal(batch["labels"][chosen], ids[chosen])
        count = chosen.sum().item()
        assert count / (ids > 4).sum().item() == pytest.approx(0.3, abs=0.01)
        masked = (batch["input_ids"] == tokenizer.mask_token_id) & chosen
        assert masked.sum().item() / count == pytest.approx(0.8, abs=0.015)
        assert (chosen & ~changed).sum().item() / count == pytest.approx(0.1, abs=0.015)
        words = batch["input_ids"][chosen & changed & ~masked]
        assert words.min() < 20 and words.max() > len(tokenizer) - 20 and len(words.unique()) > 100

    def test_bad_arguments(self, tokenizer):
        for share in (0, 1, -0.1):
            with pytest.raises(ValueError, match="mlm_probability must be greater than 0"):
                pretraining_collator(tokenizer, mlm_probability=share)
        with pytest.raises(ValueError, match="no mask_token"):
            pretraining_collator(BertTokenizerFast(vocab=tokenizer.get_vocab(), mask_token=None))
