"""The memory that a conversion takes is bounded by its largest tensor, not by the checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "convert_memory.py"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon from /proc")
def test_anonymous_memory(tmp_path):
    command = [sys.executable, SCRIPT, "--gigabytes", "0.6", "--work", tmp_path, "--max-shard-size", "50MB"]
    command += ["--formats", "w8a8", "bf16"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for each other are slow on a busy machine
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    numbers = json.loads(result.stdout.splitlines()[-1])
    assert numbers["checkpoint_bytes"] > 0.59e9
    for fmt, run in numbers["formats"].items():
        assert run["samples"] > 10, fmt
        assert 0 < run["peak_bytes_above_imports"] < numbers["bound_bytes"], f"{fmt}: {run}, bound {numbers['bound_bytes']}"
    assert numbers["bound_bytes"] < numbers["checkpoint_bytes"] / 1.5, "a conversion that holds everything must not pass"
    assert not list(tmp_path.iterdir()), "the benchmark removes its data"
