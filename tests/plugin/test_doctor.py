import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("vllm", reason="vLLM is not installed: `make test` installs it")
from vllm_w8a8_plugin import compat
from vllm_w8a8_plugin.cli import app
from w8a8_kernels import ops


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_W8A8_KERNEL", "VLLM_W8A8_ENABLE", "VLLM_W8A8_FUSION", "VLLM_W8A8_CONFIG_DIR", "VLLM_PLUGINS"):
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
        ("VLLM_W8A8_CONFIG_DIR", "/nowhere", "VLLM_W8A8_CONFIG_DIR='/nowhere': got no such folder"),
        ("VLLM_W8A8_SKIP_MODULES", "lm_head, re:[", "VLLM_W8A8_SKIP_MODULES: skip pattern 're:[' is not a regular expression"),
        ("VLLM_W8A8_KERNEL", "fastest", "no such kernel. Known: triton, cutlass, pingpong, dp4a, onednn, torch"),
    ],
)
def test_names_what_must_be_mended(variable: str, value: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert result.output.count(problem) == 1


@pytest.mark.parametrize("has_gpu", [True, False])
def test_gives_each_reason_once(
    has_gpu: bool, pretend_gpu: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several kernels may not run for one reason."""
    if has_gpu:
        pretend_gpu(9, 0)
        facts = dataclasses.replace(ops.device_facts(torch.device("cuda")), has_triton=False)
        monkeypatch.setattr(ops, "device_facts", lambda device: facts)
    elif torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "400"})
    reason = "the package triton is not installed" if has_gpu else "the Triton kernels need a GPU"
    for rows in ("1", "4096"):
        (line,) = (line for line in result.output.splitlines() if line.split()[:1] == [rows])
        assert line.count(reason) == 1
        assert f"not triton or dp4a: {reason}" in line


def test_says_once_what_holds_for_several_gpus(
    pretend_gpu: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from w8a8_kernels import ptxas

    def fails(capability: tuple[int, int]) -> None:
        raise RuntimeError("it cannot be told which ptxas Triton calls")

    pretend_gpu(9, 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device.index or 0))
    monkeypatch.setattr(ptxas, "find_ptxas", fails)
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"})
    assert result.exit_code == 1
    assert result.output.count("problem: it cannot be told which ptxas Triton calls") == 1


@pytest.mark.parametrize("has_cutlass", [True, False])
def test_names_a_missing_tiles_folder_once(
    has_cutlass: bool, pretend_gpu: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU; with CUTLASS, the table of kernels looks for tiles, too."""
    pytest.importorskip("triton")
    pretend_gpu(9, 0)
    facts = dataclasses.replace(ops.device_facts(torch.device("cuda")), has_cutlass=has_cutlass)
    monkeypatch.setattr(ops, "device_facts", lambda device: facts)
    monkeypatch.setenv("VLLM_W8A8_CONFIG_DIR", "/nowhere")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert result.output.count("VLLM_W8A8_CONFIG_DIR='/nowhere'") == 1


def test_says_when_vllm_is_missing_or_too_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "installed_vllm", lambda: "0.34.0")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "vLLM 0.34.0 is outside the supported range 0.25.1 <= version < 0.34: pip install" in result.output
    monkeypatch.setattr(compat, "installed_vllm", lambda: None)
    assert "vLLM is not installed: pip install" in CliRunner().invoke(app, ["doctor"]).output


@pytest.fixture
def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Pretends that there is one GPU of a compute capability."""

    def pretend(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")

    for variable in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        monkeypatch.delenv(variable, raising=False)
    ops._gpu_facts.cache_clear()
    ops._device_name.cache_clear()
    yield pretend
    ops._gpu_facts.cache_clear()
    ops._device_name.cache_clear()


def test_names_the_ptxas_that_builds_for_the_gpu(pretend_gpu: Callable[[int, int], None]) -> None:
    pytest.importorskip("triton")
    pretend_gpu(12, 0)
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.output.splitlines() if "ptxas" in line)
    assert "builds for sm_120a" in line


def test_says_when_ptxas_does_not_know_the_gpu(pretend_gpu: Callable[[int, int], None]) -> None:
    pytest.importorskip("triton")
    pretend_gpu(13, 7)
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"})
    assert result.exit_code == 1
    assert "does not build for sm_137a" in result.output
    assert "problem: Triton cannot build kernels for this GPU (sm_137a)" in result.output
    assert "Set TRITON_PTXAS_BLACKWELL_PATH to the ptxas of a CUDA newer than" in result.output


@pytest.mark.parametrize(("capability", "fails"), [((9, 0), False), ((10, 0), True), ((12, 0), True)])
def test_says_where_stock_int8_raises(
    capability: tuple[int, int], fails: bool, pretend_gpu: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    pretend_gpu(*capability)
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    line = (
        f"int8 product, its first choice, raises at the first forward on compute capability {capability[0]}.{capability[1]}. "
        "VLLM_W8A8_ENABLE=1 mends it"
    )
    assert (line in result.output) == fails
    monkeypatch.setenv("VLLM_W8A8_ENABLE", "1")
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "300"})
    assert "raises" not in result.output
    assert "run on this plugin's kernels: VLLM_W8A8_ENABLE=1" in result.output


def test_says_when_vllms_kernels_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_W8A8_ENABLE", "1")
    monkeypatch.setattr(compat, "_INT8_KERNELS", ("vllm.model_executor.kernels.linear", "_NO_SUCH_LIST"))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "cannot bring this plugin's kernels to int8 layers of vLLM's own schemes" in result.output
