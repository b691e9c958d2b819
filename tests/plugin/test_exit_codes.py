"""Exit codes of all commands: 1 for what the user has to mend, 2 for a command line that cannot be understood."""

from pathlib import Path

import gguf
import pytest
from typer.testing import CliRunner

from vllm_w8a8_plugin.cli import app

pytestmark = pytest.mark.without_vllm

MISSING = {
    "convert": ["nowhere", "out"],
    "inspect": ["nowhere"],
    "report": ["nowhere"],
    "eval": ["nowhere"],
    "tune": ["nowhere", "--list"],
    "serve": ["nowhere.gguf"],
}


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, list[str]]:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    return result.exit_code, [line for line in result.output.splitlines() if line.strip()]


@pytest.mark.parametrize("command", MISSING)
def test_a_model_that_is_not_there(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, lines = run(tmp_path, monkeypatch, command, *MISSING[command])
    assert code == 1
    assert len([line for line in lines if line.startswith(("error: ", "problem: "))]) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["convert", "cut.gguf", "out"], ["inspect", "cut.gguf"]], ids=str)
def test_a_damaged_file(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = gguf.GGUFWriter(tmp_path / "cut.gguf", "llama")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    data = (tmp_path / "cut.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[:-3])
    assert run(tmp_path, monkeypatch, *arguments)[0] == 1


@pytest.mark.parametrize("command", [name for name in MISSING if name != "serve"])
def test_an_option_that_does_not_exist(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, monkeypatch, command, *MISSING[command], "--no-such-option")[0] == 2


@pytest.mark.parametrize("command", MISSING)
def test_without_a_model(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, monkeypatch, command)[0] == 2


@pytest.mark.parametrize(
    "arguments",
    [["convert", "a", "b", "--format", "int4"], ["tune", "a", "--tp", "0"], ["eval", "a", "--tokens", "x"]],
    ids=str,
)
def test_a_value_of_another_kind(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, monkeypatch, *arguments)[0] == 2
