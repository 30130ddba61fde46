"""The built-in corpus: English prose from the documentation strings of the standard library and installed packages."""

import ast
import functools
import gc
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm.auto import tqdm
from transformers.utils import logging

from ..files import replace_files


logger = logging.get_logger(__name__)

# All of these are requirements of sparsebert, directly or through torch, datasets and scikit-learn.
PACKAGES = (
    *("stdlib", "numpy", "torch", "transformers", "datasets", "scipy", "sklearn"),
    *("pandas", "sympy", "networkx", "huggingface_hub"),
)

# Part of the cache key: increase it whenever the extraction below gives different text for the same sources.
FORMAT = 1

_SKIPPED_DIRECTORIES = {"test", "tests", "testing", "idle_test", "_vendor", "site-packages", "dist-packages"}
_PROSE_DIRECTIVES = {
    *("attention", "caution", "danger", "deprecated", "hint", "important", "note", "tip"),
    *("versionadded", "versionchanged", "warning"),
}

_DIRECTIVE = re.compile(r"\.\. ?([\w:-]+?)::\s*(.*)$")
_FIELD = re.compile(r":(?:param|arg|type|raises?|returns?|rtype|keyword|key|var|ivar|cvar|meta)\b[^:]*:\s*")
_BULLET = re.compile(r"(?:[-*+o\u2022]|\(?\d{1,2}[.)])\s+")
_UNDERLINE = re.compile(r"([-=~^*#\"'.`_+])\1{2,}$")
_TABLE = re.compile(r"\+[-=+]{3,}|\|.*\||[-=]{2,}\s+[-=]{2,}")
# `name : type` (numpydoc) and `name (type):` or `name:` (Google style) introduce a description; they are not prose.
_NUMPY_PARAMETER = re.compile(r"\*{0,2}[\w.`]+(?:\s*,\s*\*{0,2}[\w.`]+)*\s+:(?:\s+.*)?$")
_GOOGLE_PARAMETER = re.compile(r"\*{0,2}`{0,2}[\w.]+`{0,2}\s*(?:\(.*?\))?\s*:(?:\s+|$)")
_INLINE = (
    (re.compile(r":math:`[^`]*`|\$[^$]*\$"), " "),
    (re.compile(r":[\w:+-]+:`[~!]?([^`<]*?)(?:\s*<[^`>]*>)?`"), r"\1"),
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`__?"), r"\1"),
    (re.compile(r"!?\[([^\]]*)\]\([^)\s]*\)"), r"\1"),
    (re.compile(r"\[`[~!]?([^`\]]*)`\]"), r"\1"),
    (re.compile(r"</?[A-Za-z][\w-]*(?:\s[^<>]*)?/?>"), " "),
    (re.compile(r"https?://\S+"), " "),
    (re.compile(r"\[[\w-]{1,12}\]_"), " "),
    (re.compile(r"`+_{0,2}"), ""),
    (re.compile(r"\.\. [\w-]+::"), " "),
    (re.compile(r"(?<!\w)\*{1,2}([^\s*](?:[^*]*[^\s*])?)\*{1,2}(?!\w)"), r"\1"),
)
_WORD = re.compile(r"[(\"']*[A-Za-z]+(?:['-][A-Za-z]+)*[)\"']*[.,;:!?]*[)\"']*$")


class Document(NamedTuple):
    """The documentation of one module."""

    package: str  # as in `PACKAGES`
    module: str  # its dotted name, e.g. "numpy.linalg"
    paragraphs: list[str]  # prose in source order, one line each


def builtin_documents(packages: Sequence[str] = PACKAGES) -> list[Document]:
    """
    Return the built-in corpus, which needs no download.

    The `.py` files of each package are parsed, never imported, and the docstrings of their modules, classes and
    functions are reduced to prose: code, tables, field names and markup are removed, and repeated paragraphs are kept
    only once, where they first occur. The text depends on the installed versions of the packages. It is cached by
    these versions in `SPARSEBERT_CACHE` (by default `~/.cache/sparsebert`).

    Args:
        packages (`Sequence[str]`, *optional*, defaults to [`PACKAGES`]):
            Top-level packages to read; `"stdlib"` is the whole standard library. Packages that are not installed are
            skipped with a warning.

    Returns:
        `list[Document]`: One document per module with at least one paragraph, ordered as in `packages`, then by the
        name of the module.
    """
    if isinstance(packages, str):
        raise ValueError(
            f"packages must be a sequence of package names, e.g. ({packages!r},), got the str {packages!r}"
        )
    # A dictionary, because a package given twice would lose all its paragraphs as repeated ones.
    found = {name: _version(name) for name in packages}
    missing = [name for name, version in found.items() if version is None]
    versions = {name: version for name, version in found.items() if version is not None}
    if not versions:
        raise ValueError(f"packages: none of {list(packages)} is an installed Python package")
    if missing:
        logger.warning(f"Built-in corpus without {', '.join(missing)}: not installed.")

    key = hashlib.sha256(json.dumps([FORMAT, list(versions.items())]).encode()).hexdigest()[:16]
    cache_dir = Path(os.environ.get("SPARSEBERT_CACHE") or os.path.expanduser("~/.cache/sparsebert"))
    cache_file = cache_dir / f"corpus-{key}.jsonl.gz"
    if os.access(cache_file, os.R_OK):
        try:
            with gzip.open(cache_file, "rt", encoding="utf-8") as file:
                return [Document(**json.loads(line)) for line in file]
        except (OSError, EOFError, ValueError, RecursionError, TypeError, zlib.error) as error:
            logger.warning(f"{cache_file} is damaged ({error}), and is made again.")

    documents = _extract(versions)
    try:
        _write_cache(documents, cache_file)
    except OSError as error:
        logger.warning(f"The built-in corpus could not be cached in {cache_file} ({error}); set SPARSEBERT_CACHE.")
    return documents


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """The distributions of all installed packages, which takes a second to find."""
    return importlib.metadata.packages_distributions()


def _version(package: str) -> str | None:
    if package == "stdlib":
        return platform.python_version()
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return None
    if package in sys.stdlib_module_names:
        return platform.python_version()
    try:
        names = sorted(set(_distributions().get(package, [package])))
        return ", ".join(map(importlib.metadata.version, names))
    except importlib.metadata.PackageNotFoundError:
        return None


def _source_files(package: str) -> list[tuple[str, Path]]:
    """Names and files of the modules of a package, sorted by name, without its tests."""
    prefix: tuple[str, ...] = ()
    root = Path(sysconfig.get_path("stdlib"))
    if package != "stdlib":
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations  # see _version
        prefix, root = (package,), Path(spec.submodule_search_locations[0])
    files = []
    for directory, subdirectories, names in os.walk(root):
        # Changed in place, so that os.walk does not descend into e.g. site-packages.
        subdirectories[:] = [name for name in subdirectories if name not in _SKIPPED_DIRECTORIES]
        parts = prefix + Path(directory).relative_to(root).parts
        for name in names:
            module = parts if name == "__init__.py" else parts + (name.removesuffix(".py"),)
            if not name.endswith(".py") or name == "conftest.py" or not module:
                continue
            if package == "stdlib" and module[0] not in sys.stdlib_module_names:
                continue
            files.append((".".join(module), Path(directory, name)))
    return sorted(files)


def _extract(packages: Iterable[str]) -> list[Document]:
    seen = set()
    documents = []
    files = [(package, *source) for package in packages for source in _source_files(package)]
    # Syntax trees are millions of objects without cycles; garbage collection would double the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        for package, module, file in tqdm(files, "Reading docstrings", unit="file", disable=None):
            paragraphs = []
            for docstring in _docstrings(file):
                for paragraph in prose_paragraphs(docstring):
                    if paragraph not in seen:
                        seen.add(paragraph)
                        paragraphs.append(paragraph)
            if paragraphs:
                documents.append(Document(package, module, paragraphs))
    finally:
        if collecting:
            gc.enable()
    return documents


def _docstrings(file: Path) -> Iterable[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's sources
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        # Packages include templates and files for other versions of Python, which are not worth failing for.
        logger.info(f"Skipped {file}: {error}")
        return
    # Depth first, for docstrings in source order. Functions within functions are not searched.
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring
        if isinstance(node, (ast.Module, ast.ClassDef, ast.If, ast.Try)):
            stack.extend(reversed(list(ast.iter_child_nodes(node))))


def prose_paragraphs(docstring: str) -> list[str]:
    """
    Reduce a docstring without indentation (reStructuredText, numpydoc, Google style or Markdown) to its prose: a line
    a paragraph. A list item or the description of a parameter is a paragraph.
    """
    lines = docstring.splitlines()
    paragraphs = []
    current: list[str] = []

    def flush() -> None:
        if not current:
            return
        text = " ".join(current)
        current.clear()
        for pattern, replacement in _INLINE:
            text = pattern.sub(replacement, text)
        words = text.replace("\\", "").split()
        # Code, formulas and headings without markup are recognized by their small share of plain words.
        if len(words) >= 5 and sum(1 for word in words if _WORD.match(word)) >= 0.7 * len(words):
            paragraphs.append(" ".join(words))

    fenced = False
    literal = None  # indentation of the line that opened a literal block or a directive to drop
    doctest = False
    for number, line in enumerate(lines):
        text = line.strip()
        indentation = len(line) - len(line.lstrip())
        if text.startswith(("```", "~~~")):
            flush()
            fenced = not fenced
            continue
        if fenced:
            continue
        if not text:
            flush()
            doctest = False
            continue
        if literal is not None:
            if indentation > literal:
                continue
            literal = None
        if doctest or text.startswith(">>>"):
            if not doctest:
                flush()
            doctest = True
            continue
        directive = _DIRECTIVE.match(text)
        if directive:
            flush()
            if directive[1] in _PROSE_DIRECTIVES:
                current.append(re.sub(r"^[\d.]+\s*", "", directive[2]))
            else:
                literal = indentation
            continue
        if text.startswith(".. "):  # comments, citations and link targets
            flush()
            literal = indentation
            continue
        following = lines[number + 1].strip() if number + 1 < len(lines) else ""
        if _UNDERLINE.match(text) or _UNDERLINE.match(following) or _TABLE.match(text) or text.startswith("#"):
            flush()
            continue
        if _NUMPY_PARAMETER.match(text):
            flush()
            continue
        field = _FIELD.match(text) or _GOOGLE_PARAMETER.match(text)
        if start := field or _BULLET.match(text):
            flush()
            text = text[start.end() :]
            field = _GOOGLE_PARAMETER.match(text)
            text = text[field.end() :] if field else text
        if text.endswith("::"):
            text = text[:-1]
            literal = indentation
        current.append(text)
    flush()
    return paragraphs


def _write_cache(documents: list[Document], file: Path) -> None:
    if str(file).startswith("~"):
        raise FileNotFoundError("there is no home folder")
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(document._asdict(), ensure_ascii=False) + "\n" for document in documents)
    replace_files({file: gzip.compress(lines.encode(), 6)})
