import importlib.util
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm_w8a8_plugin import log

if not torch.cuda.is_available():
    # Attention's kernels run in Triton's interpreter; read when a kernel is decorated, so before any is imported.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents and item.get_closest_marker("without_vllm") is None:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: `make test` installs it"))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines of our log as they come, with their level; what is said once is said again."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")
    monkeypatch.setattr(log, "logger", logging.Logger("w8a8", logging.INFO))
    log.logger.addHandler(handler)
    monkeypatch.setattr(log, "_said", set())
    return lines


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes vLLM believe that it runs on an NVIDIA GPU of a compute capability."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability, PlatformEnum

    def pretend(major: int, minor: int) -> None:
        monkeypatch.setattr(current_platform, "_enum", PlatformEnum.CUDA)
        capability = lambda device_id=0: DeviceCapability(major, minor)  # noqa: E731
        monkeypatch.setattr(current_platform, "get_device_capability", capability)

    return pretend
