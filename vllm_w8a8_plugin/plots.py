"""Plots, where matplotlib is installed: the extra `plot`."""

from pathlib import Path
from types import ModuleType

from vllm_w8a8_plugin.files import whole

INSTALL = "pip install 'vllm-w8a8-plugin[plot]'"


def matplotlib_figures() -> ModuleType | None:
    """matplotlib's module `figure`, which draws into files and opens no window, or None without matplotlib."""
    try:
        from matplotlib import figure
    except ImportError:
        return None
    return figure


def save(figure, file: Path) -> None:
    """Write a figure as PNG."""
    with whole(file) as part:
        figure.savefig(part, format="png", dpi=150)
