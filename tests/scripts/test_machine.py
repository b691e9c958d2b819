"""What the set-up says of machines that lack something. Run: make test ARGS=tests/scripts"""

import machine
import pytest
from machine import Gpu, Interpreter, Machine

PYTHON = Interpreter("python3", (3, 12), has_ensurepip=True, has_headers=True)
WHOLE = Machine("Linux", "x86_64", PYTHON, frozenset({"g++", "git"}), has_libnuma=True, free_gb=100.0)


def test_a_whole_machine_has_no_problems():
    assert machine.problems(WHOLE, needed_gb=6) == ([], [])


@pytest.mark.parametrize(
    ("change", "word", "packages"),
    [
        pytest.param({"system": "Darwin"}, "Darwin", [], id="macOS"),
        pytest.param({"machine": "aarch64"}, "aarch64", [], id="arm"),
        pytest.param({"interpreter": None}, "No Python", [], id="no-python"),
        pytest.param({"interpreter": PYTHON._replace(version=(3, 10))}, "Python 3.10", [], id="python-too-old"),
        pytest.param({"interpreter": PYTHON._replace(version=(3, 15))}, "Python 3.15", [], id="python-too-new"),
        pytest.param({"interpreter": PYTHON._replace(has_ensurepip=False)}, "ensurepip", ["python3-venv"], id="venv"),
        pytest.param({"interpreter": PYTHON._replace(has_headers=False)}, "Python.h", ["python3-dev"], id="headers"),
        pytest.param(
            {"interpreter": Interpreter("python3.12", (3, 12), has_ensurepip=False, has_headers=False)},
            "ensurepip",
            ["python3.12-venv", "python3.12-dev"],
            id="not-the-default-python",
        ),
        pytest.param(
            {"interpreter": PYTHON._replace(command="/x/.venv/bin/python", has_headers=False)},
            "Python.h",
            ["python3-dev"],
            id="python-of-the-venv",
        ),
        pytest.param({"commands": frozenset({"git"})}, "g++", ["g++"], id="compiler"),
        pytest.param({"commands": frozenset({"g++"})}, "git", ["git"], id="git"),
        pytest.param({"has_libnuma": False}, "libnuma", ["libnuma1"], id="libnuma"),
        pytest.param({"free_gb": 5.94}, "5.9 GB", [], id="disk"),
    ],
)
def test_each_problem_is_named(change, word, packages):
    reasons, found = machine.problems(WHOLE._replace(**change), needed_gb=6)
    assert word in reasons[0]
    assert found == packages
    assert len(reasons) == max(1, len(packages))


def test_a_bare_machine_gets_one_line_for_all():
    python = PYTHON._replace(has_ensurepip=False, has_headers=False)
    bare = WHOLE._replace(interpreter=python, commands=frozenset(), has_libnuma=False)
    reasons, packages = machine.problems(bare, needed_gb=6)
    assert len(reasons) == 5
    line = "apt-get install -y python3-venv python3-dev g++ git libnuma1"
    assert machine.apt_line(packages, is_root=False) == f"sudo {line}"
    assert machine.apt_line(packages, is_root=True) == line


@pytest.mark.parametrize(
    ("wanted", "there", "expected"),
    [
        pytest.param("", {"python3": (3, 11), "python3.14": (3, 14)}, "python3", id="default-in-range"),
        pytest.param("", {"python3": (3, 10), "python3.12": (3, 12), "python3.11": (3, 11)}, "python3.12", id="newest"),
        pytest.param("", {"python3": (3, 15), "python3.13": (3, 13)}, "python3.13", id="default-too-new"),
        pytest.param("", {"python3.11": (3, 11)}, "python3.11", id="no-default"),
        pytest.param("", {"python3": (3, 9)}, "python3", id="none-fits-so-that-it-is-named"),
        pytest.param("/opt/python", {"/opt/python": (3, 9), "python3": (3, 12)}, "/opt/python", id="named-wins"),
        pytest.param("/opt/python", {"python3": (3, 12)}, None, id="named-is-missing"),
        pytest.param("", {}, None, id="none"),
    ],
)
def test_choice_of_python(wanted, there, expected):
    def probe(command):
        return PYTHON._replace(command=command, version=there[command]) if command in there else None

    chosen = machine.choose_interpreter(wanted, probe)
    assert (chosen.command if chosen else None) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVIDIA H200, 580.65.06", "580.65.06"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024", "535.183.01"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.10  Release Build\nGCC version: 12.2.0", "595.10"),
        ("GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)", ""),
        ("", ""),
    ],
)
def test_driver_version(text, expected):
    assert machine.driver_version(text) == expected


@pytest.mark.parametrize(
    ("driver", "word"),
    [("580.65.06", ""), ("595.10", ""), ("1000.1", ""), ("575.57.08", "575.57.08"), ("99.1", "99.1"), ("", "not be read")],
)
def test_driver_problem(driver, word):
    problem = machine.driver_problem(Gpu("NVIDIA H200", driver))
    assert bool(problem) == bool(word)
    assert word in problem
    assert not problem or ("580" in problem and "W8A8_BACKEND=cpu" in problem)


@pytest.mark.parametrize(
    ("wanted", "gpu", "expected"),
    [
        ("", None, "cpu"),
        ("", Gpu("H200", "580.1"), "cuda"),
        ("cpu", Gpu("H200", "580.1"), "cpu"),
        ("cuda", Gpu("H200", "580.1"), "cuda"),
    ],
)
def test_choice_of_backend(wanted, gpu, expected):
    assert machine.choose_backend(wanted, gpu) == expected


@pytest.mark.parametrize("wanted", ["cuda", "gpu"])
def test_backend_that_cannot_be(wanted):
    with pytest.raises(machine.SetupError, match=f"W8A8_BACKEND={wanted}"):
        machine.choose_backend(wanted, None)


def test_this_interpreter_is_probed():
    import sys

    probed = machine.probe_interpreter(sys.executable)
    assert probed.version == sys.version_info[:2]
    assert machine.probe_interpreter("/nonexistent/python") is None
