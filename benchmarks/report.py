"""Writes the README's tables of speed from the newest files in benchmarks/results.

Run: python benchmarks/report.py [--check]

A table stands between `<!-- report: NAME -->` and `<!-- end -->`. `--check` changes nothing and fails where one differs.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
GPU = "nvidia-h200"


def newest(kind: str) -> tuple[Path, dict]:
    """The newest result file of a benchmark, and its content."""
    path = max(RESULTS.glob(f"{kind}-{GPU}-????-??-??.json"))
    return path, json.loads(path.read_text())


def source(path: Path) -> str:
    return f"[file]({path.relative_to(ROOT).as_posix()})"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head)]
    lines.append(["---"] * len(lines[0]))
    lines += [list(row) for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


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


REPORTS: dict[str, Callable[[], str]] = {"linear": linear, "quantize": quantize, "moe": moe, "engine": engine}


def filled(text: str) -> str:
    """`text` with every table as the result files have it.

    Raises:
        ValueError: a marker names no report, or a report stands nowhere.
    """
    seen = set()

    def fill(match: re.Match) -> str:
        name = match[1]
        if name not in REPORTS:
            raise ValueError(f"README.md: no report {name!r}, there are {', '.join(REPORTS)}")
        seen.add(name)
        return f"<!-- report: {name} -->\n{REPORTS[name]()}\n<!-- end -->"

    text = re.sub(r"<!-- report: (\S+) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)
    if missing := REPORTS.keys() - seen:
        raise ValueError(f"README.md: no marker for {', '.join(sorted(missing))}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail where a table differs")
    args = parser.parse_args()
    before = README.read_text()
    after = filled(before)
    if not args.check:
        README.write_text(after)
    elif after != before:
        sys.exit("README.md differs from benchmarks/results: run python benchmarks/report.py")


if __name__ == "__main__":
    main()
