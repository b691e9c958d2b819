"""What a machine must have before `.venv` can be made, and which of vLLM's builds it runs.

Standard library only. The decisions are pure functions; the functions named `find_` and `probe_` look at the machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

MIN_PYTHON, MAX_PYTHON = (3, 11), (3, 14)
MIN_DRIVER = 580  # what the CUDA 13 wheels of vLLM and PyTorch need


class SetupError(Exception):
    """What went wrong and what to do about it, in words for the user."""


class Interpreter(NamedTuple):
    """A Python interpreter and what `.venv` needs of it."""

    command: str
    version: tuple[int, int]
    has_ensurepip: bool
    has_headers: bool


class Machine(NamedTuple):
    """What the checks look at; tests make their own."""

    system: str
    machine: str
    interpreter: Interpreter | None
    commands: frozenset[str]
    has_libnuma: bool
    free_gb: float


class Gpu(NamedTuple):
    """An NVIDIA GPU's name and the driver's version, such as `580.65.06`; empty where unknown."""

    name: str
    driver: str


def in_range(version: tuple[int, int]) -> bool:
    """Whether vLLM has wheels for this Python."""
    return MIN_PYTHON <= version <= MAX_PYTHON


def choose_interpreter(wanted: str, probe: Callable[[str], Interpreter | None]) -> Interpreter | None:
    """The interpreter for `.venv`.

    Args:
        wanted: The command to take; empty for python3 or, where that is out of range, the newest on PATH that is in it.
        probe: Looks at a command; None where it does not run.

    Returns:
        One in range where there is one, else what PYTHON or python3 is, so that its version can be named.
    """
    if wanted:
        return probe(wanted)
    first = probe("python3")
    if first and in_range(first.version):
        return first
    for minor in range(MAX_PYTHON[1], MIN_PYTHON[1] - 1, -1):
        found = probe(f"python3.{minor}")
        if found and in_range(found.version):
            return found
    return first


def problems(machine: Machine, needed_gb: float) -> tuple[list[str], list[str]]:
    """Everything that is missing and that the set-up cannot bring.

    Args:
        machine: What was found.
        needed_gb: Free disk space that the installation takes; 0 where it is already there.

    Returns:
        Reasons, one line each, and the Debian packages that mend those which packages can mend.
    """
    reasons, packages = [], []
    if (machine.system, machine.machine) != ("Linux", "x86_64"):
        reasons.append(f"This is {machine.system} on {machine.machine}; the wheels are for Linux on x86_64.")
    low, high = (".".join(map(str, version)) for version in (MIN_PYTHON, MAX_PYTHON))
    python = machine.interpreter
    if python is None:
        reasons.append(
            f"No Python runs as python3, or as what PYTHON names. Install {low} to {high}, or name one:"
            " PYTHON=/path/to/python3.12"
        )
    elif not in_range(python.version):
        found = ".".join(map(str, python.version))
        reasons.append(
            f"{python.command} is Python {found}; vLLM needs {low} to {high}. Install one of these (its -venv and -dev"
            " packages too) and name it: PYTHON=/path/to/python3.12"
        )
    else:
        name = Path(python.command).name
        prefix = name if re.fullmatch(r"python3\.\d+", name) else "python3"
        if not python.has_ensurepip:
            reasons.append(f"{python.command} cannot make virtual environments (no ensurepip).")
            packages.append(f"{prefix}-venv")
        if not python.has_headers:
            reasons.append(f"{python.command} has no Python.h, which torch.compile's C++ code includes.")
            packages.append(f"{prefix}-dev")
    if "g++" not in machine.commands:
        reasons.append("There is no g++, which torch.compile calls.")
        packages.append("g++")
    if "git" not in machine.commands:
        reasons.append("There is no git.")
        packages.append("git")
    if not machine.has_libnuma:
        reasons.append("There is no libnuma.so.1, which vLLM's CPU build loads.")
        packages.append("libnuma1")
    if machine.free_gb < needed_gb:
        reasons.append(f"{machine.free_gb:.1f} GB are free here, the installation needs about {needed_gb:.0f} GB.")
    return reasons, packages


def apt_line(packages: list[str], is_root: bool) -> str:
    """The one command that installs the missing Debian packages."""
    return f"{'' if is_root else 'sudo '}apt-get install -y {' '.join(packages)}"


def driver_version(text: str) -> str:
    """The driver's version in what `nvidia-smi` or /proc/driver/nvidia/version prints; empty where there is none."""
    match = re.search(r"(?<![\d.])\d{3,4}\.\d+(?:\.\d+)?(?![\d.])", text)
    return match[0] if match else ""


def driver_problem(gpu: Gpu) -> str:
    """Why the CUDA build would not run with this driver, and the ways out; empty where it would."""
    if gpu.driver and int(gpu.driver.split(".")[0]) >= MIN_DRIVER:
        return ""
    found = f"is {gpu.driver}" if gpu.driver else "has a version that could not be read"
    return (
        f"The NVIDIA driver ({gpu.name or 'GPU'}) {found}; the CUDA 13 wheels need {MIN_DRIVER} or newer. Update the"
        " driver, or use the CPU: W8A8_BACKEND=cpu make demo"
    )


def choose_backend(wanted: str, gpu: Gpu | None) -> str:
    """`cuda` or `cpu`, by W8A8_BACKEND or by what is there.

    Raises:
        SetupError: An unknown name, or CUDA on a machine where no GPU answers.
    """
    if wanted not in ("", "cpu", "cuda"):
        raise SetupError(f"W8A8_BACKEND={wanted} is unknown; it is cpu or cuda, or not set.")
    if wanted == "cuda" and gpu is None:
        raise SetupError("W8A8_BACKEND=cuda, but no NVIDIA GPU answers: `nvidia-smi` lists none.")
    return wanted or ("cuda" if gpu else "cpu")


def probe_interpreter(command: str) -> Interpreter | None:
    """Runs `command` to learn its version and what comes with it."""
    code = (
        "import importlib.util as u, json, os, sys, sysconfig\n"
        "header = os.path.join(sysconfig.get_paths()['include'], 'Python.h')\n"
        "pip = all(u.find_spec(name) for name in ('venv', 'ensurepip'))\n"
        "print(json.dumps([list(sys.version_info[:2]), pip, os.path.exists(header)]))\n"
    )
    try:
        done = subprocess.run([command, "-c", code], capture_output=True, text=True, check=True, env=clean_environment())
        version, has_ensurepip, has_headers = json.loads(done.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None
    return Interpreter(command, (version[0], version[1]), has_ensurepip, has_headers)


def find_gpu() -> Gpu | None:
    """The first NVIDIA GPU that answers, through `nvidia-smi` or, where that is missing, the kernel module's files."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60)
        name = done.stdout.splitlines()[0].split(",")[0].strip()
        return Gpu(name, driver_version(done.stdout.splitlines()[0].split(",")[-1]))
    except (OSError, subprocess.SubprocessError, IndexError):
        module = Path("/proc/driver/nvidia/version")
        if module.exists() and Path("/dev/nvidia0").exists():
            return Gpu("", driver_version(module.read_text(encoding="utf-8")))
        return None


def find_machine(python: str, folder: Path) -> Machine:
    """What is installed here.

    Args:
        python: The interpreter to look at; empty for the one that `choose_interpreter` finds.
        folder: Where `.venv` goes: its disk's free space counts.
    """
    try:
        ctypes.CDLL("libnuma.so.1")
        has_libnuma = True
    except OSError:
        has_libnuma = False
    return Machine(
        system=platform.system(),
        machine=platform.machine(),
        interpreter=choose_interpreter(python, probe_interpreter),
        commands=frozenset(name for name in ("g++", "git") if shutil.which(name)),
        has_libnuma=has_libnuma,
        free_gb=shutil.disk_usage(folder).free / 1e9,
    )


def clean_environment() -> dict[str, str]:
    """The environment without what would send installs or imports elsewhere than to `.venv`."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX")
    return {name: value for name, value in os.environ.items() if name not in dropped}
