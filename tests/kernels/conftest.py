"""Kernels run on the GPU where there is one, otherwise in Triton's interpreter on the CPU."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Read when a kernel is decorated, so it must be set before any kernel module is imported.
    os.environ["TRITON_INTERPRET"] = "1"

# Values that a correct kernel never leaves behind: int8 codes stop at -127, the tests' outputs stay far from the others.
POISON = {torch.int8: -128, torch.int32: 0x5A5A5A5A, torch.float32: 12345.0, torch.bfloat16: 12352.0, torch.float16: 12344.0}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--aot-full", action="store_true", help="compile the full product of kernels and targets (tens of minutes)"
    )


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` returns, so that an element that a kernel does not write is seen."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(POISON[out.dtype]) if out.dtype in POISON and out.device.type != "meta" else out

    monkeypatch.setattr(torch, "empty", poisoned)
