"""MkDocs hook: files of the repository that pages link to, as results of benchmarks, become part of the site.

In the pages such links are relative, `../benchmarks/results/NAME.json`, so that they also work where pages are read as files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# Where the site has them.
FOLDER = "repository"
_OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)\s#]+)")


def _inside(link: str, page: str) -> str:
    """Path from the repository's root of what a page of `docs` links to."""
    return os.path.normpath(Path("docs", page).parent / link)


def on_files(files: Files, config) -> Files:
    """Add what pages link to outside of `docs`. Missing files are left to MkDocs, which names page and link."""
    linked = {
        _inside(link, page.src_uri) for page in files.documentation_pages() for link in _OUTSIDE.findall(page.content_string)
    }
    for path in sorted(linked):
        if (ROOT / path).is_file():
            files.append(File.generated(config, f"{FOLDER}/{path}.txt", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Let links lead to where `on_files` puts the files: as text, so that a browser shows them."""
    up = "../" * page.file.src_uri.count("/")
    return _OUTSIDE.sub(lambda match: f"]({up}{FOLDER}/{_inside(match[1], page.file.src_uri)}.txt", markdown)
