import importlib.util
import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Attention's kernels run in Triton's interpreter; read when a kernel is decorated, so before any is imported.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents and item.get_closest_marker("without_vllm") is None:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: `make test` installs it"))
