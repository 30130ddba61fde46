"""How a recipe and the words of a command line become values."""

import dataclasses
import importlib

import pytest
import yaml
from transformers import TrainingArguments

from sparsebert import SparseBertConfig
from sparsebert.commands import VERBS, parse
from sparsebert.commands._command import Command
from sparsebert.commands._words import read_words
from sparsebert.recipe_files import find_recipe, read_recipe, recipe_names


TEXTS = "3 1.10 1e-4 on true &amp !x * # 2024-01-01 a: [x {a} 'q'"
RECIPE = "model:\n  search: soft\n  hard: true\ntraining:\n  max_steps: 3\n"


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")


@pytest.mark.parametrize(
    "words, field, value",
    [
        ("--search dam_u", "model.search", "dam_u"),
        ("--search=dam_u", "model.search", "dam_u"),
        ("--model.search dam_u", "model.search", "dam_u"),
        ("--model.search=dam_u", "model.search", "dam_u"),
        ("--search null", "model.search", None),
        ("--max_steps 1 --max_steps 2", "training.max_steps", 2),
        ("--max_steps 6e6", "training.max_steps", 6_000_000),
        ("--learning_rate 5e-4", "training.learning_rate", 5e-4),
        ("--hard false", "model.hard", False),
        ("--hard", "model.hard", True),
        ("--overwrite true", "data.overwrite", True),
        ("--overwrite --search dam_u", "data.overwrite", True),
        ("--pattern_kwargs {window_size:\u00a03}", "model.pattern_kwargs", {"window_size": 3}),
        ("--text a.txt b.txt", "data.text", ["a.txt", "b.txt"]),
        ("--text [a.txt,1.txt,2]", "data.text", ["a.txt", "1.txt", "2"]),
        ("--text a=b.txt", "data.text", "a=b.txt"),
        # Text stays what was typed.
        *((f"--tokenizer {text}", "data.tokenizer", text) for text in TEXTS.split()),
        ("--text null", "data.text", "null"),
        ("--text &amp", "data.text", "&amp"),
        ("--save_strategy no", "training.save_strategy", "no"),
        ("--base_model ~/bert", "data.base_model", "/home/me/bert"),
    ],
)
def test_flags(tmp_path, words, field, value):
    (tmp_path / "r.yaml").write_text(RECIPE)
    section, name = field.split(".")
    words = [word.replace("\u00a0", " ") for word in words.split(" ")]
    got = parse(["pretrain", "r.yaml", *words])[1][section][name]
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    "line, section, value",
    [
        ("save_strategy: no", "training", "no"),
        ("output_dir: 2024-01-01", "training", "2024-01-01"),
        ("output_dir: 12", "training", "12"),
        ("seed: 010", "training", 10),
        ('learning_rate: "1e-4"', "training", 1e-4),
        ("learning_rate: 1e-4", "training", 1e-4),
        ("max_steps: 1e3", "training", 1000),
        ("resume_from_checkpoint: true", "training", "true"),
        ("pictures: No", "data", False),
        ('pictures: "yes"', "data", True),
        ("max_tokens: 1_000", "data", 1000),
        ("max_tokens: 6e3", "data", 6000),
        ("mask: no", "data", "no"),
        ("text: [1.txt, 2]", "data", ["1.txt", "2"]),
        ("base_model: ~/bert", "data", "/home/me/bert"),
        ("search: null", "model", None),
    ],
)
def test_recipes(tmp_path, line, section, value):
    (tmp_path / "r.yaml").write_text(f"{section}:\n  {line}\n")
    got = parse(["pretrain", "r.yaml"])[1][section][line.partition(":")[0]]
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    "words, section, field, value",
    [
        ("report a b", "report", "runs", ["a", "b"]),
        ("report 2024", "report", "runs", ["2024"]),
        ("report --runs a b", "report", "runs", ["a", "b"]),
        ("report a -o page.html", "report", "output", "page.html"),
        ("prune run --output_dir x --sparsities 0.5 1e-1", "pruning", "sparsities", [0.5, 0.1]),
        ("prune run --output_dir x --sparsities [0.5,0.9]", "pruning", "sparsities", [0.5, 0.9]),
        ("prune run --output_dir x --sparsities 0.5", "pruning", "sparsities", [0.5]),
        ("theory window --parameters {stride:\u00a0sqrt}", "theory", "parameters", {"stride": "sqrt"}),
        ("reproduce copying --scale paper", "run", "scale", "paper"),
        ("plan DIR --json", "print", "json", True),
        ("finetune --seeds 3", "data", "seeds", 3),
        ("finetune --seeds [3]", "data", "seeds", [3]),
        ("finetune --seeds 3 5", "data", "seeds", [3, 5]),
    ],
)  # fmt: skip
def test_names_and_lists(words, section, field, value):
    assert parse([word.replace("\u00a0", " ") for word in words.split(" ")])[1][section][field] == value


def test_values_build_their_objects(tmp_path):
    (tmp_path / "r.yaml").write_text("model:\n  search: soft\n  sparsity_weight: 1e-5\ntraining:\n  output_dir: x\n")
    _, values = parse(["pretrain", "r.yaml", "--learning_rate", "1e-3", "--weight_decay", "1e-2"])
    assert values["data"] == {} and values["model"] == {"search": "soft", "sparsity_weight": 1e-5}
    assert SparseBertConfig(**values["model"]).sparsity_weight == 1e-5
    training = TrainingArguments(**values["training"])
    assert (training.learning_rate, training.weight_decay) == (1e-3, 1e-2)


def read(words, **sections):
    return read_words(words, Command(lambda values: None, sections, ()))


def test_a_flag_of_two_sections_asks_for_one():
    first = dataclasses.make_dataclass("First", [("size", int, 1), ("name", str, "")])
    second = dataclasses.make_dataclass("Second", [("size", int, 1)])
    with pytest.raises(ValueError, match="--size is a field of first and second: write --first.size"):
        read(["--size", "2"], first=first, second=second)
    assert read(["--second.size", "2"], first=first, second=second)["second"] == {"size": 2}


def test_fields_whose_type_is_unknown_are_read():
    @dataclasses.dataclass
    class Section:
        value: "Nowhere | None" = None  # noqa: F821
        number: int = 1

    assert read(["--value", "text", "--number", "2"], data=Section)["data"] == {"value": "text", "number": 2}


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_found_by_its_name(name):
    commands = {verb: importlib.import_module(f"sparsebert.commands.{verb}").command([]) for verb in VERBS}
    (verb,) = (
        verb for verb, each in commands.items() if each.positional is None and name in recipe_names(each.sections)
    )
    by_name, by_path = parse([verb, name])[1], parse([verb, str(find_recipe(name))])[1]
    assert by_name == by_path
    recipe, stock = read_recipe(find_recipe(name)), yaml.safe_load(find_recipe(name).read_text())
    assert {section for section, values in by_name.items() if values} == set(recipe)
    for section, fields in recipe.items():  # only words differ in YAML 1.1, and those that ship have none of these
        for field, value in (fields or {}).items():
            assert str(stock[section][field]) == str(value) or float(stock[section][field]) == value


def test_a_file_comes_before_a_recipe_of_that_name(tmp_path):
    (tmp_path / "small").write_text("model: {search: soft}\n")
    assert parse(["pretrain", "small"])[1]["model"] == {"search": "soft"}


@pytest.mark.parametrize(
    "words, said",
    [
        ("--seed 1 --seed 2", ["--seed is given 2 times: the last value counts, 2"]),
        ("--seed 1 --training.seed 2 --seed=3 --nsp", ["--seed is given 3 times: the last value counts, 3"]),
        ("--nsp false --nsp --overwrite", ["--nsp is given 2 times: the last value counts, true"]),
        ("--seed 1 --search dam_u --nsp", []),
    ],
)
def test_a_flag_that_is_given_again_is_said(monkeypatch, words, said):
    warned = []
    monkeypatch.setattr("sparsebert.commands._words.logger.warning", warned.append)
    parse(["pretrain", "small", *words.split()])
    assert warned == said


@pytest.mark.parametrize(
    "words, model, data",
    [
        ("small --pattern window", {"pattern": "window"}, {}),
        ("small --mask found", {}, {"mask": "found"}),
        ("learned_mask --pattern window --mask_seed 3", {"pattern": "window", "mask_seed": 3}, {}),
        ("language_modelling --search dam_s", {"search": "dam_s"}, {}),
        ("tiles --search dam_s", {"search": "dam_s", "sparsity_weight": 0.0}, {}),
        ("tiles --search=dam_b", {"search": "dam_b", "sparsity_weight": 0.0, "block_size": 64}, {}),
        ("small --pattern null", {"sparsity_weight": 1e-4, "pattern": None}, {}),
        ("small --target_sparsity 0.9", {"target_sparsity": 0.9}, {}),
        (
            "tiles --target_sparsity 0.9 --sparsity_weight 1",
            {"search": "dam_b", "target_sparsity": 0.9, "sparsity_weight": 1.0, "block_size": 64},
            {},
        ),
    ],
)
def test_another_kind_of_mask_drops_what_the_recipe_says_of_its_own(words, model, data):
    _, values = parse(["pretrain", *words.split()])
    about = {"search", "pattern", "pattern_kwargs", "mask_seed", "sparsity_weight", "target_sparsity", "mask"}
    about.add("block_size")
    assert {name: value for name, value in values["model"].items() if name in about} == model
    assert {name: value for name, value in values["data"].items() if name in {*about, "search_end"}} == data
    assert values["training"]["save_strategy"] == "no"
    assert "save_strategy" not in parse(["pretrain", *words.split(), "--save_steps", "10"])[1]["training"]
