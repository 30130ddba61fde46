"""The help of the command line, from the docstrings of verbs and dataclasses and the keys of registries."""

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from ..hub import HubArguments
from ..recipe_files import recipe_names
from ._command import Command, Printing


WIDTH = 100
INDENT = 34
# Where the package has what a field accepts, by the field's name.
CHOICES = {
    "attn_implementation": "attention.choosing.choice.ATTENTION_NAMES",
    "diagonal": "masks.mask_tensors.DIAGONALS",
    "head_configuration": "masks.patterns.HEAD_CONFIGURATIONS",
    "last_token": "masks.mask_tensors.LAST_TOKENS",
    "length_policy": "masks.expansion.LENGTH_POLICIES",
    "mask_form": "learning.mask_description.MASK_FORMS",
    "method": "models.lengthening.METHODS",
    "objective": "training.searching.objectives.OBJECTIVES",
    "pattern": "masks.patterns.PATTERNS",
    "probability_map": "attention.probability_maps.PROBABILITY_MAPS",
    "rest": "masks.mask_tensors.RESTS",
    "search": "learning.searches.SEARCHES",
    "sparsity_scope": "learning.selection.SCOPES",
    "special_tokens": "masks.expansion.SPECIAL_TOKENS",
    "task": "data.tasks.TASKS",
    "token_mixers": "models.bert.token_mixers.MIXERS",
}
# Fields of classes of transformers that the short help shows: they have more than a hundred.
COMMON = {
    "output_dir", "seed", "max_steps", "num_train_epochs", "learning_rate", "per_device_train_batch_size",
    "gradient_accumulation_steps", "warmup_steps", "weight_decay", "bf16", "eval_strategy", "logging_steps",
    "save_strategy", "torch_compile", "deepspeed", "fsdp",
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "max_position_embeddings", "is_decoder",
}  # fmt: skip


def overview(verbs: Mapping[str, str]) -> str:
    """The help of `sparsebert` itself."""
    lines = ["usage: sparsebert VERB [RECIPE or names ...] [--field value ...]", ""]
    lines += [f"  {verb:<11} {summary}" for verb, summary in verbs.items()]
    lines += ["", "sparsebert VERB --help     what a verb does, examples, its fields"]
    lines += ["sparsebert VERB --help-all every field explained", "sparsebert --version", ""]
    lines += [
        "Exit codes: 0 done, 1 failed while running, 2 wrong command line, recipe or input, 129, 130 or 143 stopped."
    ]
    return "\n".join(lines)


def verb_help(verb: str, command: Command, everything: bool) -> str:
    """What a verb does, examples, and a line per field with its default, or `everything` that is said about them."""
    text = inspect.getdoc(inspect.getmodule(command.run)) or ""
    parts = [f"usage: sparsebert {verb} {command.words} [--field value ...]"]
    parts.append(text if everything else _wrapped(text.partition("\n\n")[0], hanging=""))
    parts.append("\n".join(["examples:", *(f"  sparsebert {verb} {example}" for example in command.examples)]))
    if recipes := command.positional is None and recipe_names(command.sections):
        parts.append(_wrapped(f"recipes: {', '.join(recipes)}, or the path of one"))
    for section, cls in command.sections.items():
        if everything:
            parts += _explained_fields(section, cls, command)
        elif cls is not Printing:
            parts.append("\n".join([f"{section}:", *_listed_fields(section, cls, command)]))
    if not everything:
        parts[-1] += f"\nWith --json, results are printed as JSON. All fields, explained: sparsebert {verb} --help-all"
    return "\n\n".join(parts)


def _is_ours(cls):
    return is_dataclass(cls) and not cls.__module__.startswith("transformers.")


def _explained_fields(section: str, cls: type, command: Command) -> Iterator[str]:
    kinds = [kind for kind in cls.__mro__ if is_dataclass(kind)]
    yield from (f"{section}: {inspect.getdoc(kind)}" for kind in kinds if _is_ours(kind))
    if host := next((kind for kind in kinds if not _is_ours(kind)), None):
        names = ", ".join(item.name for item in fields(host) if item.init)
        yield _wrapped(f"{section}: the fields of transformers' {host.__name__}: {names}")
    if own := command.defaults.get(section):
        shown = ", ".join(f"{name} {_shown(value)}" for name, value in own.items() if value is not None)
        yield _wrapped(f"{section}: defaults that differ here: {shown}")
    if excluded := command.excluded.get(section):
        yield f"{section}: not to be set here: {', '.join(excluded)}"


def explanations(cls: type) -> dict[str, str]:
    """What the docstrings of a dataclass and its bases say about each field."""
    result: dict[str, str] = {}
    for kind in reversed(cls.__mro__):
        doc = inspect.cleandoc(kind.__dict__.get("__doc__") or "")
        part = re.search(r"^(?:Args|Attributes):\n(.*?)(?=^\S|\Z)", doc, re.M | re.S)
        for entry in re.split(r"\n(?=\S)", textwrap.dedent(part[1])) if part and _is_ours(kind) else ():
            names, _, text = entry.partition(":")
            result |= dict.fromkeys(re.findall(r"\w+", names.partition("(")[0]), " ".join(text.split()))
    return result


def _listed_fields(section: str, cls: type, command: Command) -> Iterator[str]:
    explained = explanations(cls)
    items = {item.name: item for item in fields(cls) if item.init}
    # Those that many verbs share come last.
    shared = {item.name for item in fields(HubArguments)}
    names = [name for name in items if name not in command.excluded.get(section, ())]
    names.sort(key=lambda name: name in shared)
    defaults = {name: _default(items[name]) for name in names} | dict(command.defaults.get(section, {}))
    for name in names:
        if name in explained:
            allowed = command.choices.get(name) or choices(name)
            yield from _field(name, _shown(defaults[name]), " | ".join(allowed) or _first_clause(explained[name]))
    if host := next((kind for kind in cls.__mro__ if is_dataclass(kind) and not _is_ours(kind)), None):
        common = [f"{name} {_shown(defaults[name])}".strip() for name in names if name in COMMON - explained.keys()]
        if common:
            yield _wrapped(f"and the fields of transformers' {host.__name__}: {', '.join(common)}, ...", "  ")


def _field(name, default, text):
    head = f"  --{name} {default}".rstrip()
    if len(head) > INDENT - 2:
        yield head
        head = ""
    limit = None if " | " in text else 1
    lines = textwrap.wrap(text, WIDTH - INDENT, max_lines=limit, placeholder=" ...") or [""]
    yield f"{head:<{INDENT}}{lines[0]}"
    yield from (" " * INDENT + line for line in lines[1:])


def choices(name: str) -> Iterable[str]:
    """What the field of this name accepts, if it is a key of `CHOICES`."""
    module, _, attribute = CHOICES.get(name, "").rpartition(".")
    return getattr(importlib.import_module(f"..{module}", __package__), attribute) if module else ()


def _first_clause(text):
    """An explanation up to its first stop that is not within code."""
    clause = re.match(r"(`[^`]*`|[.;:](?=\S)|[^`.;:])*", text)
    return re.sub(r"\[`(\w+)`\]", r"\1", clause[0] if clause else "").replace("`", "")


def _default(item) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return None if item.default is MISSING else item.default


def _shown(value):
    if value is None or isinstance(value, (dict, tuple)):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(getattr(value, "value", value))


def _wrapped(text, indent="", hanging="  "):
    return textwrap.fill(
        " ".join(text.split()),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_on_hyphens=False,
    )
