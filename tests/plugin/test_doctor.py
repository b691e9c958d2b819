import pytest
from typer.testing import CliRunner

pytest.importorskip("vllm", reason="vLLM is not installed: `make test` installs it")
from vllm_w8a8_plugin import compat
from vllm_w8a8_plugin.cli import app


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_W8A8_KERNEL", "VLLM_W8A8_ENABLE", "VLLM_W8A8_FUSION", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


def test_reports_and_passes() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for expected in ("vllm-w8a8-plugin", compat.installed_vllm(), "visible to vLLM", "rows (M)", "no problems found"):
        assert expected in result.output


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("VLLM_PLUGINS", "lora_resolver", "leaves the plugin out: add 'w8a8' to it or unset it"),
        ("VLLM_W8A8_ENABLE", "maybe", "VLLM_W8A8_ENABLE='maybe': expected 1 or 0"),
        ("VLLM_W8A8_FUSION", "perhaps", "VLLM_W8A8_FUSION='perhaps': expected 1 or 0"),
        ("VLLM_W8A8_KERNEL", "fastest", "no such kernel. Known: triton, cutlass, dp4a, onednn, torch"),
    ],
)
def test_names_what_must_be_mended(variable: str, value: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert problem in result.output


def test_says_when_vllm_is_missing_or_too_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "installed_vllm", lambda: "0.34.0")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "vLLM 0.34.0 is outside the supported range 0.25.1 <= version < 0.34: pip install" in result.output
    monkeypatch.setattr(compat, "installed_vllm", lambda: None)
    assert "vLLM is not installed: pip install" in CliRunner().invoke(app, ["doctor"]).output
