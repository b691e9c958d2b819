"""What the GPU benchmarks share: timing by CUDA graphs, the card's copy bandwidth, and where a result comes from."""

import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COPIES = 20

# `quantization_config` of a checkpoint that vLLM serves in int8 without this plugin.
STOCK_INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
        }
    },
}


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of large device-to-device copies, by the driver or by a kernel: the faster.

    Outside of CUDA graphs: captured in one, the driver's copies moved 2.8 TB/s on an H200 on which a product read 4.25 TB/s.
    """
    source = torch.ones(2**29, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    best_ms = float("inf")
    for copy in (lambda: target.copy_(source), lambda: torch.bitwise_not(source, out=target)):
        for _ in range(COPIES):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            copy()
            end.record()
            end.synchronize()
            best_ms = min(best_ms, start.elapsed_time(end))
    return 2 * source.numel() * source.element_size() / (best_ms * 1e-3)


def require_gpu_tests(*files: str) -> None:
    """Run GPU tests of the kernels, all files at once; no figure without them.

    Raises:
        SystemExit: one fails; with the end of what it said.
    """
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    running = [
        subprocess.Popen([*tests, str(ROOT / "tests" / "kernels" / file)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for file in files
    ]
    for process in running:
        output, _ = process.communicate()
        print(output.strip().splitlines()[-1])
        if process.returncode != 0:
            raise SystemExit(f"the kernels' GPU tests fail, nothing is measured:\n{output[-3000:]}")


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
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "capability": list(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": sys.version.split()[0]} | {p: installed(p) for p in ("torch", "triton", "vllm", "gemlite")},
        "commit": commit,
        "command": shlex.join(["python", *sys.argv]),
    }
