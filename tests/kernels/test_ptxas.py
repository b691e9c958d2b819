"""Which ptxas Triton takes for a GPU, and what is said when it cannot build for it. Needs no GPU."""

from pathlib import Path

import pytest

pytest.importorskip("triton")
from triton.backends.nvidia import compiler

from w8a8_kernels.ptxas import find_ptxas

BLACKWELL, OTHER = "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_PTXAS_PATH"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (BLACKWELL, OTHER):
        monkeypatch.delenv(variable, raising=False)


def fake(folder: Path, version: str, says: str) -> Path:
    """A program that tells a version and refuses all else."""
    script = folder / "fake-ptxas"
    script.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo "Cuda compilation tools, release {version}, V{version}.1"; exit; fi\n'
        f"echo 'preparing' >&2; echo '{says}' >&2; exit 1\n"
    )
    script.chmod(0o755)
    return script


@pytest.mark.parametrize(
    ("capability", "arch", "variable"),
    [((7, 5), "sm_75", OTHER), ((8, 9), "sm_89", OTHER), ((10, 0), "sm_100a", BLACKWELL), ((12, 0), "sm_120a", BLACKWELL)],
)
def test_triton_brings_one_that_builds(capability: tuple[int, int], arch: str, variable: str) -> None:
    ptxas = find_ptxas(capability)
    assert (ptxas.arch, ptxas.variable, ptxas.refusal) == (arch, variable, None)
    assert ptxas.problem() is None
    assert str(ptxas) == f"CUDA {ptxas.version}, builds for {arch} ({ptxas.path})"


def test_hopper_gets_the_one_that_triton_takes() -> None:
    """`ptxas` in Triton 3.6, `ptxas-blackwell` in 3.9."""
    ptxas = find_ptxas((9, 0))
    assert ptxas.path == compiler.get_ptxas(90).path
    assert ptxas.variable == (BLACKWELL if ptxas.path.endswith("-blackwell") else OTHER)
    assert ptxas.problem() is None


def test_gpu_that_no_ptxas_knows() -> None:
    ptxas = find_ptxas((13, 7))
    assert str(ptxas).startswith(f"CUDA {ptxas.version}, does not build for sm_137a (")
    assert ptxas.problem() == (
        f"Triton cannot build kernels for this GPU (sm_137a): its ptxas {ptxas.path}, of CUDA {ptxas.version}, says "
        f"\"{Path(ptxas.path).name} fatal   : Value 'sm_137a' is not defined for option 'gpu-name'\". Set {BLACKWELL} to the "
        f"ptxas of a CUDA newer than {ptxas.version}, or install a newer vLLM, which brings a newer Triton."
    )


@pytest.mark.parametrize(
    ("capability", "variable", "remedy"),
    [
        ((12, 0), BLACKWELL, "Set {} to the ptxas of CUDA 12.8 or newer, or unset it for the one that Triton brings."),
        ((8, 0), OTHER, "Set {} to the ptxas of a CUDA newer than 12.4, or unset it for the one that Triton brings."),
        ((7, 0), OTHER, "Set {} to the ptxas of CUDA 12.9 or older."),
    ],
)
def test_own_ptxas_that_refuses(
    capability: tuple[int, int], variable: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = fake(tmp_path, "12.4", "ptxas fatal : Unknown option")
    monkeypatch.setenv(variable, str(script))
    ptxas = find_ptxas(capability)
    assert (ptxas.path, ptxas.version, ptxas.refusal) == (str(script), "12.4", "ptxas fatal : Unknown option")
    assert ptxas.problem().endswith(remedy.format(variable))


def test_own_ptxas_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "ptxas"
    monkeypatch.setenv(BLACKWELL, str(missing))
    ptxas = find_ptxas((12, 0))
    assert ptxas.path != str(missing)
    assert ptxas.refusal is None
    assert ptxas.problem() == (
        f"{BLACKWELL}={str(missing)!r} cannot be run as a ptxas, so Triton takes {ptxas.path}: correct it or unset it"
    )
    not_executable = tmp_path / "text"
    not_executable.write_text("no program")
    monkeypatch.setenv(BLACKWELL, str(not_executable))
    with pytest.raises(RuntimeError, match=r"Triton finds no ptxas that runs: .*Permission denied"):
        find_ptxas((12, 0))


def test_another_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(compiler, "get_ptxas")
    with pytest.raises(RuntimeError, match=r"it cannot be told which ptxas Triton calls: cannot import name 'get_ptxas'"):
        find_ptxas((9, 0))
