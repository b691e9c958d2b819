import errno
import json
import os
import subprocess
import sys

import pytest

ROOTS = os.pathsep.join(path for path in sys.path if path)


@pytest.fixture
def command(tmp_path):
    """Runs `vllm-w8a8 convert src out ...` in a process of its own."""

    def run(*options: str, src: str = "src") -> subprocess.CompletedProcess:
        code = "from vllm_w8a8_plugin.cli import app; app()"
        environment = {**os.environ, "PYTHONPATH": ROOTS, "COLUMNS": "200"}
        arguments = [sys.executable, "-c", code, "convert", src, "out", *options]
        return subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def test_summary(checkpoint, command, tmp_path):
    checkpoint(tied=True)
    result = command("--quantize-lm-head", "--skip", "qkv_proj", "--skip", "o_proj", "--max-shard-size", "1KB")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "out\n"
    assert "check" in result.stderr
    assert "write" in result.stderr
    assert "7 layers quantized, 8 left as they are" in result.stderr
    assert "Hadamard blocks: 16 in 5 layers, none in 2 layers" in result.stderr
    assert "lm_head, no longer tied to the embedding, adds 0.0 MB" in result.stderr
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    worst = min(report["layers"], key=lambda layer: layer["sqnr_db"])
    assert f"{worst['name']} " in result.stderr
    assert f"{worst['sqnr_db']:.1f}" in result.stderr
    assert (tmp_path / "out" / "w8a8.safetensors.index.json").is_file()


def test_format_and_overwrite(checkpoint, command, tmp_path):
    checkpoint()
    assert command("--format", "compressed-tensors").returncode == 0
    refused = command("--format", "bf16")
    assert refused.returncode == 1
    assert "give --overwrite" in refused.stderr
    written = command("--format", "BF16", "--overwrite")
    assert written.returncode == 0
    assert "21 tensors written in bfloat16, " in written.stderr
    assert "quantized" not in written.stderr
    assert "no effect with --format bf16" in command("--format", "bf16", "--quality", "AUTO", "--overwrite").stderr
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_hadamard(checkpoint, command, tmp_path):
    checkpoint()
    assert command("--hadamard", "0").returncode == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["hadamard"] == 0
    assert command("--hadamard", "AUTO", "--overwrite").returncode == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["hadamard"] == 64
    assert command("--hadamard", "0", "--format", "compressed-tensors", "--overwrite").returncode == 0
    refused = command("--hadamard", "auto", "--format", "compressed-tensors", "--overwrite")
    assert refused.returncode == 1
    assert [line for line in refused.stderr.splitlines() if line.strip()] == [
        "error: --hadamard auto is for --format w8a8 only, not for compressed-tensors: its other readers would not transform "
        "the activations, and compute nonsense; leave it out"
    ]
    assert "'48' is not one of" in command("--hadamard", "48").stderr


def test_an_error_is_one_line(checkpoint, command, tmp_path):
    checkpoint()
    result = command("--skip", "q_proj")
    assert result.returncode == 1
    assert result.stdout == ""
    assert [line for line in result.stderr.splitlines() if line.strip()] == [
        "error: q_proj of model.layers.0.self_attn would be skipped but not k_proj, v_proj, and vLLM fuses them into one "
        "layer, qkv_proj: skip qkv_proj (all of them) or none"
    ]
    assert not (tmp_path / "out").exists()


def test_a_disk_that_refuses_is_one_line(checkpoint, tmp_path, monkeypatch):
    """As a limit on the size of files does, which no check beforehand sees."""
    from typer.testing import CliRunner

    from vllm_w8a8_plugin.cli import app

    def refuse(*_):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "ftruncate", refuse)
    result = CliRunner().invoke(app, ["convert", str(checkpoint()), str(tmp_path / "out")])
    assert result.exit_code == 1
    assert result.stderr.strip().splitlines()[-1] == f"error: {tmp_path / 'out'} was not written: [Errno 27] File too large"
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize(("name", "said"), [("FooForCausalLM", True), ("LlamaForCausalLM", False)])
def test_a_model_class_that_nobody_knows(checkpoint, command, name, said):
    """It is converted, as another release may know it."""
    pytest.importorskip("vllm")
    checkpoint(config={"architectures": [name]})
    result = command()
    assert result.returncode == 0, result.stderr
    assert ("note: architecture FooForCausalLM is known neither to vLLM" in result.stderr) == said


def test_a_missing_source(command):
    result = command(src="nowhere")
    assert result.returncode == 1
    assert "nowhere does not exist" in result.stderr


INTERRUPTED = """
import os, signal, sys
from vllm_w8a8_plugin.cli import app

def interrupt(*_):
    os.kill(os.getpid(), signal.{signal})

class WhileImporting:
    def find_spec(self, name, *_):
        if name == "w8a8_converters.convert":
            interrupt()

if {while_importing}:
    sys.meta_path.insert(0, WhileImporting())
else:
    import w8a8_converters.convert
    w8a8_converters.convert._write_side_files = interrupt  # the last step: the weights are written
app()
"""


@pytest.mark.parametrize("while_importing", [False, True], ids=["writing", "importing"])
@pytest.mark.parametrize(("signal", "status"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", 130)])
def test_interrupted(checkpoint, tmp_path, signal, status, while_importing):
    checkpoint()
    code = INTERRUPTED.format(signal=signal, while_importing=while_importing)
    environment = {**os.environ, "PYTHONPATH": ROOTS}
    arguments = [sys.executable, "-c", code, "convert", "src", "out"]
    result = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == status
    assert result.stderr.splitlines()[-1] == "interrupted: out was not written"
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("loaded", ["torch", "vllm", "rich", "w8a8_converters.convert"])
def test_the_command_starts_light(loaded):
    code = f"import sys, vllm_w8a8_plugin.cli; print({loaded!r} in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": ROOTS}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def test_the_converter_needs_neither_vllm_nor_transformers():
    code = (
        "import sys, w8a8_converters.convert, w8a8_converters.gguf.source; "
        "print(sorted({'vllm', 'transformers', 'compressed_tensors', 'vllm_w8a8_plugin'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": ROOTS}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
