"""Writes docs/environment.md from the tables that the code itself reads. Run: make docs, or python scripts/env_page.py"""

from __future__ import annotations

import re
from pathlib import Path

from vllm_w8a8_plugin import envs
from w8a8_kernels import ptxas

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "environment.md"

# Of vLLM and its libraries, as far as they matter here.
OTHERS = {
    "VLLM_PLUGINS": "vLLM's list of plugins that may be loaded. Where it is set, it must hold `w8a8`.",
    "VLLM_DISABLED_KERNELS": "`W8A8Int8ScaledMMLinearKernel` gives int8 layers of vLLM's own schemes back to vLLM's kernels.",
    "VLLM_CPU_KVCACHE_SPACE": "GiB for the KV cache of vLLM's CPU build.",
    "VLLM_CPU_OMP_THREADS_BIND": "`nobind` lets tensor parallelism work on vLLM's CPU build.",
    "HF_HUB_OFFLINE": "`1`: nothing is downloaded, models are local folders or files.",
    "XDG_CACHE_HOME": "Where `vllm-w8a8` keeps its cache, if `VLLM_W8A8_CACHE_DIR` is not set.",
}

PTXAS = {
    "ptxas": "The assembler that Triton calls for GPUs before Blackwell.",
    "ptxas_blackwell": "The assembler that Triton calls for compute capability 10.0 and newer.",
}

TEXT = """<!-- Written by scripts/env_page.py from the code: change the tables there, then run `make docs`. -->
# Environment variables

## Of the plugin

Read when a model starts, in every process. A value that cannot be stops a model that is served in W8A8, with what was got and
expected; `vllm-w8a8 doctor` finds it before. All of them are part of the key of vLLM's compile cache. Switches take `1`,
`true`, `yes`, `on` and `0`, `false`, `no`, `off`.

{plugin}

What the larger ones do: [serve](serve.md), [several GPUs](parallel.md), [attention](attention.md), [GPUs](gpus.md).

## Of Triton

`vllm-w8a8 doctor` says which assembler is called, and whether it builds for the GPU.

{triton}

## Of `make demo` and `make test`

{setup}

## Of vLLM and others

{others}
"""


def table(*rows: tuple[str, ...]) -> str:
    lines = [rows[0], tuple("---" for _ in rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def setup_variables() -> list[tuple[str, str]]:
    """Those that the docstring of setup_env.py lists."""
    text = (ROOT / "scripts" / "setup_env.py").read_text(encoding="utf-8")
    block = re.search(r"^Environment variables:\n((?:    .*\n)+)", text, re.MULTILINE)[1]
    return [tuple(line.strip().split(maxsplit=1)) for line in block.splitlines()]


def page() -> str:
    """The whole page."""
    plugin = [(f"`{v.name}`", f"`{v.default}`" if v.default else "", v.effect) for v in envs.VARIABLES]
    triton = [(f"`{variable}`", PTXAS[tool]) for tool, variable in ptxas._VARIABLES.items()]
    return TEXT.format(
        plugin=table(("variable", "default", "effect"), *plugin),
        triton=table(("variable", "effect"), *triton),
        setup=table(("variable", "effect"), *((f"`{name}`", effect) for name, effect in setup_variables())),
        others=table(("variable", "effect"), *((f"`{name}`", effect) for name, effect in OTHERS.items())),
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
