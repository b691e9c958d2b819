"""`python -m vllm_w8a8_plugin.quality`: its figures against the whole distributions, and what it does around the engines."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from typer.testing import CliRunner, Result

from vllm_w8a8_plugin import compat, envs, quality
from vllm_w8a8_plugin.divergence import Scores, agreement, divergence, figures, perplexity
from vllm_w8a8_plugin.quality import Job, Mode, Prompts, Results
from vllm_w8a8_plugin.quality_engine import scores_of

pytestmark = pytest.mark.without_vllm

POSITIONS = 40


def logits(seed: int, vocabulary: int, peak: float = 3.0) -> torch.Tensor:
    return peak * torch.randn(POSITIONS, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scores(logits: torch.Tensor, truth: torch.Tensor, kept: int) -> Scores:
    """As vLLM would give them for these logits."""
    logprobs = logits.log_softmax(-1)
    top = logprobs.topk(kept)
    true = logprobs.gather(1, truth[:, None])[:, 0]
    return Scores(true.float().numpy(), top.indices.int().numpy(), top.values.float().numpy())


def truth(vocabulary: int) -> torch.Tensor:
    return torch.randint(vocabulary, (POSITIONS,), generator=torch.Generator().manual_seed(9))


def merged_kl(p: torch.Tensor, q: torch.Tensor, support: int) -> np.ndarray:
    """KL over the `support` likeliest tokens of p and the rest as one, from the whole distributions."""
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    result = []
    for a, b in zip(log_p, log_q, strict=True):
        top = a.topk(support).indices
        rest = torch.ones_like(a, dtype=torch.bool)
        rest[top] = False
        total = (a[top].exp() * (a[top] - b[top])).sum()
        if rest.any():
            total += a[rest].exp().sum() * (a[rest].logsumexp(0) - b[rest].logsumexp(0))
        result.append(total.item())
    return np.array(result)


@pytest.mark.parametrize("vocabulary", [7, 320])
def test_divergence_of_whole_vocabularies(vocabulary: int) -> None:
    p, q, true = logits(0, vocabulary), logits(1, vocabulary), truth(vocabulary)
    result = divergence(scores(p, true, vocabulary), scores(q, true, vocabulary), 512)
    expected = torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    np.testing.assert_allclose(result.kl, expected, rtol=1e-5)
    assert result.missing.max() == 0
    assert result.tail.max() <= 1e-6


def test_divergence_merges_the_rest() -> None:
    vocabulary, support = 3000, 64
    p, true = logits(0, vocabulary, peak=1.0), truth(vocabulary)
    q = p + 0.3 * logits(1, vocabulary, peak=1.0)
    result = divergence(scores(p, true, support), scores(q, true, vocabulary), support)
    np.testing.assert_allclose(result.kl, merged_kl(p, q, support), rtol=1e-4)
    assert (result.kl < merged_kl(p, q, vocabulary)).all()
    np.testing.assert_allclose(result.tail, 1 - p.softmax(-1).topk(support).values.sum(-1), atol=1e-6)


def test_missing_tokens_count_as_the_least_likely_one() -> None:
    vocabulary, support = 3000, 64
    p, true = logits(0, vocabulary, peak=2.0), truth(vocabulary)
    q = p + 0.3 * logits(1, vocabulary, peak=1.0)
    result = divergence(scores(p, true, support), scores(q, true, 2 * support), support)
    expected, missing = [], []
    for a, b in zip(p.log_softmax(-1), q.log_softmax(-1), strict=True):
        given = dict(zip(*(values.tolist() for values in reversed(b.topk(2 * support))), strict=True))
        least = min(given.values())
        top = a.topk(support).indices.tolist()
        rest_p, rest_q = 1 - a[top].exp().sum().item(), 1 - sum(np.exp(given.get(token, least)) for token in top)
        known = sum(a[token].exp().item() * (a[token].item() - given.get(token, least)) for token in top)
        expected.append(known + rest_p * np.log(rest_p / rest_q))
        missing.append(sum(a[token].exp().item() for token in top if token not in given))
    np.testing.assert_allclose(result.kl, expected, rtol=1e-4)
    np.testing.assert_allclose(result.missing, missing, rtol=1e-4)
    assert 0.1 <= (result.missing > 0).mean() <= 0.9, "both kinds of positions must be here"
    assert result.kl.mean() == pytest.approx(merged_kl(p, q, support).mean(), rel=0.005)


def test_models_that_name_no_common_token_are_far_apart() -> None:
    """Merging all that one of them does not name would make the divergence of a broken model zero."""
    p = torch.zeros(POSITIONS, 1000, dtype=torch.float64)
    q = p.clone()
    p[:, :64] = 12
    q[:, 64:192] = 12
    true = truth(1000)
    assert divergence(scores(p, true, 64), scores(q, true, 128), 64).kl.min() >= 0.99 * np.log(128 / 64)


def test_perplexity_and_agreement() -> None:
    vocabulary = 500
    p, true = logits(0, vocabulary), truth(vocabulary)
    q = p + 0.2 * logits(1, vocabulary)
    q[::2] = p[::2]
    a, b = scores(p, true, 64), scores(q, true, 128)
    assert perplexity(b) == pytest.approx(torch.nn.functional.cross_entropy(q, true).exp().item(), rel=1e-5)
    assert agreement(a, b, 1) == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    common = [len(set(x.topk(5).indices.tolist()) & set(y.topk(5).indices.tolist())) / 5 for x, y in zip(p, q, strict=True)]
    assert agreement(a, b, 5) == pytest.approx(np.mean(common))
    assert 0.5 <= agreement(a, b, 1) < 1
    result = figures(a, b, 64)
    kl = merged_kl(p, q, 64)
    assert result["kl_mean"] == pytest.approx(kl.mean(), rel=0.02)
    assert result["kl_p99"] == pytest.approx(np.percentile(kl, 99), rel=0.02)
    assert result["ppl_ratio"] == pytest.approx(perplexity(b) / perplexity(a), rel=1e-4)
    with pytest.raises(ValueError, match="got 39 positions, expected the reference's 40"):
        figures(a, b[:-1], 64)


def test_equal_tokens_are_ordered_by_id() -> None:
    zeros = np.zeros(1, dtype=np.float32)
    reference = Scores(zeros, np.array([[5, 2, 8, 1]]), np.array([[-1.0, -2.0, -2.5, -3.0]]))
    for order in ([5, 7, 9, 2], [7, 9, 5, 2]):
        other = Scores(zeros, np.array([order]), np.array([[-1.0, -1.0, -1.0, -2.0]]))
        assert agreement(reference, other, 1) == 1
        assert agreement(reference, other, 2) == 0.5
    assert agreement(reference, Scores(zeros, np.array([[5, 3, 2, 8]]), other.logprobs), 1) == 0


@pytest.mark.parametrize("peak", [0.1, 3, 30])
def test_a_model_is_no_distance_from_itself(peak: float) -> None:
    same = scores(logits(0, 3000, peak), truth(3000), 128)
    result = figures(same, same, 64)
    assert (result["kl_mean"], result["kl_p99"]) == (0, 0)
    assert (result["ppl_ratio"], result["top1"], result["top5"], result["missing"]) == (1, 1, 1, 0)


def flat(logprobs: list[list[float]]) -> SimpleNamespace:
    """vLLM's FlatLogprobs of a prompt: nothing for its first token, the true token first everywhere else."""
    return SimpleNamespace(
        start_indices=[0] * (1 + len(logprobs)),
        token_ids=[10 * i + j for i, row in enumerate(logprobs) for j in range(len(row))],
        logprobs=[value for row in logprobs for value in row],
    )


def test_scores_from_vllm() -> None:
    values = [[-3.0, -0.5, -1.0], [-0.5, -0.5, -2.0], [-4.0, -0.1, -5.0]]
    got = scores_of(flat(values), first=2)
    assert got.true_logprobs.tolist() == [-0.5, -4.0]
    assert got.token_ids.tolist() == [[11, 12], [21, 22]]
    np.testing.assert_allclose(got.logprobs, [[-0.5, -2.0], [-0.1, -5.0]])
    with pytest.raises(ValueError, match="NaN or infinite log-probabilities at 1 of 3 positions"):
        scores_of(flat([*values[:2], [float("nan")] * 3]), first=1)


def make_tokenizer(file: Path, special: str | None = None) -> None:
    """A token for each byte, and perhaps one before every text."""
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if special is not None:
        tokenizer.add_special_tokens([special])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special} $A", special_tokens=[(special, tokenizer.token_to_id(special))]
        )
    tokenizer.save(str(file))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "Tiny-1B")


def make_model(folder: Path, config: dict | None = None, special: str | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | (config or {})))
    (folder / "model.safetensors").write_bytes(folder.name.encode())
    make_tokenizer(folder / "tokenizer.json", special)
    return folder


def test_texts() -> None:
    readme = (quality.ROOT / "texts" / "README.md").read_text(encoding="utf-8")
    for name in quality.TEXTS:
        assert f"`{name}.txt`" in readme
        assert len(quality.read_text(name)) >= 4000
    assert not any(c.isascii() for c in quality.read_text("chinese") if c.isalpha())


def test_prompts(model: Path, tmp_path: Path) -> None:
    prompts = quality.make_prompts(model, tokens=21, chunk=10)  # the last of 10, 10, 1 has no token with a context
    assert [len(ids) for ids in prompts.ids] == [10, 10] * 3
    assert prompts.first == 1
    assert list(prompts.texts.items()) == [(name, (2, 18)) for name in quality.TEXTS]
    assert [positions for _, positions in prompts.slices()] == [slice(0, 18), slice(18, 36), slice(36, 54)]
    with_bos = quality.make_prompts(make_model(tmp_path / "bos", special="<s>"), tokens=21, chunk=10)
    assert [len(ids) for ids in with_bos.ids] == [11, 11, 2] * 3
    assert {ids[0] for ids in with_bos.ids} == {256}
    assert dict(with_bos.texts) == dict.fromkeys(quality.TEXTS, (3, 21))
    assert with_bos.hashes != prompts.hashes


def test_modes_that_this_version_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    others = tuple(variable for variable in envs.VARIABLES if variable.name not in (quality.HADAMARD, envs.LM_HEAD))
    monkeypatch.setattr(envs, "VARIABLES", others)
    assert list(quality.choose_modes([], [])) == ["bf16", "fp8", "rtn"]
    with pytest.raises(
        ValueError, match="mode 'hadamard' needs VLLM_W8A8_HADAMARD, which this version of the plugin does not"
    ):
        quality.choose_modes(["hadamard"], [])
    added = tuple(envs.Variable(name, "0", "") for name in (quality.HADAMARD, envs.LM_HEAD))
    monkeypatch.setattr(envs, "VARIABLES", (*others, added[0]))
    assert list(quality.choose_modes([], [])) == ["bf16", "fp8", "rtn", "hadamard"]
    monkeypatch.setattr(envs, "VARIABLES", (*others, *added))
    assert list(quality.choose_modes([], [])) == ["bf16", "fp8", "rtn", "hadamard", "lmhead"]
    environments = {name: quality.engine_environment(mode) for name, mode in quality.MODES.items()}
    assert {name: env.get(quality.HADAMARD) for name, env in environments.items()} == {
        "bf16": None,
        "fp8": None,
        "rtn": "0",
        "hadamard": "auto",
        "lmhead": "auto",
    }
    assert [name for name, env in environments.items() if env.get(envs.LM_HEAD) == "1"] == ["lmhead"]


def test_modes_do_not_inherit_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else VLLM_W8A8_ENABLE=1 in the user's shell would quantize the reference."""
    monkeypatch.setenv(envs.ENABLE, "1")
    monkeypatch.setenv(quality.HADAMARD, "64")
    monkeypatch.setenv(envs.LM_HEAD, "1")
    monkeypatch.setenv("VLLM_W8A8_KERNEL", "torch")
    for mode in [*quality.REFERENCES.values(), quality.MODES["bf16"], Mode(checkpoint=Path("x"))]:
        environment = quality.engine_environment(mode)
        assert envs.ENABLE not in environment
        assert quality.HADAMARD not in environment
        assert envs.LM_HEAD not in environment
        assert environment["VLLM_W8A8_KERNEL"] == "torch"


@pytest.mark.parametrize(
    ("report", "mode", "message"),
    [
        ({"dtype": "bfloat16", "quantization": None}, "rtn", "vLLM ran it with quantization None, expected w8a8"),
        ({"dtype": "float16", "quantization": "w8a8"}, "rtn", "vLLM ran it with dtype float16, expected bfloat16"),
        ({"dtype": "bfloat16", "quantization": "w8a8"}, "bf16", "vLLM ran it with quantization w8a8, expected None"),
        ({"dtype": "bfloat16", "quantization": "w8a8"}, "rtn", None),
        ({"dtype": "bfloat16", "quantization": "fp8_per_tensor"}, "fp8", None),
    ],
)
def test_what_ran_is_what_was_asked_for(report: dict, mode: str, message: str | None) -> None:
    if message is None:
        quality._check_report(report, quality.MODES[mode], "")
    else:
        with pytest.raises(quality.EngineFailed, match=message):
            quality._check_report(report, quality.MODES[mode], "")


ABORTED = """
(MainProcess pid=1) WARNING 11-29 21:11:16 [base.py:380] ValueError: a warning that means nothing
(Worker pid=2) ERROR 11-29 21:11:43 [multiproc_executor.py:953] RuntimeError: no kernel for this device
Exception: WorkerProc initialization failed due to an exception in a background process.
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}
"""
REFUSED = """
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, Unknown quantization method: w8a8
"""


@pytest.mark.parametrize(
    ("status", "log", "reason"),
    [
        (1, ABORTED, "RuntimeError: no kernel for this device"),
        (1, REFUSED, "ValidationError: 1 validation error for ModelConfig: Value error, Unknown quantization method: w8a8"),
        (-signal.SIGKILL, "loading\n", "ended by signal SIGKILL"),
        (3, "loading\nno such thing\n", "exit status 3: no such thing"),
        (3, "", "exit status 3: it printed nothing"),
        (None, ABORTED, "it took longer than --timeout allows"),
    ],
)
def test_reason_of_a_failure(status: int | None, log: str, reason: str) -> None:
    assert quality._reason(status, log) == reason


def test_an_engine_out_of_time_leaves_no_process() -> None:
    status, log = quality._run(["bash", "-c", "sleep 300 & echo $!; wait"], dict(os.environ), timeout_s=1)
    assert status is None
    child = Path("/proc", log.strip())
    for _ in range(50):
        if not child.exists() or "Z" in (child / "stat").read_text().rpartition(")")[2][:3]:
            return
        time.sleep(0.1)
    pytest.fail(f"process {log.strip()} still runs")


class Engines:
    """Stands in for the engines: answers by mode, and remembers who was asked."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.fails: dict[str, BaseException] = {}

    def __call__(self, job: Job, mode: Mode) -> tuple[Scores, dict]:
        registry = {**{f"reference {name}": m for name, m in quality.REFERENCES.items()}, **quality.MODES}
        known = [name for name, other in registry.items() if other is mode]
        (name,) = known or [mode.checkpoint.name]
        self.ran.append(name)
        if name in self.fails:
            raise self.fails[name]
        positions = sum(n for _, n in job.prompts.texts.values())
        p = torch.randn(positions, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        noise = torch.randn(positions, 300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        q = p if name.startswith("reference") else p + (0.01 if name == "bf16" else 0.3) * noise
        return scores(q, torch.zeros(positions, dtype=torch.int64), 300), {
            "dtype": "d",
            "quantization": None,
            "device": "none",
        }


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    fake = Engines()
    monkeypatch.setattr(quality, "score", fake)
    monkeypatch.setattr(quality, "commit_of_source", lambda: "abc")
    monkeypatch.setattr(compat, "installed_vllm", lambda: "0.32.0")
    return fake


@pytest.fixture
def command(model: Path, tmp_path: Path) -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        out = [] if "--out" in arguments else ["--out", str(tmp_path / "out.json")]
        return CliRunner().invoke(quality.app, [str(model), "--tokens", "30", *arguments, *out], env={"COLUMNS": "120"})

    return run


def cells(tmp_path: Path) -> dict[tuple[str, str], dict]:
    return {(c["mode"], c["reference"]): c for c in json.loads((tmp_path / "out.json").read_text())["cells"]}


def test_result_file(command: Callable[..., Result], engines: Engines, tmp_path: Path) -> None:
    result = command("--mode", "bf16", "--mode", "rtn", "--reference", "fp32", "--reference", "bf16", "--name", "tiny")
    assert result.exit_code == 0, result.output
    assert engines.ran == ["reference fp32", "reference bf16", "bf16", "rtn"]
    assert result.output.splitlines()[-1] == str(tmp_path / "out.json")
    content = json.loads((tmp_path / "out.json").read_text())
    assert (content["model"], content["commit"], content["versions"]["vllm"]) == ("tiny", "abc", "0.32.0")
    assert content["texts"]["code"]["positions"] == 29
    assert list(cells(tmp_path)) == [(m, r) for m in ("bf16", "rtn") for r in ("fp32", "bf16")]
    cell = cells(tmp_path)["rtn", "fp32"]
    assert {"ppl", "ppl_ref", "kl_mean", "kl_p99", "top1", "top5"} <= cell.keys()
    assert cell["positions"] == 87
    assert cell["kl_mean"] == pytest.approx(np.mean([text["kl_mean"] for text in cell["texts"].values()]), rel=1e-4)
    assert list(cell["texts"]) == list(quality.TEXTS)
    assert cells(tmp_path)["bf16", "fp32"]["kl_mean"] < 0.01 * cell["kl_mean"]


def test_default_file(
    command: Callable[..., Result], engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(quality.app, ["Tiny-1B", "--tokens", "30", "--mode", "bf16"])
    assert result.exit_code == 0, result.output
    (file,) = (tmp_path / "benchmarks" / "results").iterdir()
    assert file.name.startswith("quality-tiny-1b-20")
    assert file.suffix == ".json"


def test_goes_on_where_it_stopped(command: Callable[..., Result], engines: Engines, tmp_path: Path) -> None:
    engines.fails["rtn"] = KeyboardInterrupt()
    result = command("--mode", "bf16", "--mode", "rtn")
    assert result.exit_code == 130
    assert "interrupted: what was measured is in" in result.output
    assert list(cells(tmp_path)) == [("bf16", "fp32")]
    first = cells(tmp_path)["bf16", "fp32"]
    engines.fails.clear()
    engines.ran.clear()
    assert command("--mode", "bf16", "--mode", "rtn").exit_code == 0
    assert engines.ran == ["reference fp32", "rtn"]
    assert cells(tmp_path)["bf16", "fp32"] == first
    engines.ran.clear()
    assert command("--mode", "bf16", "--mode", "rtn").exit_code == 0
    assert engines.ran == []
    assert command("--mode", "bf16", "--force").exit_code == 0
    assert engines.ran == ["reference fp32", "bf16"]
    assert list(cells(tmp_path)) == [("bf16", "fp32"), ("rtn", "fp32")]


def test_interrupted_before_anything_is_measured(command: Callable[..., Result], engines: Engines, tmp_path: Path) -> None:
    engines.fails["reference fp32"] = KeyboardInterrupt()
    result = command("--mode", "bf16", "--reference", "FP32")
    assert result.exit_code == 130
    assert result.output.splitlines()[-1] == "interrupted: nothing was measured yet"
    assert not (tmp_path / "out.json").exists()


def test_a_failed_mode_loses_no_other(command: Callable[..., Result], engines: Engines, tmp_path: Path) -> None:
    engines.fails["rtn"] = quality.EngineFailed("RuntimeError: no kernel", "the log")
    result = command("--mode", "rtn", "--mode", "bf16")
    assert result.exit_code == 1
    assert "rtn: did not run: RuntimeError: no kernel" in result.output
    (log,) = [line.partition(": ")[2] for line in result.output.splitlines() if line.startswith("  its log: ")]
    assert Path(log).read_text() == "the log"
    os.remove(log)
    assert list(cells(tmp_path)) == [("bf16", "fp32")]
    engines.fails.clear()
    assert command("--mode", "rtn", "--mode", "bf16").exit_code == 0
    assert set(cells(tmp_path)) == {("bf16", "fp32"), ("rtn", "fp32")}
    assert json.loads((tmp_path / "out.json").read_text())["failed"] == []


def test_stock_modes_may_be_missing(command: Callable[..., Result], engines: Engines, tmp_path: Path) -> None:
    engines.fails["fp8"] = quality.EngineFailed("RuntimeError: no fp8 here", "")
    assert command("--mode", "fp8", "--mode", "bf16").exit_code == 0
    reason = {"mode": "fp8", "reason": "RuntimeError: no fp8 here"}
    assert json.loads((tmp_path / "out.json").read_text())["failed"] == [reason]
    engines.ran.clear()
    result = command("--mode", "fp8", "--mode", "bf16")
    assert "fp8: does not run here: RuntimeError: no fp8 here" in result.output
    assert engines.ran == []


def test_nothing_is_measured_without_a_reference(command: Callable[..., Result], engines: Engines, tmp_path: Path) -> None:
    engines.fails["reference fp32"] = quality.EngineFailed("OutOfMemoryError: too much", "")
    result = command("--mode", "bf16")
    assert result.exit_code == 1
    assert "error: the reference did not run: OutOfMemoryError: too much" in result.output
    assert engines.ran == ["reference fp32"]


def test_a_changed_checkpoint_is_measured_again(command: Callable[..., Result], engines: Engines, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "rotated", {"quantization_config": {"quant_method": "w8a8"}})
    arguments = ("--checkpoint", f"rotate={folder}")
    assert command(*arguments).exit_code == 0
    assert engines.ran == ["reference fp32", "rotated"]
    assert list(cells(tmp_path)) == [("rotate", "fp32")]
    assert command(*arguments).exit_code == 0
    assert len(engines.ran) == 2
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert command(*arguments).exit_code == 0
    assert engines.ran[2:] == ["reference fp32", "rotated"]


def test_figures_of_other_code_are_not_continued(
    command: Callable[..., Result], engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("--mode", "bf16").exit_code == 0
    for arguments, key in (
        (("--commit", "def"), "commit"),
        (("--tokens", "31"), "texts"),
        (("--support", "64"), "settings"),
        (("--engine", '{"tensor_parallel_size": 2}'), "settings"),
    ):
        result = command("--mode", "bf16", *arguments)
        assert result.exit_code == 1
        assert f"holds figures of another {key}: --force replaces them" in result.output
    monkeypatch.setenv("VLLM_W8A8_SKIP_MODULES", "down_proj")
    assert "holds figures of another settings" in command("--mode", "bf16").output
    assert engines.ran == ["reference fp32", "bf16"]
    assert command("--mode", "rtn", "--commit", "def", "--force").exit_code == 0
    assert list(cells(tmp_path)) == [("rtn", "fp32")]


def test_files_of_others_are_left_alone(command: Callable[..., Result], engines: Engines, tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text('["mine"]')
    result = command("--mode", "bf16", "--force")
    assert result.exit_code == 1
    assert "is no result of this command: name another file with --out" in result.output
    assert (tmp_path / "out.json").read_text() == '["mine"]'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "fp4"], "unknown mode 'fp4': expected one of bf16, fp8, rtn, hadamard, lmhead"),
        (["--checkpoint", "rotate"], "--checkpoint 'rotate': expected NAME=PATH"),
        (["--checkpoint", "rtn=elsewhere"], "there already is a mode 'rtn', choose another name"),
        (["--checkpoint", "rotate=/none"], "--checkpoint 'rotate=/none': there is no such folder"),
        (["--tokens", "100000"], "text 'english' is too short: 10240 tokens in this model, --tokens asks for 100000"),
        (["--tokens", "1"], "--tokens 1: expected at least 2"),
        (["--engine", "x"], "--engine 'x': expected a JSON object with arguments of vllm.LLM"),
    ],
)
def test_one_line_errors_before_any_engine(
    arguments: list[str], message: str, command: Callable[..., Result], engines: Engines, tmp_path: Path
) -> None:
    result = command(*arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert engines.ran == []
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no folder", "there is no such folder"),
        ("no config", "the folder has no config.json"),
        ("no JSON", "Tiny-1B/config.json is not JSON: Expecting"),
        ("no object", "Tiny-1B/config.json holds no JSON object"),
        ("no tokenizer", "has no tokenizer.json"),
        ("quantized", "is quantized: expected the unquantized model"),
        ("other tokenizer", "checkpoint 'rotate' has another tokenizer than the model"),
    ],
)
def test_wrong_models(what: str, message: str, model: Path, engines: Engines, tmp_path: Path) -> None:
    arguments = [str(model), "--mode", "bf16", "--tokens", "30", "--out", str(tmp_path / "out.json")]
    if what == "no folder":
        arguments[0] = str(tmp_path / "none")
    elif what == "no config":
        (model / "config.json").unlink()
    elif what in ("no JSON", "no object"):
        (model / "config.json").write_text('{"a": ' if what == "no JSON" else "[]")
    elif what == "no tokenizer":
        (model / "tokenizer.json").unlink()
    elif what == "quantized":
        (model / "config.json").write_text('{"quantization_config": {"quant_method": "w8a8"}}')
    else:
        arguments += ["--checkpoint", f"rotate={make_model(tmp_path / 'other', special='<s>')}"]
    result = CliRunner().invoke(quality.app, arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert engines.ran == []


def test_results_are_written_whole(tmp_path: Path) -> None:
    results = Results.open(tmp_path / "deep" / "out.json", {"model": "m"})
    results.add({"mode": "bf16", "reference": "fp32", "texts": {}})
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["out.json"]
    again = Results.open(tmp_path / "deep" / "out.json", {"model": "m"})
    assert again.cells == results.cells


def test_positions_of_texts() -> None:
    prompts = Prompts([], 1, {"a": (1, 3), "b": (2, 5)}, {})
    assert list(prompts.slices()) == [("a", slice(0, 3)), ("b", slice(3, 8))]
