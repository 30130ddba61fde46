"""Sphinx: pages in Markdown; the API and the fields of the verbs are made from the package (`make docs`)."""

import re
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import generated  # noqa: E402

import sparsebert  # noqa: E402


project = "SparseBERT"
author = "The SparseBERT authors"
copyright = author
release = version = sparsebert.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
nb_execution_mode = "off"  # the outputs are kept in the notebook
myst_heading_anchors = 3
exclude_patterns = ["_build", "jupyter_execute"]
suppress_warnings = ["misc.highlighting_failure"]  # of commands in the notebook that take several lines
html_theme = "furo"
html_title = f"SparseBERT {release}"
html_copy_source = False
if (ROOT / "runs/demo/report.html").is_file():  # `make demo` has run here
    html_extra_path = ["../runs/demo/report.html"]
    tags.add("demo")  # noqa: F821, defined by Sphinx

# The docstrings are those of transformers: Markdown code spans, and sections that Google's style has nearly all of.
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Source", "returns_style")]
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints = "none"
autodoc_preserve_defaults = True
autodoc_mock_imports = generated.missing("triton")

_REFERENCE = re.compile(r"\[`~?([\w.]+)`\]")
_PLACEHOLDER = re.compile(r"^<!-- (public|api|verbs): (\w+) -->$", re.MULTILINE)


def _to_rst(app, what, name, obj, options, lines):
    """Docstrings as Sphinx reads them: [`Name`] is a reference, text in backticks is code."""

    def reference(match):
        target = generated.full_name(match[1])
        return f":py:obj:`{match[1].rpartition('.')[2]} <{target}>`" if target else f"``{match[1]}``"

    text = _REFERENCE.sub(reference, "\n".join(lines))
    # A plural, `name`s, ends the code for Markdown only.
    lines[:] = re.sub(r"(`[^`\n]+`)(?=\w)", r"\1\\ ", text).replace("|", "\\|").split("\n")


def _skip(app, what, name, obj, skip, options):
    """Leave out the methods whose docstring is that of transformers, as `forward`."""
    return True if getattr(obj, "__module__", None) and obj.__module__.startswith("transformers.") else None


def _insert(app, docname, source):
    """Put what is made from the package where a page has `<!-- public: all -->`, `<!-- api: FOLDER -->` or
    `<!-- verbs: all -->`."""
    makers = {"public": generated.public, "api": generated.api, "verbs": generated.verbs}
    found = _PLACEHOLDER.sub(lambda match: makers[match[1]](match[2]), source[0])
    if found != source[0]:
        source[0] = found
        app.env.note_reread()


def setup(app):
    app.connect("autodoc-process-docstring", _to_rst, priority=600)
    app.connect("autodoc-skip-member", _skip)
    app.connect("source-read", _insert)
