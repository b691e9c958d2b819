"""The benchmarks that start engines: what their command lines refuse, and how they end when an engine fails."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import engine
import step


@pytest.mark.parametrize(
    ("benchmark", "arguments", "message"),
    [
        (engine, ["--batches", "8", "0"], "argument --batches: got '0', expected a whole number from 1"),
        (engine, ["--prefill-batches", "-1"], "argument --prefill-batches: got '-1', expected a whole number from 1"),
        (engine, ["--runs", "0"], "argument --runs: got '0', expected a whole number from 1"),
        (engine, ["--engine", "[1]"], "argument --engine: got '[1]', expected a JSON object, as '{\"max_num_seqs\": 64}'"),
        (engine, ["--engine", "{max"], "argument --engine: got '{max', expected a JSON object"),
        (step, ["--decode", "0"], "argument --decode: got '0', expected a whole number from 1"),
        (step, ["--layers", "x"], "argument --layers: got 'x', expected a whole number from 1"),
        (step, ["--prefill", "512"], "--prefill 512: expected 1024, one prompt, or more"),
    ],
)
def test_refuses_arguments_before_anything_starts(
    benchmark: object, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{benchmark.__name__}.py", *arguments])
    monkeypatch.setattr(benchmark, "Engine", None)
    with pytest.raises(SystemExit) as end:
        benchmark.main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


class FakeEngine:
    """Measures its first cell and, for a mode that is named in `bad`, ends with an error; of `worse`, it measures nothing."""

    bad: tuple[str, ...] = ()
    worse: tuple[str, ...] = ()
    started = 0

    def __init__(self, script: str, config: dict, job: dict, env: dict[str, str], log: Path) -> None:
        FakeEngine.started += 1
        self._job, self._mode = job, log.stem

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait_until_started(self) -> None:
        pass

    def measure(self) -> tuple[list[dict], bool]:
        fails = any(f"-{mode}" in self._mode for mode in self.bad)
        if any(f"-{mode}" in self._mode for mode in self.worse):
            return [], False
        if "decode" in self._job:
            cell = {"phase": "decode", "kernels_us": 1, "launches": 1, "wall_us": 1, "kernels": []}
            return [cell | {"batch": batch} for batch in self._job["decode"]], not fails
        cells = [{"phase": phase, "batch": batch, "tokens_per_s": 1.0} for phase, batch in self._job["cells"]]
        return cells[:1] if fails else cells, not fails


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run a benchmark on engines that are none; its exit code and the file that it wrote."""

    def run(benchmark: object, *arguments: str, bad: tuple[str, ...] = (), worse: tuple[str, ...] = ()) -> tuple[int, dict]:
        out = tmp_path / "result.json"
        monkeypatch.setattr(sys, "argv", [f"{benchmark.__name__}.py", *arguments, "--out", str(out), "--commit", "abc"])
        monkeypatch.setattr(benchmark, "Engine", FakeEngine)
        monkeypatch.setattr(FakeEngine, "bad", bad)
        monkeypatch.setattr(FakeEngine, "worse", worse)
        monkeypatch.setattr(engine, "plot", lambda result, path: None)
        return benchmark.main(), json.loads(out.read_text())

    return run


TWO_MODES = ("--models", "tiny", "--modes", "bf16", "ours", "--batches", "1", "8")


@pytest.mark.parametrize("together", [(), ("--together",)])
def test_engine_fails_for_good(together: tuple[str, ...], run) -> None:
    """All that can be measured is, and the same command says so again without starting an engine."""
    code, result = run(engine, *TWO_MODES, *together, worse=("ours",))
    assert code == 1
    failed = [{"model": "tiny", "mode": "ours", "tp": 1, "crashes": engine.MAX_CRASHES + 1}]
    assert result["failed"] == failed
    assert {cell["mode"] for cell in result["cells"]} == {"bf16"}
    assert len(result["cells"]) == 4
    started = FakeEngine.started
    code, result = run(engine, *TWO_MODES)
    assert (code, FakeEngine.started, result["failed"]) == (1, started, failed)


def test_engine_that_crashes_and_measures_all_in_the_end(run) -> None:
    code, result = run(engine, "--models", "tiny", "--modes", "ours", "--batches", "1", "--phases", "prefill", bad=("ours",))
    assert (code, result["crashes"]) == (0, {"tiny ours tp 1": 1})
    assert "failed" not in result
    assert run(engine, *TWO_MODES)[0] == 0


@pytest.mark.parametrize(("bad", "code"), [((), 0), (("ours",), 1)])
def test_step_fails(bad: tuple[str, ...], code: int, run) -> None:
    got, result = run(step, "--models", "tiny", "--modes", "bf16", "ours", bad=bad)
    assert got == code
    assert len(result["cells"]) == 4
