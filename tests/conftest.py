"""GPU tests skip, with the reason, where there is no GPU; processes that run side by side share the cores."""

import os

import pytest

# Threads that wait for each other on a busy machine are slow: an engine with two took 118 s beside others, with one 38. Read
# when torch is imported, also by the processes that tests start.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _share)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, none is visible"))
