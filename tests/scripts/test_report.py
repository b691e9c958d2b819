"""The tables of figures in README and docs are those of the result files."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import report

BENCHMARKS = report.ROOT / "docs" / "benchmarks.md"
TEXTS = {page: page.read_text() for page in report.PAGES}


def test_pages_have_the_figures_of_the_files() -> None:
    filled = report.fill_all(TEXTS)
    assert [page.name for page in filled if filled[page] != TEXTS[page]] == [], "run: make report"


@pytest.mark.parametrize("page", [report.README, BENCHMARKS], ids=lambda page: page.name)
def test_every_figure_counts(page: Path) -> None:
    cell = next(line for line in TEXTS[page].splitlines() if line.startswith("| 16 |"))
    assert report.filled(TEXTS[page].replace(cell, cell.replace("0.", "1.")), page)[0] == TEXTS[page]


def test_one_page_has_all() -> None:
    assert report.filled(TEXTS[BENCHMARKS], BENCHMARKS)[1] == report.REPORTS.keys()


def test_refuses_unknown_and_missing_reports() -> None:
    with pytest.raises(ValueError, match=r"benchmarks\.md: no report 'speed'"):
        report.filled(TEXTS[BENCHMARKS].replace("report: moe", "report: speed"), BENCHMARKS)
    without = {page: text.replace("<!-- report: moe -->", "") for page, text in TEXTS.items()}
    with pytest.raises(ValueError, match="no page has a marker for moe"):
        report.fill_all(without)
