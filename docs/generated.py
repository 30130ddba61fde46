"""
What the pages do not say by hand: tables of the registries and fields, the modules of the API, and the help of verbs.

    python docs/generated.py            # writes the tables anew
    python docs/generated.py --check    # changes nothing; ends with 1 if a table is not that of the package

In a page a table stands between `<!-- table: NAME -->` and `<!-- end -->`, where NAME is a key of `TABLES`. The fields
of the verbs and the API, which are long or full of references, are only in the pages that Sphinx builds.
"""

import argparse
import ast
import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from functools import cache, partial
from pathlib import Path

import sparsebert
from sparsebert.attention.backends import BACKENDS
from sparsebert.attention.capabilities import WANTED
from sparsebert.attention.choosing.choice import CHOICES
from sparsebert.commands import VERBS, written_help
from sparsebert.commands._help import verb_help
from sparsebert.data.tasks import TASKS
from sparsebert.learning.progressive_pruning import ProgressivePruning
from sparsebert.learning.searches import SEARCHES, num_parameters
from sparsebert.masks.patterns import PATTERNS, build_pattern
from sparsebert.models.architectures import ARCHITECTURES, MIXES_TOKENS
from sparsebert.models.bert.configuration_sparsebert import SparseBertConfig
from sparsebert.models.bert.token_mixers import MIXERS
from sparsebert.recipe_files import find_recipe, recipe_names
from studies.experiments import EXPERIMENTS


ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sparsebert"
LENGTH, HEADS = 128, 12
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def missing(*packages):
    """Those of the packages that are not installed."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def table(name):
    """A table of `TABLES` in Markdown."""
    return _markdown(TABLES[name]())


def _markdown(lines):
    headings, *rows = lines
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(_cell(value) for value in line)} |" for line in lines)


def _cell(value):
    if isinstance(value, (list, tuple)):
        value = ", ".join(f"`{item}`" for item in value)
    return _plain(" ".join(str(value).split())).replace("|", "\\|")


def _first_sentence(text):
    """What a docstring or a comment says first, in Markdown."""
    paragraph = " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0]


def _patterns():
    yield "pattern", "parameters", "removed at 128 tokens", "without its diagonal", "definition"
    for name, function in PATTERNS.items():
        signature = inspect.signature(function).parameters.values()
        own = [f"{field.name}={field.default}" for field in signature if field.kind is field.KEYWORD_ONLY]
        sparsities = [build_pattern(name, LENGTH, HEADS, diagonal=diagonal).sparsity for diagonal in (True, False)]
        yield f"`{name}`", own, *(f"{value:.1%}" for value in sparsities), _first_sentence(function.__doc__)


def _searches():
    yield "search", "form of the frozen mask", "logits per head at 128 tokens", "sampled", "special tokens", "c"
    for name, row in SEARCHES.items():
        size = num_parameters(row.form, LENGTH, special_tokens=row.special_tokens, block_size=64)
        sampled = "yes" if row.stochastic else "no"
        yield f"`{name}`", row.frozen_form, size, sampled, f"`{row.special_tokens}`", f"{row.mask_constant:g}"


def _backends():
    yield "backend", "what it is", "besides frozen masks and padding", "probability maps"
    for name, row in BACKENDS.items():
        extra = "; ".join(text for key, text in WANTED.items() if key in row.supports)
        maps = "all" if set(row.probability_maps) == set(sparsebert.PROBABILITY_MAPS) else row.probability_maps
        yield f"`{name}`", _first_sentence(row.function.__doc__), extra, maps
    for name, function in CHOICES.items():
        text = _first_sentence(function.__doc__).split(": ", 1)[-1]
        yield f"`{name}`", f"Chooses one of these: {text}", "whatever one of them can do", "all"


def _maps():
    yield "`probability_map`", "parameters", "definition", "backends", "needs entmax"
    for name, row in sparsebert.PROBABILITY_MAPS.items():
        able = [backend for backend, other in BACKENDS.items() if name in other.probability_maps]
        able = "all" if len(able) == len(BACKENDS) else able
        yield (
            f"`{name}`",
            row.parameters,
            _first_sentence(row.function.__doc__),
            able,
            "yes" if row.needs_entmax else "",
        )


def _mixers():
    yield "mixer", "what stands in the place of attention"
    for name, mixer in MIXERS.items():
        ours = mixer.__module__.startswith("sparsebert.")
        yield f"`{name}`", _first_sentence(mixer.__doc__) if ours else "Attention, under the mask."


def _tasks():
    yield (
        "task",
        "metrics",
        "main metric",
        "tokens",
        "batch per device",
        "epochs",
        "learning rate",
        "settings of the paper",
    )
    for name, task in TASKS.items():
        settings = [task.settings.get(key, "") for key in SETTINGS]
        paper = "yes" if task.paper_settings else ""
        yield f"`{name}`", f"`{task.metric}`", task.main_metric, task.max_length, *settings, paper


SETTINGS = ("per_device_train_batch_size", "num_train_epochs", "learning_rate")


def _architectures():
    yield "`model_type`", "self-attention that carries the mask", "packed rows, `skip_padding`"
    for name, module in ARCHITECTURES.items():
        packs = "images" if name in ("deit", "dinov2", "vit") else "no" if name in MIXES_TOKENS else "yes"
        yield f"`{name}`", f"`{module}`", packs


def _recipes():
    yield "recipe", "verb", "what it does"
    commands = {verb: _command(verb) for verb in VERBS}
    for name in recipe_names():
        verb = next(v for v, c in commands.items() if c.positional is None and name in recipe_names(c.sections))
        lines = find_recipe(name).read_text(encoding="utf-8").splitlines()
        comment = "\n".join(line[2:] for line in lines if line.startswith("# "))
        yield f"`{name}`", f"`{verb}`", _first_sentence(comment)


def _command(verb):
    return importlib.import_module(f"sparsebert.commands.{verb}").command([])


def _experiments():
    yield "experiment", "what it makes", "scales and their numbers of cells"
    for name, row in EXPERIMENTS.items():
        counts = {scale: len(row.cells(row.arguments(**fields))) for scale, fields in row.scales.items()}
        yield f"`{name}`", row.title, ", ".join(f"`{scale}`: {count}" for scale, count in counts.items())


def _verbs():
    yield "verb", "what it does"
    for name, text in VERBS.items():
        yield f"`{name}`", text


def _fields(cls):
    yield "field", "type", "default", "what it is"
    bases = [base.__doc__ for base in cls.__mro__ if base.__module__.startswith("sparsebert.") and base.__doc__]
    texts, defaults = {}, _defaults(cls)
    for docstring in reversed(bases):
        texts |= _arguments(docstring)
    for name, (kind, text) in texts.items():
        if name in defaults:
            yield f"`{name}`", kind, defaults[name], text


def _defaults(cls):
    if not dataclasses.is_dataclass(cls):
        own = inspect.signature(cls).parameters.values()
        return {field.name: "" if field.default is field.empty else f"`{field.default}`" for field in own}
    return {field.name: f"`{field.default}`" for field in dataclasses.fields(cls)}


def _arguments(docstring):
    """Type and text of every argument of a docstring, by name."""
    section = re.search(r"^Args:\n((?: .*\n|\n(?= ))*)", inspect.cleandoc(docstring) + "\n", re.MULTILINE)
    texts = {}
    for entry in re.split(r"\n(?=    \S)", section[1].rstrip() if section else ""):
        match = re.match(r"\s*([\w, ]+?) \((.*?)\)(?::\s*(.*))?$", " ".join(entry.split()))
        for name in match[1].split(", ") if match else ():
            kind = re.sub(r",? ?\*optional\*|,? ?defaults to .*", "", match[2])
            texts[name] = kind, match[3] or ""
    return texts


def _modules():
    yield "module", "what is in it"
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.name.startswith("_") or path.name == "__init__.py":
            place = path.relative_to(PACKAGE)
            is_folder = path.name == "__init__.py"
            name = f"**`{place.parent}/`**" if is_folder and place.parent.name else f"`{place}`"
            text = _first_sentence(_docstring(path))
            yield name, f"**{text}**" if is_folder else text


def _floors():
    yield "part", "what is in it"
    tree = ast.parse((ROOT / "tests" / "test_layout.py").read_text(encoding="utf-8"))
    values = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    for parts in ast.literal_eval(values["FLOORS"]):
        paths = {part: PACKAGE / part / "__init__.py" for part in parts}
        paths = {part: path if path.is_file() else PACKAGE / f"{part}.py" for part, path in paths.items()}
        yield parts, " ".join(_first_sentence(_docstring(path)) for path in paths.values())


def _docstring(path):
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def public(_):
    """The names of the package, as references."""
    return _markdown(_public())


def _public():
    yield "name", "what it is"
    for name in sparsebert.__all__:
        value = getattr(sparsebert, name)
        documented = inspect.isclass(value) or inspect.isfunction(value)
        if full_name(name):
            yield f"{{py:obj}}`{name} <{full_name(name)}>`", _first_sentence(value.__doc__) if documented else ""
        else:
            yield f"`{name}`", "The version." if name == "__version__" else "Registry: its rows by name."


TABLES = {
    "patterns": _patterns,
    "searches": _searches,
    "backends": _backends,
    "maps": _maps,
    "mixers": _mixers,
    "tasks": _tasks,
    "architectures": _architectures,
    "recipes": _recipes,
    "experiments": _experiments,
    "verbs": _verbs,
    "configuration": partial(_fields, SparseBertConfig),
    "pruning": partial(_fields, ProgressivePruning),
    "modules": _modules,
    "floors": _floors,
}


def written(page):
    """The text of a page with its tables."""
    return BLOCK.sub(lambda match: f"{match[1]}{table(match[2])}\n{match[3]}", page)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python docs/generated.py", description="Write the tables of the package.")
    parser.add_argument("--check", action="store_true", help="change nothing, end with 1 if a page is out of date")
    options, stale = parser.parse_args(arguments), False
    pages = {page: written(page.read_text(encoding="utf-8")) for page in sorted((ROOT / "docs").glob("*.md"))}
    for page, new in (pages | _help_pages()).items():
        if not page.is_file() or page.read_text(encoding="utf-8") != new:
            stale = True
            print(f"{page.relative_to(ROOT)}: {'out of date' if options.check else 'written'}")
            if not options.check:
                page.write_text(new, encoding="utf-8")
    return int(stale and options.check)


def _help_pages():
    """The help of the verbs that need no checkout, by the files that the command prints."""
    verbs = [verb for verb in VERBS if verb not in ("reproduce", "translate")]
    return {written_help(verb): f"{verb_help(verb, _command(verb), False)}\n" for verb in verbs}


def verbs(_):
    """Every verb with its examples and its own fields."""
    sections = []
    for verb in VERBS:
        command = _command(verb)
        sections += [f"## {verb}", _plain(inspect.getdoc(inspect.getmodule(command.run)))]
        lines = "\n".join(f"sparsebert {verb} {example}" for example in command.examples)
        sections.append(f"```sh\n{lines}\n```")
        for name, cls in command.sections.items():
            if cls is SparseBertConfig:
                sections.append(f"Section `{name}`: the fields of the [configuration](configuration.md).")
            elif cls.__module__.startswith("transformers."):
                sections.append(f"Section `{name}`: the fields of `transformers.{cls.__name__}`.")
            elif name != "print":
                excluded = command.excluded.get(name, ())
                headings, *rows = _fields(cls)
                rows = [row for row in rows if row[0].strip("`") not in excluded]
                sections += [f"Section `{name}`:", _markdown([headings, *rows])]
    return "\n\n".join(sections)


def _plain(text):
    return re.sub(r"\[(`~?[\w.]+`)\]", r"\1", text)


@cache
def _names():
    """Full names of the package's own classes and functions, by short name."""
    found = {}
    for info in pkgutil.walk_packages(sparsebert.__path__, "sparsebert."):
        if info.name.startswith("sparsebert.commands") or "_" == info.name.rpartition(".")[2][0]:
            continue
        try:
            module = importlib.import_module(info.name)
        except ImportError:  # an extra that is not installed
            continue
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) == info.name and not name.startswith("_"):
                found.setdefault(name, f"{info.name}.{name}")
    return found


def full_name(name):
    """The full name of what a docstring refers to by `name`, or `None` if it is not of this package."""
    return _names().get(name.rpartition(".")[2]) if not name.startswith("transformers.") else None


def api(folder):
    """The modules of a folder, each a section, for autodoc."""
    place, package = (ROOT / folder, folder) if folder == "studies" else (PACKAGE / folder, f"sparsebert.{folder}")
    if not (place / "__init__.py").is_file():
        raise ValueError(f"<!-- api: {folder} -->: {place.relative_to(ROOT)} is no package")
    found = pkgutil.walk_packages([str(place)], f"{package}.")
    # Compiled kernels look like modules, too.
    names = [info.name for info in found if not info.name.endswith(tuple(p.stem for p in PACKAGE.rglob("*.so")))]
    directive = "```{{eval-rst}}\n.. automodule:: {}\n   :members:\n```\n"
    sections = [directive.format(package)]
    for name in names:
        if not name.rpartition(".")[2].startswith("_"):
            sections.append(f"## {name.removeprefix(f'{package}.')}\n\n{directive.format(name)}")
    return "\n".join(sections)


if __name__ == "__main__":
    sys.exit(main())
