"""`vllm-w8a8 eval`: its figures against the whole distributions, and what it does around the engines."""

import io
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from typer.testing import CliRunner, Result

from vllm_w8a8_plugin import cli, compat, envs, plots, quality, quality_command, quality_report
from vllm_w8a8_plugin import quality_prompts as prompting
from vllm_w8a8_plugin.divergence import Scores, agreement, divergence, figures, histogram, perplexity
from vllm_w8a8_plugin.quality import Job, Results
from vllm_w8a8_plugin.quality_engine import scores_of
from vllm_w8a8_plugin.quality_modes import MODES, REFERENCES, Kind, Mode, Target, choose_modes
from vllm_w8a8_plugin.quality_prompts import TEXTS, Place, Prompts, load_tokenizer, make_prompts, read_text, read_texts

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


def make_tokenizer(file: Path, special: str | None = None, without: str = "") -> None:
    """A token for each byte, but perhaps one, and perhaps one before every text."""
    vocabulary = {token: i for i, token in enumerate(sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(without)))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
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
    readme = (prompting.ROOT / "texts" / "README.md").read_text(encoding="utf-8")
    for name in TEXTS:
        assert f"`{name}.txt`" in readme
        assert len(read_text(name)) >= 4000
    assert not any(c.isascii() for c in read_text("chinese") if c.isalpha())


def test_prompts(model: Path, tmp_path: Path) -> None:
    texts = read_texts([])
    # The last of 10, 10, 1 has no token with a context.
    prompts = make_prompts(load_tokenizer(model), texts, tokens=21, chunk=10)
    assert [len(ids) for ids in prompts.ids] == [10, 10] * 3
    assert (prompts.first, prompts.prefix, prompts.positions) == (1, 0, 54)
    assert list(prompts.texts.items()) == [(name, (2, 18)) for name in TEXTS]
    assert [positions for _, positions in prompts.slices()] == [slice(0, 18), slice(18, 36), slice(36, 54)]
    with_bos = make_prompts(load_tokenizer(make_model(tmp_path / "bos", special="<s>")), texts, tokens=21, chunk=10)
    assert [len(ids) for ids in with_bos.ids] == [11, 11, 2] * 3
    assert {ids[0] for ids in with_bos.ids} == {256}
    assert dict(with_bos.texts) == dict.fromkeys(TEXTS, (3, 21))
    assert with_bos.hashes != prompts.hashes


@pytest.mark.parametrize("special", [None, "<s>"])
def test_places_name_the_predicted_token(special: str | None, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_model(tmp_path / "model", special=special))
    texts = {"a": "abcdefghij", "b": "klmnopqrst"}
    prompts = make_prompts(tokenizer, texts, tokens=9, chunk=4)
    places = prompts.places()
    assert len(places) == prompts.positions == len(prompts.indices())
    for place, index in zip(places, prompts.indices(), strict=True):
        assert place.index == index
        token = tokenizer.decode([prompts.ids[place.prompt][place.index]])
        assert token == texts[place.text][place.token]
    assert places[-1] == Place("b", 7 if special is None else 8, len(prompts.ids) - 1, 3 if special is None else 1)


def test_without_a_number_short_texts_are_used_whole(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    prompts = make_prompts(tokenizer, {"short": "abc" * 100, "long": "abc" * 1000})
    assert prompts.texts == {"short": (2, 298), "long": (8, 1992)}
    with pytest.raises(ValueError, match="text 'short' is too short: 300 tokens in this model, --tokens asks for 301"):
        make_prompts(tokenizer, {"short": "abc" * 100}, tokens=301)
    with pytest.raises(ValueError, match="text 'a' is too short: 1 tokens in this model, at least 2 are needed"):
        make_prompts(tokenizer, {"a": "a"})


def test_continuation_keeps_spaces_and_split_characters() -> None:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("\u2581a", -1.0), ("\u2581b", -1.0), ("c", -1.0)], 0))
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([2]) == "b", "alone, the space is lost"
    assert prompting.continuation(tokenizer, [1], 2) == " b"
    assert prompting.continuation(tokenizer, [1], 3) == "c"
    split = Tokenizer(models.BPE({"\u00c3": 0, "\u00a9": 1}, []))
    split.decoder = decoders.ByteLevel()
    assert split.decode([0, 1]) == "\u00e9"
    assert prompting.continuation(split, [0], 1) == "<0xA9>", "the token's own byte where it changes what came before"


def byte_level() -> Tokenizer:
    """A token for each byte, and two of several: a space with the beginning of a character, and its end."""
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"\u0120\u00e2\u0122": 256, "\u00ac": vocabulary["\u00ac"]}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece with tokens for bytes, and one with a space."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)), ("\u2581a", -1.0), ("b", -1.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize(
    ("make", "tokens", "text"),
    [
        (byte_level, ["a", "\u0120", "b"], "a b"),
        (byte_level, ["a", "\u0120\u00e2\u0122"], "a <0xE2><0x80>"),  # U+2019, cut before its last byte
        (byte_level, ["\u0142", "a", "\u0120"], "<0xA0>a "),  # begins within a character
        (byte_level, ["\u0120\u00e2\u0122", "\u013b", "\u00e2"], " \u2019<0xE2>"),
        (byte_level, ["\u00e2", "<end>", "\u010a"], "<0xE2><end>\n"),
        (byte_fallback, ["\u2581a", "b", "<0xC3>", "<0xA9>"], " ab\u00e9"),
        (byte_fallback, ["<0xA9>", "\u2581a", "<0xE2>", "<0x80>"], "<0xA9> a<0xE2><0x80>"),
    ],
)
def test_bytes_of_cut_characters_are_shown(make: Callable[[], Tokenizer], tokens: list[str], text: str) -> None:
    tokenizer = make()
    ids = [tokenizer.token_to_id(token) for token in tokens]
    assert None not in ids
    assert prompting.readable(tokenizer, ids) == text
    alone = prompting.readable(tokenizer, ids[-1:])
    assert "\ufffd" not in alone + prompting.continuation(tokenizer, ids[:-1], ids[-1])
    assert quality_report.code(prompting.readable(tokenizer, ids)).strip('`"') == text.replace("\n", "\\n")


def test_a_replacement_character_of_the_text_stays() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a\ufffdb").ids
    assert prompting.readable(tokenizer, ids) == "a\ufffdb"


def test_modes_that_this_version_lacks_are_refused(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    target = Target.find(model)
    others = tuple(variable for variable in envs.VARIABLES if variable.name not in (envs.HADAMARD, envs.LM_HEAD))
    monkeypatch.setattr(envs, "VARIABLES", others)
    assert list(choose_modes([], [], target)) == ["bf16", "fp8", "rtn"]
    with pytest.raises(
        ValueError, match="mode 'hadamard' needs VLLM_W8A8_HADAMARD, which this version of the plugin does not"
    ):
        choose_modes(["hadamard"], [], target)
    added = tuple(envs.Variable(name, "0", "") for name in (envs.HADAMARD, envs.LM_HEAD))
    monkeypatch.setattr(envs, "VARIABLES", (*others, added[0]))
    assert list(choose_modes([], [], target)) == ["bf16", "fp8", "rtn", "hadamard"]
    monkeypatch.setattr(envs, "VARIABLES", (*others, *added))
    assert list(choose_modes([], [], target)) == ["bf16", "fp8", "rtn", "hadamard", "lmhead"]


def test_environments_of_modes() -> None:
    environments = {name: quality.engine_environment(mode) for name, mode in MODES.items()}

    def found(variable: str) -> dict[str, str]:
        return {name: environment[variable] for name, environment in environments.items() if variable in environment}

    with_transform = dict.fromkeys(("hadamard", "lmhead", "kv-int8", "tp-consistent"), "auto")
    assert found(envs.HADAMARD) == {"rtn": "0"} | with_transform
    assert found(envs.LM_HEAD) == {"lmhead": "1"}
    assert found(envs.TP_CONSISTENT_ACTIVATIONS) == {"tp-consistent": "1"}
    assert [name for name, mode in MODES.items() if "kv_cache_dtype" in mode.engine] == ["kv-int8"]


def test_modes_of_a_quantized_folder(tmp_path: Path) -> None:
    target = Target.find(make_model(tmp_path / "int8", {"quantization_config": {"quant_method": "w8a8"}}))
    assert list(choose_modes([], [], target)) == ["bf16", "checkpoint"]
    modes = choose_modes([*MODES], [], target, {"tensor_parallel_size": 2})
    served = {name for name, mode in modes.items() if mode.served == target}
    assert served == {"checkpoint", "lmhead", "kv-int8", "tp-consistent"}
    assert all(mode.served is None for name, mode in modes.items() if name not in served)


def test_modes_of_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    target = Target.find(tmp_path / "model.gguf")
    assert (target.kind, target.name) == (Kind.GGUF, "model")
    modes = choose_modes([], [], target)
    assert {name: mode.served for name, mode in modes.items()} == {"bf16": None, "rtn": target, "hadamard": target}
    assert modes["rtn"].engine["quantization"] == "w8a8"
    (other,) = choose_modes([], [f"mine={tmp_path / 'model.gguf'}"], target).values()
    assert (other.served, other.engine["quantization"]) == (target, "w8a8")


def test_modes_do_not_inherit_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else VLLM_W8A8_ENABLE=1 in the user's shell would quantize the reference."""
    monkeypatch.setenv(envs.ENABLE, "1")
    monkeypatch.setenv(envs.HADAMARD, "64")
    monkeypatch.setenv(envs.LM_HEAD, "1")
    monkeypatch.setenv("VLLM_W8A8_KERNEL", "torch")
    for mode in [*REFERENCES.values(), MODES["bf16"], Mode(served=Target(Path("x"), Kind.QUANTIZED))]:
        environment = quality.engine_environment(mode)
        assert envs.ENABLE not in environment
        assert envs.HADAMARD not in environment
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
        (
            {"dtype": "bfloat16", "quantization": "w8a8", "kv_cache_dtype": "auto"},
            "kv-int8",
            "vLLM ran it with kv_cache_dtype auto, expected int8_per_token_head",
        ),
    ],
)
def test_what_ran_is_what_was_asked_for(report: dict, mode: str, message: str | None) -> None:
    if message is None:
        quality._check_report(report, MODES[mode], "")
    else:
        with pytest.raises(quality.EngineFailed, match=message):
            quality._check_report(report, MODES[mode], "")


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


def test_a_running_process_is_looked_at() -> None:
    seen = []
    assert quality._run(["sleep", "1.2"], dict(os.environ), 30, lambda: seen.append(0))[0] == 0
    assert len(seen) >= 2


def test_progress_comes_from_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the engine's process: reads the job, counts prompts in a file, and leaves scores and a report."""
    target, tokenizer = Target.find(model), load_tokenizer(model)
    job = Job(target, make_prompts(tokenizer, read_texts([]), tokens=30), tokenizer)
    told = []

    def run(command: list[str], env: dict, timeout_s: float, look: Callable[[], None]) -> tuple[int, str]:
        job_file, scores_file, report_file = map(Path, command[-3:])
        asked = json.loads(job_file.read_text())
        assert asked["engine"]["model"] == str(model)
        look()
        for _ in asked["prompts"]:
            with open(asked["progress"], "ab") as progress:
                progress.write(b".")
            look()
        scores(logits(0, 300), truth(300), 300).save(scores_file)
        report_file.write_text(json.dumps({"dtype": "bfloat16", "quantization": None}))
        return 0, ""

    monkeypatch.setattr(quality, "_run", run)
    found, report = quality.score(job, MODES["bf16"], told.append)
    assert told == [1, 2, 3]
    assert len(found) == POSITIONS
    assert report["dtype"] == "bfloat16"


class Engines:
    """Stands in for the engines: answers by mode, and remembers who was asked."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.fails: dict[str, BaseException] = {}

    def __call__(self, job: Job, mode: Mode, tell: Callable[[int], None]) -> tuple[Scores, dict]:
        registry = {**{f"reference {name}": m for name, m in REFERENCES.items()}, **MODES}
        known = [name for name, other in registry.items() if other is mode]
        (name,) = known or [mode.served.name]
        self.ran.append(name)
        tell(1)
        if name in self.fails:
            raise self.fails[name]
        positions = job.prompts.positions
        p = torch.randn(positions, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        noise = torch.randn(positions, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        q = p if name.startswith("reference") else p + (0.01 if name == "bf16" else 0.3) * noise
        return scores(q, torch.zeros(positions, dtype=torch.int64), 256), {
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
        arguments = [str(model), "--tokens", "30", *arguments, "--out", str(tmp_path / "out")]
        return CliRunner().invoke(cli.app, ["eval", *arguments], env={"COLUMNS": "120"})

    return run


def content(tmp_path: Path, file: str = "eval.json") -> dict:
    return json.loads((tmp_path / "out" / file).read_text())


def cells(tmp_path: Path) -> dict[tuple[str, str], dict]:
    return {(c["mode"], c["reference"]): c for c in content(tmp_path)["cells"]}


def test_result_file(command: Callable[..., Result], engines: Engines, tmp_path: Path) -> None:
    result = command("--mode", "bf16", "--mode", "rtn", "--reference", "fp32", "--reference", "bf16", "--name", "tiny")
    assert result.exit_code == 0, result.output
    assert engines.ran == ["reference fp32", "reference bf16", "bf16", "rtn"]
    assert str(tmp_path / "out" / "eval.json") in result.output.splitlines()
    head = content(tmp_path)
    assert (head["model"], head["against"], head["commit"]) == ("tiny", "Tiny-1B", "abc")
    assert head["versions"]["vllm"] == "0.32.0"
    assert head["texts"]["code"]["positions"] == 29
    assert list(cells(tmp_path)) == [(m, r) for m in ("bf16", "rtn") for r in ("fp32", "bf16")]
    cell = cells(tmp_path)["rtn", "fp32"]
    assert {"ppl", "ppl_ref", "kl_mean", "kl_p99", "top1", "top5"} <= cell.keys()
    assert cell["positions"] == 87
    assert cell["kl_mean"] == pytest.approx(np.mean([text["kl_mean"] for text in cell["texts"].values()]), rel=1e-4)
    assert list(cell["texts"]) == list(TEXTS)
    assert cells(tmp_path)["bf16", "fp32"]["kl_mean"] < 0.01 * cell["kl_mean"]


def test_worst_positions(command: Callable[..., Result], engines: Engines, model: Path, tmp_path: Path) -> None:
    assert command("--mode", "rtn").exit_code == 0
    (cell,) = content(tmp_path)["cells"]
    prompts = make_prompts(load_tokenizer(model), read_texts([]), tokens=30)
    (p, _), (q, _) = (engines(SimpleNamespace(prompts=prompts), mode, id) for mode in (REFERENCES["fp32"], MODES["rtn"]))
    kl = divergence(p, q, 512).kl
    assert len(cell["worst"]) == quality.WORST
    assert [place["kl"] for place in cell["worst"]] == pytest.approx(np.sort(kl)[::-1][: quality.WORST], rel=1e-3)
    worst, at = cell["worst"][0], int(kl.argmax())
    text = read_text(worst["text"])[:30]
    assert worst["context"] + worst["next"] == text[: worst["token"] + 1][-len(worst["context"]) - 1 :]
    tokenizer = load_tokenizer(model)
    assert worst["reference_top"] == prompting.continuation(tokenizer, [], int(p.token_ids[at, 0]))
    assert worst["top"] == prompting.continuation(tokenizer, [], int(q.token_ids[at, 0]))
    assert worst["top_p"] == pytest.approx(np.exp(q.logprobs[at, 0]), rel=1e-3)
    groups = cell["kl_by_index"]
    assert groups["first"] == [1, 11, 21]
    assert groups["mean"][2] == pytest.approx(kl.reshape(3, 29)[:, 20:].mean(), rel=1e-3)
    assert groups["p99"][0] == pytest.approx(np.percentile(kl.reshape(3, 29)[:, :10], 99), rel=1e-3)
    assert sum(cell["differences"]["counts"]) == 87


def test_histogram() -> None:
    values = np.random.default_rng(0).normal(size=5000)
    values[0] = 100.0
    found = histogram(values, bins=5)
    edges, counts = found["edges"], found["counts"]
    assert 3 <= edges[-1] <= 4, "one value far out does not spread the bins"
    assert edges == [-edge for edge in reversed(edges)]
    assert sum(counts) == 5000
    assert counts[2] == ((edges[2] <= values) & (values < edges[3])).sum()
    assert histogram(np.zeros(9))["counts"][25] == 9


def test_default_folder(
    command: Callable[..., Result], engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["eval", "Tiny-1B", "--tokens", "30", "--mode", "bf16"])
    assert result.exit_code == 0, result.output
    assert {"eval.json", "eval.md"} <= {file.name for file in (tmp_path / "eval-tiny-1b").iterdir()}


def test_own_texts(command: Callable[..., Result], engines: Engines, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("words and words, again and again\n" * 4)
    assert command("--mode", "rtn", "--text", str(file)).exit_code == 0
    assert list(content(tmp_path)["texts"]) == ["mine"]
    assert (content(tmp_path)["cells"][0]["positions"]) == 29


def test_goes_on_where_it_stopped(command: Callable[..., Result], engines: Engines, tmp_path: Path) -> None:
    engines.fails["rtn"] = KeyboardInterrupt()
    result = command("--mode", "bf16", "--mode", "rtn")
    assert result.exit_code == 130
    assert "interrupted: what was measured is in" in result.output
    files = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert [Path(name).suffix for name in files] == [".npz", ".json"]
    assert all(name.startswith("eval.partial.") for name in files), "nothing looks finished"
    (first,) = content(tmp_path, "eval.partial.json")["cells"]
    engines.fails.clear()
    engines.ran.clear()
    assert command("--mode", "bf16", "--mode", "rtn").exit_code == 0
    assert engines.ran == ["rtn"]
    assert cells(tmp_path)["bf16", "fp32"] == first
    assert not list((tmp_path / "out").glob("*partial*"))
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
    assert not (tmp_path / "out").exists()


def figures_of(tmp_path: Path) -> list[dict]:
    return [{key: value for key, value in cell.items() if key != "seconds"} for cell in content(tmp_path)["cells"]]


def test_an_interrupted_mode_does_not_lose_the_reference(
    command: Callable[..., Result], engines: Engines, tmp_path: Path
) -> None:
    arguments = ("--mode", "bf16", "--reference", "fp32", "--reference", "bf16")
    assert command(*arguments).exit_code == 0
    expected = figures_of(tmp_path)
    shutil.rmtree(tmp_path / "out")
    for stopped, ran in (("reference bf16", ["reference fp32", "reference bf16"]), ("bf16", ["reference bf16", "bf16"])):
        engines.ran.clear()
        engines.fails = {stopped: KeyboardInterrupt()}
        result = command(*arguments)
        assert result.exit_code == 130
        assert engines.ran == ran
        kept = [str(file) for file in sorted((tmp_path / "out").iterdir())]
        assert all(Path(file).name.startswith("eval.partial.") for file in kept)
        said = f"interrupted: what was measured is in {', '.join(kept)}, the same command goes on from there"
        assert result.output.splitlines()[-1] == said
    engines.ran.clear()
    engines.fails = {}
    result = command(*arguments)
    assert "reference fp32: already there" in result.output
    assert engines.ran == ["bf16"]
    assert figures_of(tmp_path) == expected
    assert not list((tmp_path / "out").glob("*partial*"))


@pytest.mark.parametrize("change", ["tokens", "support", "engine", "commit", "model", "force", "damaged"])
def test_a_reference_of_something_else_is_not_taken(
    change: str, command: Callable[..., Result], engines: Engines, model: Path, tmp_path: Path
) -> None:
    engines.fails["bf16"] = KeyboardInterrupt()
    command("--mode", "bf16")
    engines.ran.clear()
    engines.fails.clear()
    arguments = {
        "tokens": ["--tokens", "31"],
        "support": ["--support", "64"],
        "engine": ["--engine", '{"max_num_seqs": 2}'],
        "commit": ["--commit", "def"],
        "force": ["--force"],
    }
    if change == "model":
        (model / "model.safetensors").write_bytes(b"other weights")
    if change == "damaged":
        (kept,) = (tmp_path / "out").glob("*.npz")
        os.truncate(kept, 100)
    assert command("--mode", "bf16", *arguments.get(change, [])).exit_code == 0
    assert engines.ran == ["reference fp32", "bf16"]
    assert not list((tmp_path / "out").glob("*partial*"))


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
    assert content(tmp_path)["failed"] == []


def test_stock_modes_may_be_missing(command: Callable[..., Result], engines: Engines, tmp_path: Path) -> None:
    engines.fails["fp8"] = quality.EngineFailed("RuntimeError: no fp8 here", "")
    assert command("--mode", "fp8", "--mode", "bf16").exit_code == 0
    reason = {"mode": "fp8", "reason": "RuntimeError: no fp8 here"}
    assert content(tmp_path)["failed"] == [reason]
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
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "eval.json").write_text('["mine"]')
    result = command("--mode", "bf16", "--force")
    assert result.exit_code == 1
    assert "is no result of this command: name another folder with --out" in result.output
    assert (tmp_path / "out" / "eval.json").read_text() == '["mine"]'


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "fp4"], f"unknown mode 'fp4': expected one of {', '.join(MODES)};"),
        (["--mode", "checkpoint"], "mode 'checkpoint' serves a quantized folder as it is"),
        (
            ["--mode", "kv-int8"],
            "mode 'kv-int8' keeps the KV cache in int8 (int8_per_token_head), which vLLM does on GPUs",
        ),
        (["--mode", "tp-consistent"], "mode 'tp-consistent' changes nothing on one rank: add --engine"),
        (["--against", "/none"], "--against /none: there is no such folder"),
        (["--text", "/none.txt"], "--text /none.txt cannot be read: No such file or directory"),
        (["--checkpoint", "rotate"], "--checkpoint 'rotate': expected NAME=PATH"),
        (["--checkpoint", "rtn=elsewhere"], "there already is a mode 'rtn', choose another name"),
        (["--checkpoint", "rotate=/none"], "--checkpoint 'rotate=/none': there is no such folder"),
        (["--tokens", "100000"], "text 'english' is too short: 10240 tokens in this model, --tokens asks for 100000"),
        (["--tokens", "1"], "--tokens 1: expected at least 2"),
        (["--engine", "x"], "--engine 'x': expected a JSON object with arguments of vllm.LLM"),
    ],
)
def test_one_line_errors_before_any_engine(
    arguments: list[str],
    message: str,
    command: Callable[..., Result],
    engines: Engines,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quality_command, "_has_gpu", lambda: False)
    result = command(*arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert engines.ran == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "mine.txt is empty: expected a text"),
        (b" \n", "mine.txt is empty: expected a text"),
        (b"\xff\xfe", "mine.txt is not UTF-8"),
    ],
)
def test_wrong_texts(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_texts([tmp_path / "mine.txt"])


def test_texts_need_different_names(tmp_path: Path) -> None:
    files = [tmp_path / "a.txt", tmp_path / "a.md"]
    for file in files:
        file.write_text("words")
    with pytest.raises(ValueError, match="another text is called 'a', too"):
        read_texts(files)


def test_kv_int8_needs_a_gpu(model: Path) -> None:
    assert list(choose_modes(["kv-int8"], [], Target.find(model), gpu=True)) == ["kv-int8"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no folder", "there is no such folder"),
        ("no config", "the folder has no config.json"),
        ("no JSON", "Tiny-1B/config.json is not JSON: Expecting"),
        ("no object", "Tiny-1B/config.json holds no JSON object"),
        ("no tokenizer", "has no tokenizer.json"),
        ("broken tokenizer", "tokenizer.json cannot be read"),
        ("quantized", "is quantized: name the unquantized model's folder with --against"),
        ("quantized reference", "is quantized: expected the unquantized model that others are measured by"),
        ("GGUF", "model.gguf is a GGUF file: name the unquantized model's folder (`vllm-w8a8 convert"),
        ("GGUF reference", "model.gguf is a GGUF file, which vLLM runs quantized alone: make a folder of it"),
        ("no GGUF", "model.gguf does not exist"),
        (
            "other tokenizer",
            "other has another vocabulary than the reference (255 and 256 tokens; text 'english' differs from",
        ),
    ],
)
def test_wrong_models(what: str, message: str, model: Path, engines: Engines, tmp_path: Path) -> None:
    arguments = [str(model), "--mode", "bf16", "--tokens", "30", "--out", str(tmp_path / "out")]
    quantized = {"quantization_config": {"quant_method": "w8a8"}}
    if what == "no folder":
        arguments[0] = str(tmp_path / "none")
    elif what == "no config":
        (model / "config.json").unlink()
    elif what in ("no JSON", "no object"):
        (model / "config.json").write_text('{"a": ' if what == "no JSON" else "[]")
    elif what == "no tokenizer":
        (model / "tokenizer.json").unlink()
    elif what == "broken tokenizer":
        (model / "tokenizer.json").write_text("{}")
    elif what == "quantized":
        (model / "config.json").write_text(json.dumps(quantized))
    elif what == "quantized reference":
        arguments += ["--against", str(make_model(tmp_path / "int8", quantized))]
    elif "GGUF" in what:
        file = tmp_path / "model.gguf"
        if what != "no GGUF":
            file.touch()
        arguments += ["--against", str(file)] if what == "GGUF reference" else []
        arguments[0] = str(file) if what != "GGUF reference" else arguments[0]
    else:
        other = make_model(tmp_path / "other")
        make_tokenizer(other / "tokenizer.json", without="e")
        arguments += ["--checkpoint", f"rotate={other}"]
    result = CliRunner().invoke(cli.app, ["eval", *arguments])
    assert result.exit_code == 1
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert engines.ran == []


def swap_tokens(file: Path, *names: str) -> None:
    """Two tokens of a vocabulary have each other's number."""
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[names[0]], vocabulary[names[1]] = vocabulary[names[1]], vocabulary[names[0]]
    file.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("how", ["unquantized", "quantized", "checkpoint"])
def test_vocabularies_that_differ_where_the_text_does_not(how: str, model: Path, engines: Engines, tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "w8a8"}} if how == "quantized" else {}
    other = make_model(tmp_path / "other", config)
    swap_tokens(other / "tokenizer.json", "\u00ff", "\u00f5")  # bytes that no UTF-8 has
    arguments = [str(other), "--against", str(model)]
    if how == "checkpoint":
        arguments = [str(model), "--checkpoint", f"mine={other}"]
    result = CliRunner().invoke(cli.app, ["eval", *arguments, "--tokens", "30", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    (line,) = result.output.strip().splitlines()
    assert f"{other} has another vocabulary than the reference (2 of 256 tokens differ; token " in line
    assert "is '\u00ff', the reference's is '\u00f5')" in line
    assert "Expected the model that it was made from" in line
    assert engines.ran == []
    assert not (tmp_path / "out").exists()


def test_special_tokens_may_be_renamed_and_vocabularies_padded(tmp_path: Path) -> None:
    folders = [make_model(tmp_path / name, special=name) for name in ("<s>", "<start>")]
    tokenizers = [load_tokenizer(folder) for folder in folders]
    tokenizers[1].add_tokens(["[PAD257]"])
    prompting.check_same_vocabulary(*tokenizers, read_texts([]), "other")
    prompting.check_same_vocabulary(*reversed(tokenizers), read_texts([]), "other")


def test_another_unquantized_model_is_measured_itself(model: Path, engines: Engines, tmp_path: Path) -> None:
    """Not the reference under its name."""
    other = make_model(tmp_path / "rotated")
    target, reference = Target.find(other), Target.find(model)
    assert {mode.served for mode in choose_modes([], [], target, reference=reference).values()} == {target}
    link = tmp_path / "link"
    link.symlink_to(other)
    assert {mode.served for mode in choose_modes([], [], target, reference=Target.find(link)).values()} == {None}
    arguments = [str(other), "--against", str(model), "--mode", "bf16", "--tokens", "30", "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(cli.app, ["eval", *arguments]).exit_code == 0
    assert engines.ran == ["reference fp32", "rotated"]
    assert content(tmp_path)["cells"][0]["fingerprint"] == target.fingerprint()


def test_results_are_written_whole(tmp_path: Path) -> None:
    results = Results.open(tmp_path / "deep" / "out", {"model": "m"})
    results.add({"mode": "bf16", "reference": "fp32", "texts": {}})
    assert [file.name for file in results.folder.iterdir()] == ["eval.partial.json"]
    assert Results.open(results.folder, {"model": "m"}).cells == results.cells
    results.finish()
    assert [file.name for file in results.folder.iterdir()] == ["eval.json"]
    assert Results.open(results.folder, {"model": "m"}).cells == results.cells
    with pytest.raises(ValueError, match="is a file: name a folder with --out"), quality.alone(results.file):
        pass


def test_positions_of_texts() -> None:
    prompts = Prompts([], 1, {"a": (1, 3), "b": (2, 5)}, {})
    assert list(prompts.slices()) == [("a", slice(0, 3)), ("b", slice(3, 8))]


def test_help_names_every_mode() -> None:
    said = CliRunner().invoke(cli.app, ["eval", "--help"], env={"COLUMNS": "200"}).output
    assert all(name in said for name in MODES)


CONTENT = {
    "model": "A|B",
    "against": "C",
    "versions": {"vllm": "0.32.0", "triton": None},
    "commit": "abc",
    "settings": {"chunk": 250, "support": 512, "engine": {"tensor_parallel_size": 2}, "environment": {}},
    "texts": {"one": {"positions": 10}, "two": {"positions": 20}},
    "cells": [],
    "failed": [{"mode": "fp8", "reason": "no | fp8"}],
}


def synthetic(mode: str, difference: float) -> dict:
    """A cell as `quality.cell` makes it."""
    values = {"ppl": 11.0, "ppl_ratio": 1.1, "kl_mean": 0.01, "kl_p99": 0.2, "top1": 0.9, "top5": 0.95}
    place = {"text": "one", "token": 4, "context": "a `b`\n|c", "next": " d", "kl": 1.5}
    tops = {"reference_top": "\x1b[2J", "reference_top_p": 0.5, "top": "``f``", "top_p": 0.25}
    return {
        "mode": mode,
        "reference": "fp32",
        **values,
        "texts": {"one": values, "two": values},
        "worst": [place | tops],
        "kl_by_index": {"first": [1, 11], "mean": [0.01, 0.02], "p99": [0.1, 0.3]},
        "differences": histogram(difference * np.linspace(-1, 1, 100)),
        "device": "CPU",
    }


def test_markdown() -> None:
    said = quality_report.markdown(CONTENT | {"cells": [synthetic("rtn", 1.0)]}, "eval.png").splitlines()
    assert said[0] == "# What quantization costs: A\\|B against C"
    assert "| rtn | fp32 | all | 11.000 | 1.1000 | 0.01000 | 0.2000 | 90.0 % | 95.0 % |" in said
    assert "|  |  | two | 11.000 | 1.1000 | 0.01000 | 0.2000 | 90.0 % | 95.0 % |" in said
    assert any(line.startswith("![") and line.endswith("(eval.png)") for line in said)
    assert '- fp8: `"no \\| fp8"`' in said
    worst = '| one | 4 | 1.500 | ``"a `b`\\n\\|c"`` | `" d"` | `"\\x1b[2J"` 50 % | ```"``f``"``` 25 % |'
    assert worst in said
    columns = {line.replace("\\|", "").count("|") for line in said if line.startswith("| text") or line == worst}
    assert columns == {8}
    assert "one (10 positions), two (20 positions)" in "".join(said)
    assert "vllm 0.32.0. Commit: abc" in "".join(said)
    assert "{'tensor_parallel_size': 2}" in "".join(said)


def test_table_of_a_narrow_terminal() -> None:
    """Names of modes and figures are whole in 80 columns; a long name is broken, not cut."""
    long = "a-checkpoint-of-my-own-with-a-long-name"
    cells = [synthetic(mode, 1.0) for mode in ("checkpoint", "tp-consistent", long)]
    cells[0] |= {"texts": dict.fromkeys(("english", "code", "chinese"), cells[0]["texts"]["one"])}
    console = Console(width=80, file=io.StringIO())
    console.print(quality_report.table(CONTENT | {"cells": cells}))
    said = console.file.getvalue()
    lines = [line.split() for line in said.splitlines()]
    figures = ["11.000", "1.1000", "0.01000", "0.2000", "90.0", "%", "95.0", "%"]
    assert ["checkpoint", "fp32", "all", *figures] in lines
    assert ["chinese", *figures] in lines
    assert ["tp-consistent", "fp32", "all", *figures] in lines
    assert "\u2026" not in said
    assert long in "".join(line[0] for line in lines[lines.index(["tp-consistent", "fp32", "all", *figures]) + 3 :])


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: `make test` installs it")
    from matplotlib.image import imread

    sizes = {}
    for modes in ((), ("rtn",)):
        cells = [synthetic("bf16", 0.1), *(synthetic(mode, 1.0) for mode in modes)]
        assert quality_report.plot(CONTENT | {"cells": cells}, tmp_path / f"{len(cells)}.png")
        picture = imread(tmp_path / f"{len(cells)}.png")[..., :3]
        # Colours of the lines: blue is the first mode's, orange the second's.
        sizes[len(cells)] = int(((picture[..., 0] > 0.9) & (picture[..., 2] < 0.2)).sum())
    assert sizes[1] == 0
    assert sizes[2] >= 500
    assert sorted(file.name for file in tmp_path.iterdir()) == ["1.png", "2.png"]


def test_without_matplotlib_there_is_no_plot(
    command: Callable[..., Result], engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "matplotlib_figures", lambda: None)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "eval.png").write_bytes(b"older figures")
    result = command("--mode", "bf16")
    assert result.exit_code == 0, result.output
    assert f"note: no plot, as matplotlib is not installed: {plots.INSTALL}" in result.output
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["eval.json", "eval.md"]
    assert "![" not in (tmp_path / "out" / "eval.md").read_text()


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with quality.alone(folder):
        with pytest.raises(ValueError, match=r"another run writes to .*out: wait until it ends"), quality.alone(folder):
            pass
        (folder / quality.RESULT).touch()
    assert [file.name for file in folder.iterdir()] == [quality.RESULT]
    with quality.alone(tmp_path / "nothing"):
        pass
    assert not (tmp_path / "nothing").exists()


def test_a_reference_of_other_settings_is_not_named_as_kept(tmp_path: Path) -> None:
    (tmp_path / "eval.partial.fp32-0123456789abcdef.npz").touch()
    assert Results(tmp_path, {"model": "a", "fingerprint": "b"}).unfinished() == []


def test_few_positions_are_said_to_be_few() -> None:
    content = {"model": "m", "against": "m", "cells": [], "failed": [], "versions": {}, "commit": None}
    content |= {"settings": {"chunk": 250, "support": 512, "engine": {}, "environment": {}}}
    for positions, few in ((999, True), (1000, False)):
        said = quality_report.markdown(content | {"texts": {"english": {"positions": positions}}})
        assert (f"Only {positions} positions were scored" in said) == few
