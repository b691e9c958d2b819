"""The README's tables are those of the result files."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import report


def test_readme_has_the_figures_of_the_files() -> None:
    text = report.README.read_text()
    assert report.filled(text) == text, "run: make report"
    # Every figure counts.
    cell = next(line for line in text.splitlines() if line.startswith("| 16 |"))
    assert report.filled(text.replace(cell, cell.replace("0.", "1."))) == text


def test_refuses_unknown_and_missing_reports() -> None:
    text = report.README.read_text()
    with pytest.raises(ValueError, match="no report 'speed'"):
        report.filled(text.replace("report: moe", "report: speed"))
    with pytest.raises(ValueError, match="no marker for moe"):
        report.filled(text.replace("<!-- report: moe -->", ""))
