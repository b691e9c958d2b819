"""What is released: sdist and wheel are whole, the wheel works where it alone is installed, the image's file is sound."""

import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import setup_env

import vllm_w8a8_plugin
from vllm_w8a8_plugin import compat

ROOT = Path(__file__).resolve().parents[2]
VERSION = vllm_w8a8_plugin.__version__
PACKAGES = {
    "vllm_w8a8_plugin": ROOT / "vllm_w8a8_plugin",
    "w8a8_kernels": ROOT / "kernels" / "w8a8_kernels",
    "w8a8_converters": ROOT / "converters" / "w8a8_converters",
}
DOCKERFILE = ROOT / "Dockerfile"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sdist and wheel, the wheel built of the sdist, from a copy: builds leave files in the source folder."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    for path in (*PACKAGES.values(), *(ROOT / name for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"))):
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(path, copy) if path.is_dir() else shutil.copy(path, copy)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


def test_names_have_the_version(dist: Path, wheel: Path) -> None:
    assert wheel.name == f"vllm_w8a8_plugin-{VERSION}-py3-none-any.whl"
    assert [path.name for path in dist.glob("*.tar.gz")] == [f"vllm_w8a8_plugin-{VERSION}.tar.gz"]


def test_version_stands_in_one_place() -> None:
    places = [ROOT / name for name in ("setup.py", "pyproject.toml", "Makefile", "Dockerfile")]
    places += [path for package in PACKAGES.values() for path in package.rglob("*.py")]
    quoted = re.compile(rf"""["']v?{re.escape(VERSION)}["']""")
    found = [path for path in places if quoted.search(path.read_text(encoding="utf-8"))]
    assert found == [ROOT / "vllm_w8a8_plugin" / "__init__.py"]


def test_changelog_begins_with_the_version() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert re.fullmatch(rf"{re.escape(VERSION)} \(\d{{4}}-\d\d-\d\d\)", headings[0])


def test_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    """Code and data: the texts, the measured tiles, the calibration text."""
    expected = {
        f"{name}/{path.relative_to(folder)}"
        for name, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    info = f"vllm_w8a8_plugin-{VERSION}.dist-info"
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in held if not name.startswith(info)} == expected
    data = {name for name in held if not name.endswith(".py") and not name.startswith(info)}
    assert {"w8a8_kernels/configs/nvidia-h200.json", "w8a8_converters/folding/calibration.txt"} < data
    assert {f"vllm_w8a8_plugin/texts/{name}.txt" for name in ("chinese", "code", "english")} < data


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"vllm_w8a8_plugin-{VERSION}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert metadata["Name"] == "vllm-w8a8-plugin"
    assert metadata["Version"] == VERSION
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "vllm-w8a8 = vllm_w8a8_plugin.cli:app" in entry_points
    assert "w8a8 = vllm_w8a8_plugin:register" in entry_points
    required = [name for name in metadata.get_all("Requires-Dist") if "extra ==" not in name]
    assert not [name for name in required if name.startswith("vllm")]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: `make test` installs it")
def test_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    """`doctor` finds nothing wrong, and what runs is the wheel's code, with its data."""
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, timeout=300)
    # Neither the source roots nor settings of this run; what else is needed comes from this environment.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "TRITON_", "PYTHON"))}
    environment |= {"PYTHONPATH": str(site), "COLUMNS": "200"}

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = run(str(site / "bin" / "vllm-w8a8"), "doctor")
    assert "no problems found" in said
    assert "visible to vLLM" in said
    assert re.search(rf"vllm-w8a8-plugin +{re.escape(VERSION)}\b", said)
    code = (
        "import importlib.metadata, vllm_w8a8_plugin, w8a8_kernels.tiles, w8a8_converters.folding.calibration as c\n"
        "print(vllm_w8a8_plugin.__file__, w8a8_kernels.tiles.CONFIG_DIR, c.DEFAULT_TEXT)\n"
        "print(importlib.metadata.distribution('vllm-w8a8-plugin').locate_file(''))"
    )
    paths = [Path(path) for path in run(sys.executable, "-c", code).split()]
    assert len(paths) == 4
    assert all(path.is_relative_to(site) and path.exists() for path in paths)


def test_dockerfile_is_on_the_vllm_that_is_tested() -> None:
    """The release of `make setup`, which is in the range of the plugin."""
    (tag,) = re.findall(r"^FROM vllm/vllm-openai:v(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert tag == setup_env.DEFAULT_VLLM["cuda"]
    assert compat.vllm_problem(tag) is None


def test_dockerfile() -> None:
    text = DOCKERFILE.read_text()
    last = text[text.rindex("\nFROM ") :]
    assert int(re.findall(r"^USER (\d+)$", last, re.MULTILINE)[-1]) > 0
    assert re.search(r"^HEALTHCHECK ", last, re.MULTILINE)
    assert last.rstrip().endswith('ENTRYPOINT ["vllm-w8a8", "serve"]')
    copied = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.skipif(shutil.which("hadolint", path=str(Path(sys.executable).parent)) is None, reason="no hadolint here")
def test_hadolint() -> None:
    hadolint = str(Path(sys.executable).parent / "hadolint")
    done = subprocess.run([hadolint, "--failure-threshold", "style", str(DOCKERFILE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
