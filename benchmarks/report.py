"""Writes the tables of figures in README and docs from the newest files in benchmarks/results.

Run: python benchmarks/report.py [--check]

A table stands between `<!-- report: NAME -->` and `<!-- end -->`, on any page; docs/benchmarks.md has all of them. `--check`
changes nothing and fails where one differs.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import geometric_mean

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
GPU = "nvidia-h200"


def newest(kind: str) -> tuple[Path, dict]:
    """The newest result file of a benchmark, and its content."""
    path = max(RESULTS.glob(f"{kind}-{GPU}-????-??-??.json"))
    return path, json.loads(path.read_text())


def source(path: Path, text: str = "file") -> str:
    """A link, as it is in a page at the repository's root."""
    return f"[{text}]({path.relative_to(ROOT).as_posix()})"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head)]
    lines.append(["---"] * len(lines[0]))
    lines += [list(row) for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def linear() -> str:
    """Our time over the peers', by number of rows."""
    path, result = newest("linear")
    names = {"bf16": "bf16", "cutlass": "vLLM CUTLASS int8", "vllm_triton": "vLLM Triton int8"}
    rows = []
    for M in sorted({cell["M"] for cell in result["cells"]}):
        times = [cell["us"] for cell in result["cells"] if cell["M"] == M]
        over = [[us["ours"] / us[name] for us in times] for name in names]
        best = [us["ours"] / min(us[name] for name in names) for us in times]
        rows.append([str(M), *(f"{geometric_mean(v):.2f}" for v in [*over, best]), f"{max(best):.2f}"])
    return f"{table(['rows', *names.values(), 'fastest of the three', 'worst weight'], rows)}\n\n{source(path)}"


def quantize() -> str:
    """Microseconds of quantizers of rows of 4096, alone and fused."""
    path, result = newest("quantize")
    ops = {
        "quantize": "quantize",
        "add_rms_norm_quantize": "residual + RMSNorm + quantize",
        "silu_mul_quantize": "SiLU·mul + quantize",
    }
    rows = []
    for M in (1, 128, 2048, 8192):
        row = [str(M)]
        for op in ops:
            us = next(c["us"] for c in result["cells"] if (c["op"], c["M"], c["K"]) == (op, M, 4096))
            row.append(
                f"{us['ours']:.1f} / {us['ours_h64']:.1f} / {min(us[name] for name in us if name.startswith('vllm')):.1f}"
            )
        rows.append(row)
    return f"{table(['rows', *ops.values()], rows)}\n\n{source(path)}"


def moe() -> str:
    """Microseconds of a layer of experts."""
    path, result = newest("moe")
    names = {"ours_h64": "ours", "vllm_bf16": "vLLM bf16", "vllm_int8": "vLLM int8", "limit": "limit"}
    rows = []
    for cell in result["cells"]:
        us = cell["us"] | {"limit": cell["limit_us"]}
        rows.append([str(cell["tokens"]), *(f"{us[name]:.0f}" for name in names)])
    return f"{table(['tokens', *names.values()], rows)}\n\n{source(path)}, commit {result['commit']}"


def engine() -> str:
    """Tokens per second of whole engines."""
    path, result = newest("engine")
    modes = {
        "bf16": "bf16",
        "stock-int8": "stock int8",
        "stock-fp8": "stock fp8",
        "ours": "ours",
        "ours-lmhead": "+ int8 lm_head",
    }
    rates: dict[tuple, dict[str, float]] = {}
    for cell in result["cells"]:
        key = cell["model"], cell["phase"], cell["batch"]
        rates.setdefault(key, {})[cell["mode"]] = cell["tokens_per_s"]
    rows = [
        [model, phase, str(batch), *(f"{of[mode]:,.0f}" if mode in of else "" for mode in modes)]
        for (model, phase, batch), of in sorted(
            rates.items(), key=lambda item: (item[0][0], item[0][1] == "decode", item[0][2])
        )
    ]
    return f"{table(['model', 'phase', 'batch', *modes.values()], rows)}\n\n{source(path)}"


def quality() -> str:
    """Distance of served models from the unquantized one."""
    models = {"smollm2-135m": "SmolLM2-135M", "gemma-3-270m": "Gemma 3 270M"}
    modes = {
        "bf16": "bf16",
        "rtn": "W8A8, no transform",
        "hadamard": "W8A8 (default)",
        "auto": "W8A8, `--quality auto`",
    }
    paths = [max(RESULTS.glob(f"quality-{model}-????-??-??.json")) for model in models]
    cells = [{cell["mode"]: cell for cell in json.loads(path.read_text())["cells"]} for path in paths]
    rows = []
    for mode, what in modes.items():
        found = [of[mode] for of in cells]
        figures = [(f"x {c['ppl_ratio']:.4f}", f"{c['kl_mean']:.4f}", f"{100 * c['top1']:.1f} %") for c in found]
        rows.append([what, *(figure for of in figures for figure in of)])
    head = [text for name in models.values() for text in (f"{name}: perplexity", "mean KL", "same top token")]
    links = ", ".join(source(path, name) for path, name in zip(paths, models.values(), strict=True))
    return f"{table(['', *head], rows)}\n\n{links}"


REPORTS: dict[str, Callable[[], str]] = {
    "linear": linear,
    "quantize": quantize,
    "moe": moe,
    "engine": engine,
    "quality": quality,
}


def filled(text: str, page: Path = README) -> tuple[str, set[str]]:
    """`text` of a page with every table as the result files have it, and the names of the tables.

    Raises:
        ValueError: a marker names no report.
    """
    seen = set()
    up = "../" * (len(page.relative_to(ROOT).parts) - 1)

    def fill(match: re.Match) -> str:
        name = match[1]
        if name not in REPORTS:
            raise ValueError(f"{page.relative_to(ROOT)}: no report {name!r}, there are {', '.join(REPORTS)}")
        seen.add(name)
        written = REPORTS[name]().replace("](", f"]({up}")
        return f"<!-- report: {name} -->\n{written}\n<!-- end -->"

    return re.sub(r"<!-- report: (\S+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL), seen


def fill_all(texts: dict[Path, str]) -> dict[Path, str]:
    """Every page with its tables as the result files have them.

    Raises:
        ValueError: a marker names no report, or a report stands nowhere.
    """
    done, seen = {}, set()
    for page, text in texts.items():
        done[page], names = filled(text, page)
        seen |= names
    if missing := REPORTS.keys() - seen:
        raise ValueError(f"no page has a marker for {', '.join(sorted(missing))}")
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail where a table differs")
    args = parser.parse_args()
    before = {page: page.read_text() for page in PAGES}
    after = fill_all(before)
    changed = [page for page in PAGES if after[page] != before[page]]
    if args.check and changed:
        names = ", ".join(str(page.relative_to(ROOT)) for page in changed)
        sys.exit(f"{names} differ from benchmarks/results: run python benchmarks/report.py")
    for page in changed:
        page.write_text(after[page])


if __name__ == "__main__":
    main()
