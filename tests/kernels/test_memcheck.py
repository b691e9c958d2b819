import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import w8a8_kernels

SCRIPT = Path(__file__).with_name("memcheck.py")


@pytest.mark.gpu
def test_no_kernel_leaves_its_memory() -> None:
    """compute-sanitizer's memcheck, with an allocation for each tensor: in PyTorch's pool a neighbour's memory is no error."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(Path(w8a8_kernels.__file__).parents[1])}
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(SCRIPT)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    said = done.stdout + done.stderr
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer does not support this machine's GPU")
    assert done.returncode == 0, said[-4000:]
    assert "all kernels ran" in said
    assert "ERROR SUMMARY: 0 errors" in said
