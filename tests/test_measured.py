"""The measured tables of the pages are those of the committed results."""

import pytest

from benchmarks.measured import BLOCK, TABLES, main, pages, written


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_tables_are_those_of_the_results(page):
    text = page.read_text()
    assert written(text) == text, "run python -m benchmarks.measured"


def test_every_table_is_shown():
    assert {match["name"] for page in pages() for match in BLOCK.finditer(page.read_text())} == TABLES.keys()


def test_a_changed_number_is_found():
    text = next(page.read_text() for page in pages() if page.name == "distributed.md")
    assert "| DDP | 5e-07 |" in text
    changed = text.replace("| DDP | 5e-07 |", "| DDP | 4e-07 |", 1)
    assert written(changed) == text != changed
    assert main(["--check"]) == 0


def test_unknown_tables_are_refused():
    with pytest.raises(ValueError, match="no measured table 'speed'; there are pretrain.speed"):
        written("<!-- measured speed -->\n<!-- end -->")
