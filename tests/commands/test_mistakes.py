"""Mistakes on the command line: each ends before any work in one line that names the field, with exit code 2."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from huggingface_hub.errors import HTTPError
from transformers import BertForMaskedLM

from sparsebert import SparseMask, attach, build_pattern
from sparsebert.commands import main


DEEP, HALF = "[" * 100_000 + "]" * 100_000, r'"w1 \ud800 w2"'
HEADER = "index\tsentence1\tsentence2\tlabel\n"
# What stands for the beginning of a command line that would run.
SEARCH = "search --model STOCK --data text.txt --target_sparsity 0.5 --max_length 16 --output_dir out"
TRANSLATE = "translate --train pairs.tsv --test pairs.tsv --pattern window --output_dir out"
FINETUNE = "finetune --task rte --model WINDOW --data GLUE --max_length 32 --max_steps 2 --use_cpu --output_dir out"


@pytest.fixture(scope="module")
def workshop(checkpoints, glue_folder, tmp_path_factory):
    """A folder with models, masks, texts and much that is damaged."""
    folder = tmp_path_factory.mktemp("workshop")
    copies = {"STOCK": "stock", "outer/model": "stock", "SIZELESS": "stock", "NO_TOKENIZER": "stock"}
    copies |= {"NULL": "stock", "NULL_TOKENIZER": "stock", "DAMAGED": "searching", "SEARCHING": "searching"}
    copies |= {"WINDOW": "window", "UNKNOWN": "window", "BAD_JSON": "window", "DEEP_JSON": "window"}
    for name, checkpoint in copies.items():
        shutil.copytree(checkpoints[checkpoint], folder / name)
    shutil.copytree(glue_folder, folder / "GLUE")
    for name, content in (("BAD_JSON", "{"), ("DEEP_JSON", f'{{"a": {DEEP}}}'), ("NULL", "null")):
        (folder / name / "config.json").write_text(content)
    (folder / "NULL_TOKENIZER/tokenizer.json").write_text("null")
    for name, field in (("UNKNOWN", {"pattern": "halves"}), ("SIZELESS", {"hidden_size": 0})):
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(config | field))
    for path in (folder / "NO_TOKENIZER").glob("tokenizer*"):
        path.unlink()
    build_pattern("window", 16, 2).save_pretrained(folder / "MASK")
    build_pattern("window", 32, 4).save_pretrained(folder / "MASK4")
    shutil.copytree(folder / "MASK", folder / "TRUNCATED")
    for path in (folder / "TRUNCATED/mask.safetensors", folder / "DAMAGED/model.safetensors"):
        path.write_bytes(path.read_bytes()[:20])
    model = BertForMaskedLM.from_pretrained(checkpoints["stock"])
    attach(model, "bigbird", mask_length=16, length_policy="error").save_pretrained(folder / "TABLE")
    (folder / "folder").mkdir()
    texts = {"file": "mine", "pairs.tsv": "a b\tc d\n", "text.txt": "\n\n".join(["w1 w2 w3 w4"] * 40)}
    texts |= {"one.txt": "w1", "eight.txt": "w1 w2 w3 w4 w5 w6 w7 w8\n" * 4, "empty.txt": "\n\n"}
    texts |= {"text.TXT": "w1 w2", "plain.txt.gz": "w1 w2"}
    texts |= {"half.jsonl": f'{{"text": "w1 w2"}}\n{{"text": {HALF}}}\n', "deep.jsonl": f'{{"text": {DEEP}}}\n'}
    texts["unpaired.txt"] = "\n\n".join(f"w{number % 7} w{number}" for number in range(120))
    for name, content in texts.items():
        (folder / name).write_text(content)
    (folder / "broken").symlink_to("gone")
    (folder / "loop").symlink_to("loop")
    return folder


@pytest.fixture
def check(workshop, refused, pretraining_flags, monkeypatch, tmp_path):
    """`check(words, said)`: the command is refused, in a line with the parts of `said` that ` ... ` divides."""
    monkeypatch.chdir(workshop)
    before = sorted(workshop.rglob("*"))

    def run(words, said):
        words = shlex.split(words) if isinstance(words, str) else words
        if words[0] == "PRETRAIN":
            words = pretraining_flags(tmp_path / "run", *words[1:])
        for name, line in (("SEARCH", SEARCH), ("TRANSLATE", TRANSLATE), ("FINETUNE", FINETUNE)):
            words = line.split() + words[1:] if words[0] == name else words
        line = refused(words)
        assert re.search(".*".join(map(re.escape, said.split(" ... "))), line), line
        assert sorted(workshop.rglob("*")) == before, "something was written"

    return run


# Command lines


@pytest.mark.parametrize(
    "words, said",
    [
        ("pretrian small", "unknown verb 'pretrian'; did you mean 'pretrain'"),
        ("pretrain", "expected a recipe or --field value"),
        ("pretrain smal", "unknown recipe 'smal'; did you mean 'small'"),
        ("pretrain search", "unknown recipe 'search'; did you mean 'learned_mask'"),
        ("pretrain folder", "recipe 'folder' is a folder, expected a YAML file"),
        ("pretrain nowhere/dense.yaml", "recipe nowhere/dense.yaml: no such file"),
        ("pretrain recipes/small.yaml", "the recipe that ships with the package is 'small'"),
        ("pretrain -output_dir run", "got '-output_dir': fields begin with two dashes"),
        ("pretrain small large", "expected --field value, got 'large'"),
        ("pretrain --max_steps 2 small", "--max_steps takes one value, got '2', 'small'"),
        ("pretrain --max_steps=", "--max_steps needs a value"),
        ("pretrain --max_steps", "--max_steps needs a value"),
        ("pretrain --serach soft", "unknown field '--serach'; did you mean '--search'"),
        ("pretrain --output-dir run", "unknown field '--output-dir'; did you mean '--output_dir'"),
        ("pretrain --model.serach soft", "section 'model' 'serach'; did you mean 'search'"),
        ("pretrain --modle.search soft", "unknown section 'modle'; did you mean 'model'"),
        ("pretrain --training.search soft", "section 'training' 'search': it is a field of section 'model'"),
        ("pretrain --hard maybe", "--hard must be true or false, got 'maybe'"),
        ("pretrain --hard 1", "--hard must be true or false, got 1"),
        ("pretrain --learning_rate fast", "--learning_rate must be a number, got 'fast'"),
        ("pretrain --max_length 12.5", "--max_length must be a whole number, got 12.5"),
        ("pretrain --max_length inf", "--max_length must be a whole number, got 'inf'"),
        ("pretrain --text '[a.txt'", "--text '[a.txt' is not YAML"),
        ("pretrain --pattern window --pattern_kwargs {window_size:3", "is not YAML"),
        ("pretrain --id2label 5", "--id2label must be fields such as {name: value}, got 5"),
        ("pretrain small --pattern windw", "pattern must be one of ... 'bigbird' ... got 'windw'"),
        ("pretrain small --pattern star --search soft", "pattern 'star' and search 'soft'"),
        ("finetune --task rte --mask", "--mask needs a value"),
        ("prune run --sparsities 0.5,0.9", "--sparsities must be a number, got '0.5,0.9'"),
        ("prune run --mask dense", "unknown field '--mask'"),
        ("prune DIR", "--output_dir is needed"),
        ("plan a b", "source takes one value, got 'a', 'b'"),
        ("report", "--runs is needed"),
        ("report --json list", "--json must be true or false, got 'list'"),
        ("reproduce copyng", "unknown experiment 'copyng'; did you mean 'copying'"),
        ("reproduce copying --only depth_1", "unknown cell in --only 'depth_1'"),
        ("search --model DIR", "--data is needed"),
        ("finetune finetune_small --task rte", "--model"),
        ("draw window --sources bigbird --output_dir out", "--sources is given twice: 'window'"),
        ("draw --output_dir out --length 8", "--length needs the name of a pattern"),
        ("theory", "expected names of patterns"),
        ("theory windw", "did you mean 'window'"),
        ("theory window --parameters window_size=3", "--parameters must be fields such as {name: value}"),
        ("theory --all --parameters '{window_size: 3}'", "--parameters needs the name of a pattern"),
        ("theory --maps --mappings", "exclude each other"),
        ("theory --all --length 4", "pattern window at 4 tokens: window_size must be ... got 5"),
        ("theory window --length 1", "--length must be at least 2"),
        ("theory window --figure x.png", "--figure needs --mappings"),
        ("theory --mappings --figure x.txt", "figure must be one of"),
        ("theory --mappings --figure .", "figure . is a folder"),
        ("theory --mappings --figure file/x.png", "figure file cannot be made"),
        ("theory runs/mask --without_diagonal", "--without_diagonal needs the name of a pattern"),
        ("theory --maps --seed 1", "--seed needs the name of a pattern"),
        ("theory --maps --length 16", "--length has no meaning with --maps"),
        ("theory --mappings --revision main", "revision 'main' has no meaning here"),
    ],
)
def test_command_lines(check, words, said):
    check(words, said)


@pytest.mark.parametrize(
    "content, said",
    [
        ("1:\n  max_steps: 3\n", "unknown section '1'"),
        ("modle:\n  search: soft\n", "unknown section 'modle'; did you mean 'model'"),
        ("max_steps: 3\n", "unknown section 'max_steps': it is a field of section 'training'"),
        ("data:\n  1: 2\n", "unknown field in section 'data' '1'"),
        ("data:\n  zzzzzz: 1\n", "section 'data' 'zzzzzz'; allowed: ... max_length"),
        ("data:\n  learning_rate: 1\n", "'learning_rate': it is a field of section 'training'"),
        ("training:\n  learning_rte: 1\n", "section 'training' 'learning_rte'; did you mean 'learning_rate'"),
        ("training:\n  max_steps: 3\n  max_steps: 4\n", "r.yaml ... the key 'max_steps' comes twice"),
        ("data:\n  text: caf\u00e9.txt\n".encode("latin-1"), "r.yaml: not UTF-8"),
        ("data:\n  nsp: false\n".encode("utf-16"), "r.yaml: not UTF-8"),
        ("data: " + "[" * 2000, "r.yaml: nested too deeply"),
        ("data:\n  text: \x01\n", "recipe r.yaml"),
        ("model: [unclosed\n", "recipe r.yaml"),
        ("training:\n\tmax_steps: 3\n", "recipe r.yaml ... '\\t'"),
        ("training:\n  max_steps: 3\n   seed: 3\n", "recipe r.yaml"),
        ("training: {}\n---\ndata: {}\n", "recipe r.yaml ... a single document"),
        ("training: *base\n", "recipe r.yaml ... undefined alias 'base'"),
        ("base: &base {}\ntraining:\n  <<: *base\n", "unknown section 'base'"),
        ("[training]\nmax_steps = 3\n", "recipe r.yaml"),
        ("- a\n- b\n", "r.yaml: expected sections with fields"),
        ("training:\n  seed: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("training:\n  max_steps:3\n", "section 'training' must hold fields, got 'max_steps:3'"),
        ("training:\n  seed: 2024-01-01\n", "training.seed must be a whole number, got '2024-01-01'"),
        ("training:\n  max_steps: yes\n", "training.max_steps must be a whole number, got 'yes'"),
        ("training:\n  max_steps:\n", "training.max_steps needs a value, got null"),
        ("data:\n  text: 1.5\n", "data.text must be text, or a list"),
        ("data:\n  pictures: n\n", "data.pictures must be true or false, got 'n'"),
        ("data:\n  max_tokens: 10M\n", "data.max_tokens must be a whole number, got '10M'"),
        ("data:\n  validation: []\n", "validation must be ... got []"),
        ("data:\n  tokenizer: 1.10\n", "data.tokenizer must be text, got 1.1: put it in quotes"),
        ("data:\n  tokenizer: [a, b]\n", "data.tokenizer must be text, got ['a', 'b']"),
        ("data:\n  pruning: 0.9\n", "data.pruning must be fields such as {name: value}, got 0.9"),
        ("training:\n  learning_rate: 1,5e-4\n", "training.learning_rate must be a number, got '1,5e-4'"),
        ("training:\n  learning_rate: .nan\n", "learning_rate must be a number of at least 0, got nan"),
        ("model:\n  target_sparsity: 90\n", "target_sparsity must be in (0, 1), got 90"),
        ("model:\n  search: off\n", "search must be one of 'soft', ... got 'off'"),
        ("model:\n  pattern: window\n  pattern_kwargs: window_size=3\n", "model.pattern_kwargs must be fields"),
        ("", "recipe r.yaml sets nothing"),
        ("training:\n", "recipe r.yaml sets nothing"),
    ],
)  # fmt: skip
def test_recipes(refused, monkeypatch, tmp_path, content, said):
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    flags = [] if "sets nothing" in said else ["--output_dir", "run"]
    assert re.search(".*".join(map(re.escape, said.split(" ... "))), refused(["pretrain", "r.yaml", *flags]))


# Values: the message names the field of the last flag, and what it got.

OUT_OF_RANGE = {
    "PRETRAIN": (
        "gradient_accumulation_steps 0, per_device_train_batch_size 0, num_attention_heads 0, num_attention_heads "
        "-4, num_hidden_layers 0, num_hidden_layers 1000000, hidden_dropout_prob 2, initializer_range .nan, "
        "layer_norm_eps -1, hidden_size 3, pad_token_id 100, dtype float23, save_steps 0, save_total_limit 0, "
        "freeze_sparsity 1.5, freeze_threshold 2, freeze_sparsity 0.99, weight_decay -1, learning_rate -1, "
        "learning_rate .inf, max_steps 0, max_steps -3, max_validation_tokens 3, max_tokens 3, mlm_probability 0, "
        "mlm_probability 1, max_length 64, target_sparsity 1, sparsity_weight -1"
    ),
    "FINETUNE": (
        "gradient_accumulation_steps 0, weight_decay -1, max_steps 0, dtype float23, seeds 4294967290, "
        "no_answer_threshold .nan, hidden_size 64, type_vocab_size 3"
    ),
    "SEARCH": "learning_rate -1, max_tokens 3, recover -1",
    "TRANSLATE": "max_steps 0, learning_rate -1, num_attention_heads 0",
    "plan MASK": "length 0, length 1000000000, device gpu, dtype fp16",
    "draw random --output_dir out": "length 1000000, seed -1",
    "theory window": "length 10000000",
    "lengthen WINDOW --output_dir out": "length 0, length 1000000000000",
    "prune WINDOW --output_dir out": "sparsities []",
}


@pytest.mark.parametrize(
    "command, field, value",
    [(command, *each.split()) for command, fields in OUT_OF_RANGE.items() for each in fields.split(", ")],
)
def test_values_out_of_range(check, command, field, value):
    searching = ["--search", "dam_s"] if command == "PRETRAIN" else []
    words = [*command.split(), *searching, f"--{field}", value]
    if field == "pad_token_id":
        words += ["--vocab_size", "100"]
    check(words, f"{field} ... {'' if field == 'hidden_size' else 'got'}")


# What is there, and does not fit


@pytest.mark.parametrize(
    "words, said",
    [
        ("--hidden_act gelo", "hidden_act 'gelo'; did you mean 'gelu'"),
        ("--search dam_s --num_attention_heads 3", "hidden_size ... num_attention_heads 3"),
        ("--max_steps -1 --num_train_epochs 0", "num_train_epochs must be more than 0, got 0.0"),
        ("--search dam_s --freeze_threshold 0.4 --freeze_sparsity 0.5", "freeze_threshold 0.4 and freeze_sparsity"),
        ("--mlm_probability 0.3 --is_decoder true", "mlm_probability ... has no meaning with is_decoder true"),
        ("--search dam_s --attn_implementation sparse_triton", "sparse_triton cannot run here"),
        ("--search dam_s --attn_implementation sparse_cpu", "sparse_cpu cannot run here: it does not support a mask"),
        ("--attn_implementation flash_attention_2", "sparse_sdpa"),
        ("--search dam_x", "search ... 'dam_s'"),
        ("--mask winodw", "unknown mask 'winodw'; did you mean 'window'"),
        ("--mask window", "mask 'window' is a pattern"),
        ("--metric_for_best_model acuracy", "metric_for_best_model of pre-training 'acuracy'"),
        ("--adam_beta1 1", "adam_beta1 must be less than 1, got 1"),
        ("--seeds 2 --data_seed 0", "data_seed has no meaning with several seeds, got 0"),
        ("--label_names labels", "label_names ... has no meaning here"),
        ("--mask dam_s", "'dam_s' is a search"),
        ("--mask MASK4 --search dam_s", "model.search ... has no meaning with the mask MASK4"),
        ("--mask MASK4 --pattern window", "model.pattern ... has no meaning with the mask MASK4"),
        ("--mask MASK4 --freeze_sparsity 0.5", "freeze_sparsity 0.5 has no meaning with the mask MASK4"),
        ("--base_model WINDOW --freeze_sparsity 0.5", "freeze_sparsity 0.5 has no meaning ... base_model WINDOW"),
        ("--base_model WINDOW --search_end 0.5", "search_end 0.5 has no meaning ... base_model WINDOW"),
        ("--base_model WINDOW --target_sparsity 0.5", "target_sparsity ... the pattern 'window' of base_model WINDOW"),
        ("--base_model SEARCHING --block_size 16", "block_size ... the search 'dam_s' of base_model SEARCHING"),
        ("--search dam_s --sparsity_weight 1 --target_sparsity 0.5", "sparsity_weight ... with target_sparsity 0.5"),
        ("--search dam_s --sparsity_ramp 0.9", "sparsity_ramp 0.9 has no meaning without target_sparsity"),
        ("--search dam_s --pruning '{final_sparsity: 0.5}' --hard true", "model.hard ... has no meaning with pruning"),
        ("--search dam_s --seed 3 --seeds [1]", "seed 3 has no meaning with the list of seeds [1]"),
        ("--pattern window --target_sparsity 0.5", "target_sparsity ... has no meaning with the pattern 'window'"),
        ("--pattern window --search_end 0.5", "search_end 0.5 has no meaning with the pattern 'window'"),
        ("--search dam_u --mask_seed 3", "mask_seed ... has no meaning with the search 'dam_u'"),
        ("--search dam_s --block_size 32", "model.block_size 32 has no meaning with the search 'dam_s'"),
        ("--block_size 64", "model.block_size 64 has no meaning with the search 'dam_s'"),
        ("--mask_seed 3", "mask_seed ... has no meaning with the search 'dam_s'"),
        ("--pattern bigbird --mask_length 8", "max_length ... 8 (mask_length)"),
        ("--pattern random --pattern_kwargs '{sparsity: 0.99}'", "keep nothing"),
        ("--base_model STOCK --hidden_size 64", "hidden_size must be 32, as in base_model STOCK, got 64"),
        ("--base_model STOCK --vocab_size 200", "vocab_size must be 100, as in base_model STOCK, got 200"),
        ("--base_model STOCK/model.safetensors", "base_model: 'STOCK/model.safetensors' is a file"),
        ("--base_model outer", "base_model: there is no config.json in the folder 'outer'; ... in outer/model"),
        ("--base_model MASK", "base_model: there is no config.json in the folder 'MASK'"),
        ("--base_model runs/nothing/here", "base_model: there is no folder 'runs/nothing/here'"),
        ("--base_model DAMAGED", "DAMAGED/model.safetensors is damaged"),
        ("--mask STOCK", "mask: there is no mask_config.json in the folder 'STOCK'"),
        ("--mask MASK/mask.safetensors", "mask: 'MASK/mask.safetensors' is a file"),
        ("--mask ~/nothing", f"mask: there is no folder '{Path.home()}/nothing'"),
        ("--tokenizer MASK", "tokenizer: there is no tokenizer.json or tokenizer_config.json or vocab.txt"),
        ("--tokenizer ./nothing", "tokenizer: there is no folder './nothing'"),
        ("--vocab_size 50", "vocab_size"),
        ("--report_to wandbb", "report_to must be all, none or what is installed"),
        ("--prediction_loss_only true", "prediction_loss_only must be false"),
        ("--nsp true --label_smoothing_factor 0.1", "label_smoothing_factor must be 0 with nsp true"),
        ("--lr_scheduler_kwargs '{a: 1}'", "lr_scheduler_type 'linear' with lr_scheduler_kwargs {'a': 1}"),
        ("--deepspeed ds.json", "deepspeed"),
        ("--base_model STOCK --output_dir ./STOCK --overwrite", "output_dir STOCK is the folder of base_model"),
        ("--output_dir file/run", "output_dir file/run cannot be made: file is a file"),
        ("--output_dir broken", "output_dir broken cannot be made: broken is a broken link"),
        ("--output_dir loop", "output_dir loop cannot be made"),
        (f"--output_dir {'x' * 300}", f"too long for the name of a file or folder: '{'x' * 190}"),
        ("--resume_from_checkpoint latest", "resume_from_checkpoint: there is no folder 'latest'"),
        ("--text [1,2]", "no such file: '1'"),
        ("--text *.csv", "no such file: '*.csv'"),
        ("--text hub:", "source must be 'hub:owner/name'"),
        ("--text text.TXT", "'text.TXT' is not a supported text file; its name must end in .txt"),
        ("--text folder", "text: 'folder' is a folder; name its files"),
        ("--text plain.txt.gz", "plain.txt.gz: corrupt .gz file"),
        ("--text empty.txt", "empty.txt"),
        ("--text half.jsonl", "half.jsonl:2 ... half of a surrogate pair"),
        ("--text deep.jsonl", "deep.jsonl:1 ... nested too deeply"),
        ("--validation one.txt", "validation: the text has only 1 tokens, too few for one row of max_length=16"),
        ("--validation eight.txt --mlm_probability 0.001", "validation: no token of it is masked"),
        ("--text unpaired.txt --validation null --nsp true", "text (its held-out part ... next-sentence pairs need"),
    ],
)
def test_pretraining(check, words, said):
    words = shlex.split(words)
    searched = {"--search", "--pattern", "--mask", "--is_decoder", "WINDOW", "SEARCHING"} & {*words}
    check(["PRETRAIN", *([] if searched else ["--search", "dam_s"]), *words], said)


def test_weights_without_their_tokenizer(check, pretraining_flags, tmp_path):
    words = pretraining_flags(tmp_path / "run", "--base_model", "NO_TOKENIZER")
    place = words.index("--tokenizer")
    check(words[:place] + words[place + 2 :], "tokenizer: that of base_model NO_TOKENIZER cannot be read")


@pytest.mark.parametrize(
    "words, said",
    [
        ("--task rtee", "task 'rtee'; did you mean 'rte'"),
        ("--sweep {learning_rate:[1e-3,-1]}", "learning_rate must be a number of at least 0, got -1.0"),
        ("--sweep learning_rate", "--sweep must be true or false, or fields such as"),
        ("--sweep '{optim: [adamw_torch, adamw_toch]}'", "adamw_toch is not a valid OptimizerNames"),
        ("--sweep '{label_smoothing_factor: [0.0, 0.1]}' --task stsb", "label_smoothing_factor must be 0 ... stsb"),
        ("--max_length 64", "max_length 64 is more than the 40 positions"),
        ("--model outer", "model: there is no config.json in the folder 'outer'; there is one in outer/model"),
        ("--model DAMAGED", "DAMAGED/model.safetensors is damaged"),
        ("--model BAD_JSON", "BAD_JSON/config.json is damaged"),
        ("--model DEEP_JSON", "DEEP_JSON/config.json is damaged"),
        ("--attn_implementation sparse_triton", "sparse_triton cannot run here"),
        ("--mask widow", "unknown mask 'widow'; did you mean 'window'"),
        ("--validation_split []", "validation_split must name a split, got []"),
        ("--load_best_model_at_end true", "load_best_model_at_end true has no meaning with eval_strategy 'no'"),
        ("--save_steps 1", "save_steps ... has no meaning without --save_strategy steps or epoch"),
        ("--eval_steps 1", "eval_steps ... has no meaning without --eval_strategy steps"),
        ("--sweep '{num_train_epochs: [1, 2]}'", "num_train_epochs [1.0, 2.0] has no meaning with max_steps"),
        ("--seeds 1,2", "seeds must be a number of runs or a list of seeds, got ['1,2']"),
        ("--seeds 1 4294967296", "seeds must be at most 4294967295, got 4294967296"),
        ("--data GLUE/RTE/train.tsv", "data: there is no folder"),
        ("--train_split dev", "split 'dev' is missing"),
        ("--output_dir WINDOW --overwrite", "output_dir WINDOW is the folder of model, which would be replaced"),
        ("--output_dir STOCK", "output_dir STOCK is not empty"),
        ("--batch_eval_metrics true", "batch_eval_metrics must be false"),
        ("--eval_do_concat_batches false", "eval_do_concat_batches must be true"),
        ("--task stsb --label_smoothing_factor 0.1", "label_smoothing_factor must be 0 for task stsb"),
        ("--task squad --max_length 40 --label_smoothing_factor 0.1", "label_smoothing_factor must be 0 ... squad"),
        ("--metric_for_best_model acuracy", "metric_for_best_model ... 'acuracy'; did you mean 'accuracy'"),
        ("--metric_for_best_model eval_f1", "metric_for_best_model ... 'eval_f1'; allowed: accuracy, loss"),
        ("--all --task null --label_smoothing_factor 0.1", "must be 0 for task stsb"),
        ("--all --task null --metric_for_best_model accuracy", "metric_for_best_model of task stsb 'accuracy'"),
    ],
)
def test_finetuning(check, words, said):
    check(f"FINETUNE {words}", said)


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("train.tsv", HEADER + "1\tw1\t\tentailment\n", "train.tsv: row 2, field 'sentence2': is empty"),
        ("train.tsv/x", "", "split 'train' is missing in "),
    ],
)
def test_files_of_a_task(check, write_data, name, content, said):
    write_data("dev.tsv", HEADER + "1\tw1\tw2\tentailment\n2\tw1\tw2\tnot_entailment\n")
    check(f"FINETUNE --data {write_data(name, content)}", said)


@pytest.mark.parametrize(
    "words, said",
    [
        ("report nowhere", "nowhere: there is no such folder, config.json or mask_config.json is not in the cache"),
        *((f"{verb} UNKNOWN", "UNKNOWN: pattern must be one of") for verb in ("plan", "report", "theory")),
        *((f"draw window --output_dir {name}", f"output_dir {name} cannot be made") for name in ("file", "file/out")),
        ("plan folder/nothing", "there is no folder 'folder/nothing'; if it is a Hub id, the folder folder hides it"),
        ("plan ./nothing", "there is no folder './nothing'"),
        ("plan DAMAGED", "DAMAGED/model.safetensors is damaged or truncated"),
        ("analyze DAMAGED --output_dir out", "DAMAGED/model.safetensors is damaged or truncated"),
        ("analyze MASK --output_dir file", "output_dir file cannot be made: file is a file"),
        ("push DAMAGED --repo_id user/name", "DAMAGED/model.safetensors is damaged or truncated"),
        ("push TRUNCATED --repo_id user/name", "TRUNCATED/mask.safetensors: damaged"),
        ("masks file", "'file' is a file, expected a folder or Hub id"),
        (
            "compile STOCK --output_dir out --precision int4",
            "precision must be one of 'auto', 'float32', 'bfloat16', ",
        ),
        ("compile STOCK --output_dir out --precision int8", "precision 'int8' needs data"),
        ("compile STOCK --output_dir out --engine tpu", "engine must be one of 'openvino', got 'tpu'"),
        ("compile STOCK --output_dir out --num_texts 0", "num_texts must be an integer of at least 1, got 0"),
        ("compile STOCK --output_dir out --min_cosine 2", "min_cosine must be a number from 0 to 1, got 2"),
        ("lengthen MASK --length 64 --output_dir out", "model: there is no config.json in the folder"),
        ("lengthen WINDOW --length 64 --output_dir file", "output_dir file cannot be made: file is a file"),
        ("lengthen WINDOW/config.json --length 64 --output_dir out", "is a file, expected a folder or Hub id"),
        ("lengthen TABLE --length 64 --output_dir out", "length must be at most 16 under the mask"),
        ("lengthen TABLE --length 64 --length_policy x --output_dir out", "length_policy must be one of 'extend', "),
        ("lengthen STOCK --length 64 --length_policy dense --output_dir out", "length_policy ... which has no mask"),
        ("lengthen DAMAGED --length 64 --output_dir out", "DAMAGED/model.safetensors is damaged or truncated"),
        ("lengthen SIZELESS --length 64 --output_dir out", "hidden_size in the config.json of SIZELESS"),
        ("lengthen NULL --length 64 --output_dir out", "NULL: the files of its configuration or tokenizer are not"),
        ("lengthen NULL_TOKENIZER --length 64 --output_dir out", "NULL_TOKENIZER: the files of its configuration or"),
        ("SEARCH --model SIZELESS", "hidden_size in the config.json of SIZELESS must be at least 1, got 0"),
        ("SEARCH --recover 2 --recover_learning_rate .nan", "recover_learning_rate must be a number from 0"),
        ("SEARCH --model STOCK/config.json", "model: 'STOCK/config.json' is a file"),
        ("SEARCH --output_dir file", "output_dir file cannot be made: file is a file"),
        ("SEARCH --search dam_u --block_size 32", "block_size 32 has no meaning with the search 'dam_u'"),
        ("SEARCH --sparsity_weight 1", "sparsity_weight ... has no meaning here: the search has a target"),
        ("SEARCH --steps 0 --train norms", "train 'norms' has no meaning with steps 0"),
        (
            "SEARCH --mask bigbird --recover 1 --objective layers",
            "objective 'layers' ... without a search",
        ),
        ("SEARCH --initial_decay 0", "initial_decay ... has no meaning here: the search starts from what"),
        ("SEARCH --target_sparsity null --recover 1 --mask winodw", "unknown mask 'winodw'; did you mean 'window'"),
        ("reproduce copying --output file --only star_depth_1_*", "output file cannot be made: file is a file"),
    ],
)
def test_other_verbs(check, words, said):
    check(words, said)


@pytest.mark.parametrize("words", ["FINETUNE", "PRETRAIN"])
def test_a_connection_that_is_cut(check, monkeypatch, words):
    def cut(*args, **kwargs):
        raise HTTPError("peer closed connection without sending complete message body")

    monkeypatch.setattr(SparseMask, "from_pretrained", cut)
    check(f"{words} --mask owner/name", "owner/name ... peer closed connection")


def test_one_line_whatever_is_nested(monkeypatch, capsys):
    def fail(*args):
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr("sparsebert.commands.parse", fail)
    assert main(["report", "a"]) == 2
    assert capsys.readouterr().err == "sparsebert report: what was given is nested too deeply\n"


def test_words_that_are_not_text(check):
    check(["draw", "window", "--output_dir", os.fsdecode(b"t\xf6")], "'t\\udcf6' is not text in the encoding")
