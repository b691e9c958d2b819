"""The entry point is light, and says in one line what is wrong with the vLLM that it finds."""

import subprocess
import sys

import pytest

from vllm_w8a8_plugin import compat

# vLLM's finder says that there is no such package, as where it is not installed.
WITHOUT_VLLM = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name == "vllm" else find_spec(name, *args)
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


@pytest.mark.without_vllm
def test_import_is_light() -> None:
    done = python("import sys, vllm_w8a8_plugin; print([m for m in ('torch', 'vllm', 'triton', 'numpy') if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.without_vllm
def test_register_without_vllm_says_so_in_one_line() -> None:
    done = python(WITHOUT_VLLM + "import vllm_w8a8_plugin; vllm_w8a8_plugin.register(); vllm_w8a8_plugin.register()")
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "vLLM is not installed: pip install 'vllm-w8a8-plugin[cuda]'" in done.stderr


@pytest.mark.without_vllm
@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.25.0", False),
        ("0.25.1", True),
        ("0.27.1", True),
        ("0.32.0+cpu", True),
        ("0.33.0", True),
        ("0.33.1.dev3+gabc", True),
        ("0.34.0", False),
        ("0.34.0rc1", False),
        ("1.0", False),
    ],
)
def test_supported_range(version: str, supported: bool) -> None:
    problem = compat.vllm_problem(version)
    assert (problem is None) == supported
    if problem is not None:
        assert version in problem
        assert "0.25.1 <= version < 0.34" in problem
        assert "pip install" in problem


def test_register_touches_no_gpu() -> None:
    done = python("import vllm_w8a8_plugin, torch; vllm_w8a8_plugin.register(); print(torch.cuda.is_initialized())")
    assert done.stdout.strip().endswith("False"), done.stderr
