"""Recipes: how a YAML file and the command line become values, and what is said when they cannot."""

import dataclasses

import pytest
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import TrainingArguments

from sparsebert import SparseBertConfig
from sparsebert.training.pretraining.pretraining_arguments import PretrainingArguments
from sparsebert.training.recipes import load_recipe


SECTIONS = {"data": PretrainingArguments, "model": SparseBertConfig, "training": TrainingArguments}


@pytest.fixture
def recipe(tmp_path):
    """`recipe(text)`: path of a YAML file."""

    def write(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


# Parsing: values


def test_sections_hold_what_was_set(recipe):
    path = recipe("data:\n  nsp: false\nmodel:\n  search: soft\ntraining:\n  learning_rate: 1e-3\n  max_steps: 7\n")
    assert load_recipe([path], SECTIONS) == {
        "data": {"nsp": False},
        "model": {"search": "soft"},
        "training": {"learning_rate": 1e-3, "max_steps": 7},
    }


@pytest.mark.parametrize("text", ["", "data:\n", "model: {}\n"], ids=["empty", "empty section", "no fields"])
def test_a_recipe_may_set_nothing(recipe, text):
    assert load_recipe([recipe(text)], SECTIONS) == {"data": {}, "model": {}, "training": {}}


@pytest.mark.parametrize(
    "flags, section, field, value",
    [
        (["--search", "dam_u"], "model", "search", "dam_u"),
        (["--search=dam_u"], "model", "search", "dam_u"),
        (["--model.search", "dam_u"], "model", "search", "dam_u"),
        (["--model.search=dam_u"], "model", "search", "dam_u"),
        (["--search", "null"], "model", "search", None),
        (["--learning_rate", "5e-4"], "training", "learning_rate", 5e-4),
        (["--sparsity_weight", "1e-6"], "model", "sparsity_weight", 1e-6),
        (["--max_steps", "12"], "training", "max_steps", 12),
        (["--hard", "false"], "model", "hard", False),
        (["--hard"], "model", "hard", True),
        (["--overwrite", "--search", "dam_u"], "data", "overwrite", True),
        (["--text", "[a.txt, b.txt]"], "data", "text", ["a.txt", "b.txt"]),
        (["--text", "a=b.txt"], "data", "text", "a=b.txt"),
        (["--pattern_kwargs", "{window_size: 3}"], "model", "pattern_kwargs", {"window_size": 3}),
        (["--max_steps", "1", "--max_steps", "2"], "training", "max_steps", 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_override_the_recipe(recipe, flags, section, field, value):
    path = recipe("model:\n  search: soft\n  hard: true\ntraining:\n  max_steps: 3\n")
    got = load_recipe([path, *flags], SECTIONS)[section][field]
    assert got == value and type(got) is type(value)


def test_overridden_recipe_builds_its_objects(recipe):
    path = recipe("model:\n  search: soft\n  sparsity_weight: 1e-5\ntraining:\n  output_dir: runs/x\n")
    values = load_recipe([path, "--learning_rate", "1e-3", "--weight_decay", "1e-2"], SECTIONS)
    assert SparseBertConfig(**values["model"]).sparsity_weight == 1e-5
    training = TrainingArguments(**values["training"])
    assert (training.learning_rate, training.weight_decay) == (1e-3, 1e-2)


# Parsing: errors


@pytest.mark.parametrize(
    "text, said",
    [
        ("modle:\n  search: soft\n", "unknown section 'modle'; did you mean 'model'"),
        ("model:\n  serach: soft\n", "section 'model' 'serach'; did you mean 'search'"),
        ("training:\n  learning_rte: 1\n", "section 'training' 'learning_rte'; did you mean 'learning_rate'"),
        ("data:\n  zzzzzz: 1\n", "section 'data' 'zzzzzz'; allowed: .*max_length"),
    ],
    ids=["section", "model", "training", "nothing near"],
)
def test_unknown_key_names_the_nearest(recipe, text, said):
    with pytest.raises(ValueError, match=f"unknown.*{said.removeprefix('unknown ')}"):
        load_recipe([recipe(text)], SECTIONS)


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--serach", "soft"], "unknown field '--serach'; did you mean '--search'"),
        (["--model.serach", "soft"], "'serach'; did you mean 'search'"),
        (["--modle.search", "soft"], "unknown section 'modle'; did you mean 'model'"),
        (["--training.search", "soft"], "unknown field in section 'training' 'search'"),
        (["--max_steps"], "--max_steps needs a value"),
        (["soft"], "expected --field value, got 'soft'"),
        (["--max_steps", "3", "4"], "--max_steps takes one value, got '3', '4'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_flags(recipe, flags, said):
    with pytest.raises(ValueError, match=said):
        load_recipe([recipe(""), *flags], SECTIONS)


def test_ambiguous_flag_asks_for_the_section(recipe):
    first = dataclasses.make_dataclass("First", [("size", int, 1), ("name", str, "")])
    second = dataclasses.make_dataclass("Second", [("size", int, 1)])
    sections = {"first": first, "second": second}
    with pytest.raises(ValueError, match="--size is a field of first and second: write --first.size"):
        load_recipe([recipe(""), "--size", "2"], sections)
    assert load_recipe([recipe(""), "--second.size", "2"], sections) == {"first": {}, "second": {"size": 2}}


@pytest.mark.parametrize(
    "text, flags, said",
    [
        ("training:\n  learning_rate: fast\n", [], "training.learning_rate must be a number, got 'fast'"),
        ("", ["--learning_rate", "fast"], "--learning_rate must be a number, got 'fast'"),
        ("", ["--mlm_probability", "some"], "--mlm_probability must be a number, got 'some'"),
        ("", ["--max_length", "long"], "--max_length must be a whole number, got 'long'"),
    ],
    ids=["recipe", "training", "float", "int"],
)
def test_text_where_a_number_is_meant(recipe, text, flags, said):
    with pytest.raises(ValueError, match=said):
        load_recipe([recipe(text), *flags], SECTIONS)


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--hard", "maybe"], "--hard must be true or false, got 'maybe'"),
        (["--hard", "1"], "--hard must be true or false, got 1"),
        (["--block_size", "3.5"], "--block_size must be a whole number, got 3.5"),
        (["--nsp", "maybe"], "--nsp must be true or false, got 'maybe'"),
        (["--max_length", "12.5"], "--max_length must be a whole number, got 12.5"),
        (["--max_length", "[1]"], "--max_length must be a whole number, got"),
        (["--max_length", "inf"], "--max_length must be a whole number, got 'inf'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_type_is_refused(recipe, flags, said):
    with pytest.raises(ValueError, match=said.replace("[", r"\[")):
        load_recipe([recipe(""), *flags], SECTIONS)


@pytest.mark.parametrize(
    "text, value",
    [("1e3", 1000), ("6e6", 6_000_000), ("1000", 1000)],
)
def test_whole_numbers_may_be_written_with_an_exponent(recipe, text, value):
    in_recipe = load_recipe([recipe(f"training:\n  max_steps: {text}\n")], SECTIONS)
    as_flag = load_recipe([recipe(""), "--max_steps", text], SECTIONS)
    for got in (in_recipe["training"]["max_steps"], as_flag["training"]["max_steps"]):
        assert got == value and type(got) is int


@pytest.mark.parametrize("flags", [["--save_strategy", "no"], ["--tokenizer", "3"], ["--pattern", "2024-01-01"]])
def test_text_stays_as_typed(recipe, flags):
    values = load_recipe([recipe(""), *flags], SECTIONS)
    assert flags[1] in [value for section in values.values() for value in section.values()]


def test_wrong_model_value_names_its_field(recipe):
    values = load_recipe([recipe(""), "--search", "dam"], SECTIONS)
    with pytest.raises(StrictDataclassFieldValidationError, match="'search'"):
        SparseBertConfig(**values["model"])


@pytest.mark.parametrize(
    "text, said",
    [
        ("model: [unclosed\n", "recipe.yaml"),
        ("- a\n- b\n", "expected sections with fields"),
        ("just words\n", "expected sections with fields"),
        ("model: soft\n", "model"),
        ("model:\n  - search\n", "model"),
    ],
    ids=["not YAML", "a list", "a text", "section is a text", "section is a list"],
)
def test_damaged_recipe_says_what_is_wrong(recipe, text, said):
    with pytest.raises(ValueError, match=said):
        load_recipe([recipe(text)], SECTIONS)


@pytest.mark.parametrize(
    "words, value", [(["3"], 3), (["[3]"], [3]), (["3", "5"], [3, 5]), (["null"], None)], ids=lambda value: str(value)
)
def test_a_number_stays_one_where_a_list_may_stand(words, value):
    section = dataclasses.make_dataclass("Runs", [("seeds", int | list | None, 1)])
    assert load_recipe(["--seeds", *words], {"runs": section}) == {"runs": {"seeds": value}}


def test_value_that_is_not_yaml(recipe):
    with pytest.raises(ValueError, match="text"):
        load_recipe([recipe(""), "--text", "[a.txt"], SECTIONS)


def test_missing_recipe(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.yaml: no such file"):
        load_recipe([str(tmp_path / "nowhere.yaml")], SECTIONS)


def test_the_recipe_may_be_left_out():
    assert load_recipe(["--search", "soft"], SECTIONS) == {"data": {}, "model": {"search": "soft"}, "training": {}}
    with pytest.raises(ValueError, match="expected a recipe or --field value"):
        load_recipe([], SECTIONS)


def test_fields_whose_type_is_unknown_are_read():
    @dataclasses.dataclass
    class Section:
        value: "Nowhere | None" = None  # noqa: F821
        number: int = 1

    values = load_recipe(["--value", "text", "--number", "2"], {"data": Section})
    assert values == {"data": {"value": "text", "number": 2}}
