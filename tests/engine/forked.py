"""Processes forked from one that has imported vLLM, which takes 12 s of a slow core, and done nothing else.

On CPUs only, where vLLM's own default is another one (spawn).
"""

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

METHOD = "forkserver"


def started() -> BaseContext:
    """The multiprocessing context of the server, which runs."""
    context = multiprocessing.get_context(METHOD)
    context.set_forkserver_preload(["torch.multiprocessing", "vllm.entrypoints.llm", "vllm.model_executor.layers.linear"])
    with _environment({key: value for key, value in os.environ.items() if not key.startswith("TRITON_INTERPRET")}):
        forkserver.ensure_running()
    return context


def take_environment(environment: dict[str, str]) -> None:
    """In a forked process: its environment, instead of the server's."""
    os.environ.clear()
    os.environ.update(environment)


@contextlib.contextmanager
def _environment(environment: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    take_environment(environment)
    try:
        yield
    finally:
        take_environment(before)
