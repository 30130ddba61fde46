import gzip
import os
import sys

import pytest

from sparsebert.data.builtin_corpus import Document, builtin_documents, prose_paragraphs


PACKAGES = ("json", "wsgiref")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEBERT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that writes a file of an installed package, `sparsebert_example`."""
    root = tmp_path / "site" / "sparsebert_example"
    root.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(root.parent))

    def write(name, text):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())

    write("../sparsebert_example-1.0.dist-info/METADATA", "Name: sparsebert_example\nVersion: 1.0\n")
    write("__init__.py", "raise RuntimeError('imported')\n")
    return write


def test_documents_are_prose_of_modules_in_a_fixed_order(cache):
    documents = builtin_documents(PACKAGES)
    assert [document.package for document in documents] == sorted(document.package for document in documents)
    assert {document.package for document in documents} == set(PACKAGES)
    decoder = next(document for document in documents if document.module == "json.decoder")
    assert "Subclass of ValueError with the following additional properties:" in decoder.paragraphs
    paragraphs = [paragraph for document in documents for paragraph in document.paragraphs]
    assert len(set(paragraphs)) == len(paragraphs) > 50
    assert all(paragraph == " ".join(paragraph.split()) and ">>>" not in paragraph for paragraph in paragraphs)


def test_cache_gives_the_same_and_is_used(cache):
    first = builtin_documents(PACKAGES)
    (file,) = cache.iterdir()
    assert builtin_documents(PACKAGES) == first
    with gzip.open(file, "wt") as stream:
        stream.write('{"package": "json", "module": "json.x", "paragraphs": ["from the cache"]}\n')
    assert builtin_documents(PACKAGES) == [Document("json", "json.x", ["from the cache"])]
    assert {document.package for document in builtin_documents(("json",))} == {"json"}


def test_unusable_cache_directory_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPARSEBERT_CACHE", str(tmp_path / "file"))
    assert builtin_documents(("json",))


def test_packages_are_not_imported_and_bad_files_skipped(cache, package):
    package("module.py", '"""The first words of this module."""\nraise SystemExit\n')
    package("syntax.py", '"""Nobody reads these five words."""\nprint "x"\n')
    package("latin.py", b'"""Nobody reads these five \xe9 words."""')
    package("tests/test_it.py", '"""Nobody reads the tests at all."""\n')
    package("sub/deep.py", 'class A:\n    def f(self):\n        """Do what a method should do."""\n')
    documents = builtin_documents(("sparsebert_example",))
    assert "sparsebert_example" not in sys.modules
    assert documents == [
        Document("sparsebert_example", "sparsebert_example.module", ["The first words of this module."]),
        Document("sparsebert_example", "sparsebert_example.sub.deep", ["Do what a method should do."]),
    ]


def test_a_package_with_another_name_than_its_distribution(cache):
    assert {document.package for document in builtin_documents(("yaml",))} == {"yaml"}


def test_missing_packages_are_skipped(cache):
    assert builtin_documents(("no_such_package", "json")) == builtin_documents(("json",))


@pytest.mark.parametrize("packages", [(), ("no_such_package",), "json"])
def test_bad_packages(cache, packages):
    with pytest.raises(ValueError, match="packages"):
        builtin_documents(packages)
    assert not os.path.exists(cache)


def test_prose_of_numpydoc():
    docstring = """Return the mean of the array elements along an axis.

Parameters
----------
a : array_like
    Array containing numbers whose mean is
    desired by the caller.
axis, keepdims : int, optional
    Axis.

Notes
-----
The mean is :math:`x_i` computed in `float64` by *default* as in :func:`~numpy.sum` [1]_.

.. math:: a = b
    c

.. versionadded:: 1.7.0
   Only since this version is there any of it.

Examples
--------
>>> np.mean(a)
this is the output of some code

An example of a literal block follows here::

    this is code and not at all prose

.. [1] Author of a paper that nobody has read."""
    assert prose_paragraphs(docstring) == [
        "Return the mean of the array elements along an axis.",
        "Array containing numbers whose mean is desired by the caller.",
        "The mean is computed in float64 by default as in numpy.sum .",
        "Only since this version is there any of it.",
        "An example of a literal block follows here:",
    ]


def test_prose_of_google_style_and_markdown():
    docstring = """Constructs a tokenizer of the usual kind ([docs](https://example.org/a)).

Args:
    vocab_size (`int`, *optional*, defaults to 10):
        The size of the vocabulary of [`BertModel`].
    name: Name of the thing that is made.

<Tip>

- the first item of the list
- the second item of the list

</Tip>

```python
this is code and not prose at all
```

| a table | of words in two | columns here |"""
    assert prose_paragraphs(docstring) == [
        "Constructs a tokenizer of the usual kind (docs).",
        "The size of the vocabulary of BertModel.",
        "Name of the thing that is made.",
        "the first item of the list",
        "the second item of the list",
    ]
