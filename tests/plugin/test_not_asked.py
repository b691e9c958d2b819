"""Nothing changes for a model served without asking; with VLLM_W8A8_ENABLE, only what can be served in W8A8 changes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import AWQ, COMPRESSED_TENSORS, FP8, GPTQ, NATIVE, TINY_LLAMA, changed, model_folder

CHECKPOINTS = {
    "bf16": None,
    "fp8": FP8,
    "awq": AWQ,
    "gptq": GPTQ,
    "int8": COMPRESSED_TENSORS,
    "int8 per tensor": changed(COMPRESSED_TENSORS, "config_groups.group_0.weights.strategy", "tensor"),
    "native": NATIVE,
}

# Prints, for every folder: its resolved quantization, or the error; and the whole resolved config without what differs
# from run to run (object addresses, instance ids).
RESOLVE = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
result = {}
for folder in sys.argv[1:]:
    try:
        config = EngineArgs(model=folder, skip_tokenizer_init=True, enforce_eager=True).create_engine_config()
        result[folder] = [config.model_config.quantization, str(config), config.compute_hash()]
    except Exception as error:
        result[folder] = ["error", str(error)]
print("RESULT" + json.dumps(result))
"""

# Prints the hash of each of several configs of one folder: vLLM hashes its name, too.
HASHES = """
import json, sys
from pathlib import Path
from vllm.engine.arg_utils import EngineArgs
file = Path(sys.argv[1])
hashes = []
for config in json.loads(sys.argv[2]):
    file.write_text(json.dumps(config))
    hashes.append(EngineArgs(model=str(file.parent), skip_tokenizer_init=True).create_engine_config().compute_hash())
print("RESULT" + json.dumps(hashes))
"""


def run(script: str, arguments: list[str], env: dict[str, str]) -> tuple[str, str]:
    """What a script prints after RESULT, and its whole output."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_W8A8", "VLLM_PLUGINS", "TRITON_INTERPRET"))}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=inherited | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"} | env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "RESULT" in done.stdout, done.stdout + done.stderr
    return done.stdout.rpartition("RESULT")[2], done.stdout + done.stderr


def resolve(folders: dict[str, Path], env: dict[str, str]) -> tuple[dict[str, list[str]], str]:
    """name -> [quantization, resolved config, its hash, which is in the compile cache's key], and the log."""
    printed, log = run(RESOLVE, [str(folder) for folder in folders.values()], env)
    by_folder = json.loads(printed)
    return {name: by_folder[str(folder)] for name, folder in folders.items()}, log


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, list[str]], str]]:
    root = tmp_path_factory.mktemp("checkpoints")
    folders = {name: model_folder(root / name.replace(" ", "-"), config) for name, config in CHECKPOINTS.items()}
    return {
        "without": resolve(folders, {"VLLM_PLUGINS": ""}),
        "installed": resolve(folders, {}),
        "named": resolve(folders, {"VLLM_PLUGINS": "w8a8"}),
        "enabled": resolve(folders, {"VLLM_W8A8_ENABLE": "1"}),
    }


def settled(config: str) -> str:
    return re.sub(r"0x[0-9a-f]+|instance_id='?[\w-]+'?", "", config)


@pytest.mark.parametrize("mode", ["installed", "named"])
@pytest.mark.parametrize("name", [n for n in CHECKPOINTS if n != "native"])
def test_installed_and_not_asked_changes_nothing(resolved: dict, name: str, mode: str) -> None:
    """VLLM_PLUGINS unset and naming the plugin, against empty."""
    without, installed = (resolved[mode][0][name] for mode in ("without", mode))
    assert without[0] != "error", without[1]
    assert without[0] == installed[0]
    assert settled(without[1]) == settled(installed[1])
    assert without[2] == installed[2]


def test_native_needs_the_plugin_and_no_flag(resolved: dict) -> None:
    assert resolved["without"][0]["native"][0] == "error"
    assert "Unknown quantization method: w8a8" in resolved["without"][0]["native"][1]
    for mode in ("installed", "named"):
        assert resolved[mode][0]["native"][0] == "w8a8"


def test_options_of_checkpoints_are_in_the_compile_caches_key(tmp_path: Path) -> None:
    """They change what is traced, and vLLM hashes the checkpoint's config, not the quantization config made of it."""
    options = [{}, {"hadamard": 64}, {"hadamard_blocks": {"down_proj": 64}}, {"tp_consistent_activations": True}]
    options += [{"lm_head": True}, {"ignore": ["lm_head", "down_proj"]}, {}]
    configs = [TINY_LLAMA | {"quantization_config": NATIVE | option} for option in options]
    printed, log = run(HASHES, [str(tmp_path / "config.json"), json.dumps(configs)], {})
    hashes = json.loads(printed)
    assert hashes[0] == hashes[-1], log
    assert len(set(hashes)) == len(options) - 1, log


@pytest.mark.parametrize("name", ["bf16", "int8", "native"])
def test_enabled_takes_what_it_can(resolved: dict, name: str) -> None:
    assert resolved["enabled"][0][name][0] == "w8a8", resolved["enabled"][0][name][1]


@pytest.mark.parametrize("name", ["fp8", "awq", "gptq", "int8 per tensor"])
def test_enabled_leaves_the_rest_alone_and_says_so_once(resolved: dict, name: str) -> None:
    enabled, without = (resolved[mode][0][name] for mode in ("enabled", "without"))
    assert enabled[0] == without[0]
    assert settled(enabled[1]) == settled(without[1])
    folder = name.replace(" ", "-")
    said = [line for line in resolved["enabled"][1].splitlines() if f"/{folder} is already quantized" in line]
    assert len(said) == 1
    assert f"({without[0]}); vLLM's own path serves it" in said[0]
    assert ("int8 layers on this plugin's kernels" in said[0]) == (without[0] == "compressed-tensors")


def test_bad_variables_stop_only_a_model_that_asks(tmp_path: Path) -> None:
    folders = {name: model_folder(tmp_path / name, CHECKPOINTS[name]) for name in ("bf16", "native")}
    quantization, _ = resolve(folders, {"VLLM_W8A8_HADAMARD": "48", "VLLM_W8A8_FUSION": "perhaps"})
    assert quantization["bf16"][0] is None, quantization["bf16"][1]
    assert quantization["native"][0] == "error"
    assert "VLLM_W8A8_HADAMARD='48': expected auto, 0, 16, 32, 64 or 128" in quantization["native"][1]
