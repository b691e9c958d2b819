"""What the GPU benchmarks share: timing by CUDA graphs, the card's copy bandwidth, and where a result comes from."""

import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from w8a8_kernels.timing import MIN_CALLS, graph_us

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of large device-to-device copies."""
    source = torch.ones(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (graph_us([lambda: target.copy_(source)] * MIN_CALLS) * 1e-6)


def installed(package: str) -> str | None:
    """Version of a distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def provenance(commit: str | None = None) -> dict:
    """GPU, versions, commit, date and command: the head of every result file.

    Args:
        commit: where the source tree has no git history; default: git's word.
    """
    if commit is None:
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": sys.version.split()[0]} | {p: installed(p) for p in ("torch", "triton", "vllm", "gemlite")},
        "commit": commit,
        "command": shlex.join(["python", *sys.argv]),
    }
