"""Which ptxas Triton calls for a GPU, and whether it builds for that GPU.

Triton brings two: `ptxas`, and `ptxas-blackwell` for GPUs of compute capability 10.0 and newer (Triton 3.6) or 9.0 and newer
(3.9). TRITON_PTXAS_PATH and TRITON_PTXAS_BLACKWELL_PATH replace them; one that does not run is passed over without a word.
Triton itself is asked, so that the answer is that of the release that is installed. No GPU is needed.
"""

import contextlib
import io
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

# The first CUDA whose ptxas knows a GPU by the name that Triton gives it (sm_120a).
FIRST_CUDA = {(9, 0): "12.0", (10, 0): "12.8", (10, 3): "12.9", (11, 0): "13.0", (12, 0): "12.8", (12, 1): "12.9"}

# CUDA 13.0 dropped what is older than Turing.
MIN_CAPABILITY_OF_CUDA_13, LAST_CUDA_12 = (7, 5), "12.9"

_VARIABLES = {"ptxas_blackwell": "TRITON_PTXAS_BLACKWELL_PATH", "ptxas": "TRITON_PTXAS_PATH"}

_PTX = """
.version {version}
.target {arch}
.address_size 64
.visible .entry empty_kernel() {{ ret; }}
"""


@dataclass(frozen=True)
class Ptxas:
    """The ptxas that Triton calls for one GPU.

    Args:
        capability: of the GPU.
        arch: the GPU's name as Triton gives it to ptxas.
        path, version: of the ptxas; the version is CUDA's.
        variable: the environment variable that replaces this ptxas.
        passed_over: what that variable names, if Triton passes it over because it does not run.
        refusal: why this ptxas cannot build for the GPU, in its words, or None if it can.
    """

    capability: tuple[int, int]
    arch: str
    path: str
    version: str
    variable: str
    passed_over: str | None
    refusal: str | None

    def __str__(self) -> str:
        return f"CUDA {self.version}, {'does not build' if self.refusal else 'builds'} for {self.arch} ({self.path})"

    def problem(self) -> str | None:
        """One line that says what is wrong and how to mend it, or None."""
        if self.refusal is not None:
            return (
                f"Triton cannot build kernels for this GPU ({self.arch}): its ptxas {self.path}, of CUDA {self.version}, says "
                f"{self.refusal!r}. {self._remedy()}"
            )
        if self.passed_over is not None:
            return (
                f"{self.variable}={self.passed_over!r} cannot be run as a ptxas, so Triton takes {self.path}: correct it or "
                "unset it"
            )
        return None

    def _remedy(self) -> str:
        if self.capability < MIN_CAPABILITY_OF_CUDA_13:
            return f"Set {self.variable} to the ptxas of CUDA {LAST_CUDA_12} or older."
        if self.capability in FIRST_CUDA:
            wanted = f"CUDA {FIRST_CUDA[self.capability]} or newer"
        else:
            wanted = f"a CUDA newer than {self.version}"
        if self.variable in os.environ:
            return f"Set {self.variable} to the ptxas of {wanted}, or unset it for the one that Triton brings."
        return f"Set {self.variable} to the ptxas of {wanted}, or install a newer vLLM, which brings a newer Triton."


def find_ptxas(capability: tuple[int, int]) -> Ptxas:
    """Ask Triton for its ptxas for a GPU, and let it assemble an empty kernel with all options that Triton gives it.

    Args:
        capability: compute capability, as (9, 0).

    Raises:
        RuntimeError: Triton is not installed, is none that chooses a ptxas as 3.6 to 3.9 do, or finds no ptxas that runs.
    """
    try:
        from triton import knobs
        from triton.backends.compiler import GPUTarget
        from triton.backends.nvidia.compiler import CUDABackend, get_ptxas, ptx_get_version, sm_arch_from_capability
    except ImportError as error:
        raise RuntimeError(f"it cannot be told which ptxas Triton calls: {error}") from error

    number = 10 * capability[0] + capability[1]
    arch = sm_arch_from_capability(number)
    try:
        tool = get_ptxas(number)
        variable = _variable_of(tool.path, knobs.nvidia)
        version = ptx_get_version(tool.version)
        ptx = _PTX.format(version=f"{version // 10}.{version % 10}", arch=arch)
        backend = CUDABackend(GPUTarget("cuda", number, 32))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of coming defaults, which decide nothing here
            options = backend.parse_options({})
        refusal = _refusal(lambda: backend.make_cubin(ptx, {}, options, number))
    except (OSError, RuntimeError) as error:  # a file that may not be run, or none at all
        raise RuntimeError(f"Triton finds no ptxas that runs: {error}") from error
    named = os.environ.get(variable)
    return Ptxas(capability, arch, tool.path, tool.version, variable, None if named in (None, tool.path) else named, refusal)


def _variable_of(path: str, tools: object) -> str:
    """The variable that replaces the ptxas at `path`. Triton says which tool it takes, not by which name it looks for it."""
    for name, variable in _VARIABLES.items():
        with contextlib.suppress(OSError, RuntimeError):
            if getattr(tools, name).path == path:
                return variable
    raise RuntimeError(f"{path} is neither of {' and '.join(_VARIABLES)}")


def _refusal(assemble: Callable[[], object]) -> str | None:
    """The line in which ptxas says why it fails. Triton would print all that it says, and the kernel."""
    from triton.runtime.errors import PTXASError

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            assemble()
    except PTXASError as error:
        stderr = str(error).partition("stderr:")[2].partition("Repro command")[0] or str(error)
        lines = [line.strip() for line in stderr.splitlines() if line.strip()]
        said = [line for line in lines if re.search(r"\b(fatal|error)\b", line, re.IGNORECASE)]
        return (said + lines + ["nothing"])[0]
    return None
