"""The help of the command line, from the docstrings of verbs and dataclasses and the keys of registries."""

import inspect
import re
import textwrap
from dataclasses import MISSING, fields, is_dataclass

from ..attention.choosing.choice import ATTENTION_NAMES
from ..attention.probability_maps import PROBABILITY_MAPS
from ..data.tasks import TASKS
from ..hub import HubArguments
from ..learning.mask_description import MASK_FORMS
from ..learning.searches import SEARCHES
from ..learning.selection import SCOPES
from ..masks.expansion import LENGTH_POLICIES, SPECIAL_TOKENS
from ..masks.patterns import HEAD_CONFIGURATIONS, PATTERNS
from ..masks.sparse_mask import DIAGONALS, LAST_TOKENS
from ..models.bert.configuration_sparsebert import SparseBertConfig
from ..models.bert.token_mixers import MIXERS
from ..models.lengthening import METHODS
from ..training.recipes import recipe_names
from ..training.searching.objectives import OBJECTIVES
from ._command import Command


WIDTH = 100
INDENT = 34
# What a field accepts, by its name.
CHOICES = {
    "attn_implementation": ATTENTION_NAMES,
    "diagonal": DIAGONALS,
    "head_configuration": HEAD_CONFIGURATIONS,
    "last_token": LAST_TOKENS,
    "length_policy": LENGTH_POLICIES,
    "mask_form": MASK_FORMS,
    "method": METHODS,
    "objective": OBJECTIVES,
    "pattern": PATTERNS,
    "probability_map": PROBABILITY_MAPS,
    "search": SEARCHES,
    "sparsity_scope": SCOPES,
    "special_tokens": SPECIAL_TOKENS,
    "task": TASKS,
    "token_mixers": MIXERS,
}
# Those of `TrainingArguments`, which has more than a hundred.
COMMON_TRAINING = (
    "output_dir", "seed", "max_steps", "num_train_epochs", "learning_rate", "per_device_train_batch_size",
    "gradient_accumulation_steps", "warmup_steps", "weight_decay", "bf16", "eval_strategy", "logging_steps",
    "save_strategy", "torch_compile", "deepspeed", "fsdp",
)  # fmt: skip
# Fields of `BertConfig` that the short help shows.
COMMON_MODEL = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "max_position_embeddings", "is_decoder",
)  # fmt: skip


def overview(verbs: dict[str, str]) -> str:
    """The help of `sparsebert` itself."""
    lines = ["usage: sparsebert VERB [RECIPE or names ...] [--field value ...]", ""]
    lines += [f"  {verb:<11} {summary}" for verb, summary in verbs.items()]
    lines += ["", "sparsebert VERB --help     what a verb does, examples, its fields"]
    lines += ["sparsebert VERB --help-all every field explained", "sparsebert --version", ""]
    lines += ["Exit codes: 0 done, 1 failed while running, 2 wrong command line, recipe or input, 130 or 143 stopped."]
    return "\n".join(lines)


def short_help(verb: str, command: Command) -> str:
    """What a verb does, examples, and its fields with their defaults, a line each."""
    description = (inspect.getdoc(inspect.getmodule(command.run)) or "").split("\n\n")
    lines = [f"usage: sparsebert {verb} {command.words} [--field value ...]", ""]
    lines += [*_wrapped(" ".join(description[0].split()), hanging=""), "", "examples:"]
    lines += [f"  sparsebert {verb} {example}" for example in command.examples]
    if command.choices:
        lines += ["", *_wrapped(f"{command.words}: {', '.join(command.choices)}")]
    if recipes := command.positional is None and recipe_names(command.sections):
        lines += ["", *_wrapped(f"recipes: {', '.join(recipes)}, or the path of one")]
    for section, cls in command.sections.items():
        lines += ["", f"{section}:", *_fields(section, cls, command)]
    lines += ["", f"All fields, explained: sparsebert {verb} --help-all"]
    return "\n".join(lines)


def long_help(verb: str, command: Command) -> str:
    """All that the docstrings say about a verb and its fields."""
    texts = [f"usage: sparsebert {verb} {command.words} [--field value ...]"]
    texts.append(inspect.getdoc(inspect.getmodule(command.run)) or "")
    texts.append("examples:\n" + "\n".join(f"  sparsebert {verb} {example}" for example in command.examples))
    if recipes := command.positional is None and recipe_names(command.sections):
        texts.append("\n".join(_wrapped(f"recipes: {', '.join(recipes)}, or the path of one")))
    for section, cls in command.sections.items():
        own = [kind for kind in cls.__mro__ if is_dataclass(kind) and kind.__module__.startswith("sparsebert")]
        texts += [f"{section}: {inspect.getdoc(kind)}" for kind in own]
        host = [kind for kind in cls.__mro__ if is_dataclass(kind) and kind not in own]
        if host:
            names = [item.name for item in fields(host[0]) if item.init]
            text = f"{section}{', too' if own else ''}: the fields of transformers' {host[0].__name__}: "
            texts.append("\n".join(_wrapped(text + ", ".join(names))))
        if command.excluded.get(section):
            texts.append(f"{section}: not to be set here: {', '.join(command.excluded[section])}")
    return "\n\n".join(texts)


def explanations(cls: type) -> dict[str, str]:
    """What the docstrings of a dataclass and its bases say about each field."""
    result: dict[str, str] = {}
    for kind in reversed(cls.__mro__):
        doc = inspect.cleandoc(kind.__dict__.get("__doc__") or "")
        part = re.search(r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", doc, re.M | re.S)
        if kind.__module__.startswith("sparsebert") and part:
            for entry in re.split(r"\n(?=\S)", textwrap.dedent(part.group(1))):
                names, _, text = entry.partition(":")
                for name in re.findall(r"\w+", names.partition("(")[0]):
                    result[name] = " ".join(text.split())
    return result


def _fields(section, cls, command):
    explained = explanations(cls)
    inherited = {item.name for item in fields(HubArguments)}
    # Those that many verbs share come last.
    found = sorted((item for item in fields(cls) if item.init), key=lambda item: item.name in inherited)
    items, defaults = {item.name: item for item in found}, command.defaults.get(section, {})
    for name in command.excluded.get(section, ()):
        items.pop(name, None)
    if cls.__module__.startswith("sparsebert"):
        shown = [name for name in items if name in explained]
        others = [name for name in items if name not in explained and not name.startswith("_")]
        if issubclass(cls, SparseBertConfig):
            others = [name for name in COMMON_MODEL if name in others]
    else:
        shown, others = [], [name for name in COMMON_TRAINING if name in items]
    for name in shown:
        default = defaults[name] if name in defaults else _value(items[name])
        yield from _field(name, _shown(default), explained[name])
    if others:
        text = ", ".join(f"{name} {_shown(_value(items[name]))}".rstrip() for name in others)
        kind = next(kind for kind in cls.__mro__ if not kind.__module__.startswith("sparsebert"))
        yield from _wrapped(f"and the fields of transformers' {kind.__name__}: {text}, ...", "  ")


def _field(name, default, text):
    head = f"  --{name} {default}".rstrip()
    text = " | ".join(CHOICES[name]) if name in CHOICES else _first_clause(text)
    if len(head) > INDENT - 2:
        yield head
        head = ""
    limit = 3 if name in CHOICES else 1
    lines = textwrap.wrap(text, WIDTH - INDENT, max_lines=limit, placeholder=" ...") or [""]
    yield f"{head:<{INDENT}}{lines[0]}"
    yield from (" " * INDENT + line for line in lines[1:])


def _first_clause(text):
    """An explanation up to its first stop that is not within code or brackets."""
    depth = 0
    for index, character in enumerate(text):
        if character == "`":
            depth = 0 if depth else 1
        elif character in ".;:" and not depth and text[index + 1 : index + 2] in ("", " "):
            text = text[:index]
            break
    return re.sub(r"\[`(\w+)`\]", r"\1", text).replace("`", "")


def _value(item):
    """The default of a field of a dataclass, or `None`."""
    if item.default_factory is not MISSING:
        return item.default_factory()
    return None if item.default is MISSING else item.default


def _shown(value):
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if isinstance(value, (dict, tuple)) else str(getattr(value, "value", value))


def _wrapped(text, indent="", hanging="  "):
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + hanging, break_on_hyphens=False
    )
