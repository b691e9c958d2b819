"""A GGUF file as vLLM's model: what the engine's arguments become, which tensors are loaded, what is refused and how."""

import functools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf as library
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from typer.testing import CliRunner

pytest.importorskip("vllm", reason="vLLM is not installed: `make test` installs it")

from vllm_w8a8_plugin import cli, envs, gguf, registration

HIDDEN, INNER, HEADS, LAYERS = 32, 48, 4, 2
TOKENS = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll"]
METADATA = {
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": len(TOKENS),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [library.TokenType.CONTROL] + [library.TokenType.NORMAL] * (len(TOKENS) - 1),
    "tokenizer.ggml.merges": ["h e", "l l"],
    "tokenizer.ggml.eos_token_id": 0,
}
# GGUF name after `blk.N.` -> (Hugging Face name after `model.layers.N.`, shape)
NAMES = {
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "attn_q": ("self_attn.q_proj", (HIDDEN, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (HIDDEN, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (HIDDEN, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HIDDEN)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
    "ffn_gate": ("mlp.gate_proj", (INNER, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (INNER, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, INNER)),
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in envs.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv(envs.CACHE_DIR, str(tmp_path / "cache"))


def write(path: Path, architecture: str = "llama", seed: int = 0, **changed: Any) -> Path:
    """A tiny random Llama in fp32. Metadata are merged over `METADATA`."""
    writer = library.GGUFWriter(path, architecture)
    for key, value in {**METADATA, **changed}.items():
        adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        adders.get(type(value), writer.add_array)(key, value)
    generator = np.random.default_rng(seed)
    writer.add_tensor("token_embd.weight", generator.standard_normal((len(TOKENS), HIDDEN), np.float32))
    writer.add_tensor("output_norm.weight", generator.standard_normal(HIDDEN, np.float32))
    for layer in range(LAYERS):
        for name, (_, shape) in NAMES.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", generator.standard_normal(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "tiny.gguf")


def arguments(model: Path | str, **given: Any) -> Any:
    from vllm import EngineArgs

    return EngineArgs(model=str(model), **{"quantization": "w8a8", "enforce_eager": True} | given)


def fake_config(file: Path, dtype: torch.dtype = torch.bfloat16) -> SimpleNamespace:
    """What the loader reads of vLLM's ModelConfig."""
    folder = gguf.metadata_folder(file)
    return SimpleNamespace(model=str(folder), model_weights=str(file), hf_config_path=None, dtype=dtype)


def loader() -> Any:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    gguf.register_loader()
    return get_model_loader(LoadConfig(load_format=gguf.LOAD_FORMAT))


def stored(file: Path) -> dict[str, torch.Tensor]:
    tensors = library.GGUFReader(file).tensors
    return {t.name: torch.tensor(t.data).reshape(tuple(reversed(t.shape.tolist()))) for t in tensors}


@pytest.mark.parametrize("asked", ["quantization", "variable"])
def test_the_engine_reads_config_and_tokenizer_from_the_metadata(
    file: Path, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if asked == "variable":
        monkeypatch.setenv(envs.ENABLE, "1")
    monkeypatch.chdir(file.parent)
    config = arguments("tiny.gguf", quantization="w8a8" if asked == "quantization" else None).create_engine_config()
    model = config.model_config
    assert model.quantization == "w8a8"
    assert model.dtype == torch.bfloat16
    assert model.served_model_name == "tiny.gguf"
    assert model.model_weights == str(file)
    assert config.load_config.load_format == gguf.LOAD_FORMAT
    assert model.hf_config.num_hidden_layers == LAYERS
    assert Path(model.model).parent == file.parent / "cache" / "gguf"
    assert Path(model.model) == Path(model.tokenizer)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(model.tokenizer)("hell").input_ids == [TOKENS.index("he"), TOKENS.index("ll")]


def test_the_users_choices_win(tmp_path: Path) -> None:
    """Then it does not matter that the file's own tokenizer cannot be read, neither here nor where weights are loaded."""
    file = write(tmp_path / "odd.gguf", **{"tokenizer.ggml.pre": "nonesuch"})
    other = gguf.metadata_folder(write(tmp_path / "other.gguf", **{"llama.context_length": 64}))
    args = arguments(file, hf_config_path=str(other), tokenizer=str(other), dtype="float16", served_model_name="tiny")
    model = args.create_model_config()
    assert (model.max_model_len, model.tokenizer) == (64, str(other))
    assert (model.dtype, model.served_model_name) == (torch.float16, "tiny")
    assert model.model_weights == str(file)
    assert len(list(loader().get_all_weights(model, torch.nn.Module()))) == 2 + LAYERS * len(NAMES)
    with pytest.raises(ValueError, match="nonesuch"):
        arguments(file).create_model_config()


def test_each_file_has_a_hash_of_its_own(file: Path, tmp_path: Path) -> None:
    """vLLM's compile cache goes by it; the folder made of equal metadata is the same."""
    files = file, write(tmp_path / "other.gguf", seed=1), file
    configs = [arguments(path).create_engine_config() for path in files]
    one, other, again = (config.compute_hash() for config in configs)
    assert one == again != other
    assert len({config.model_config.model for config in configs}) == 1


def test_not_asked_changes_nothing(file: Path) -> None:
    args = arguments(file, quantization=None)
    before = dict(vars(args))
    gguf.resolve(args)
    assert vars(args) == before
    with pytest.raises(Exception, match=r"tiny\.gguf") as error:
        args.create_engine_config()
    assert "vllm_w8a8_plugin" not in str(error.traceback[-1].path)
    assert not (file.parent / "cache").exists()


def test_other_models_are_left_alone(file: Path) -> None:
    args = arguments(gguf.metadata_folder(file))
    before = dict(vars(args))
    gguf.resolve(args)
    assert vars(args) == before


REFUSED: dict[str, tuple[Callable[[Path], dict], str]] = {
    "missing": (lambda tmp: {"model": tmp / "missing.gguf"}, r"missing\.gguf does not exist"),
    "folder": (lambda tmp: {"model": tmp}, r"without config\.json: give a GGUF file of it, as .*/tiny\.gguf$"),
    "several": (
        lambda tmp: {"model": write(tmp / "b.gguf").parent},
        r"as .*/b\.gguf \(it holds b\.gguf, tiny\.gguf\)",
    ),
    "vision tower": (lambda tmp: {"model": write(tmp / "mmproj.gguf", "clip")}, r"mmproj\.gguf is the vision tower"),
    "architecture": (lambda tmp: {"model": write(tmp / "new.gguf", "nonesuch")}, r"new\.gguf.*'nonesuch'"),
    "part": (
        lambda tmp: {
            "model": write(tmp / "x-00001-of-00002.gguf", **{"split.count": 2, "split.no": 0, "split.tensors.count": 40})
        },
        r"x-00001-of-00002\.gguf",
    ),
    "no GGUF": (lambda tmp: {"model": damaged(tmp)}, r"damaged\.gguf"),
    "zeros": (lambda tmp: {"model": filled_up(tmp)}, r"blk\.0\.ffn_gate\.weight of .*cut\.gguf holds nothing but zeros"),
    "load format": (lambda tmp: {"model": tmp / "tiny.gguf", "load_format": "dummy"}, "leave --load-format out"),
    "draft": (
        lambda tmp: {
            "model": tmp / "tiny.gguf",
            "speculative_config": {"model": "draft.gguf", "num_speculative_tokens": 2},
        },
        r"the draft model draft\.gguf is a GGUF file",
    ),
    "draft of a folder": (
        lambda tmp: {
            "model": gguf.metadata_folder(tmp / "tiny.gguf"),
            "speculative_config": {"model": "draft.gguf", "num_speculative_tokens": 2},
        },
        r"the draft model draft\.gguf is a GGUF file",
    ),
    "draft in the model": (
        lambda tmp: {"model": tmp / "tiny.gguf", "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
        "speculative method mtp",
    ),
}


def damaged(folder: Path) -> Path:
    (folder / "damaged.gguf").write_bytes(b"GGUF but not really")
    return folder / "damaged.gguf"


def filled_up(folder: Path) -> Path:
    """A file whose second half is zeros."""
    data = write(folder / "cut.gguf").read_bytes()
    (folder / "cut.gguf").write_bytes(data[: len(data) // 2].ljust(len(data), b"\0"))
    return folder / "cut.gguf"


@pytest.mark.usefixtures("file")
@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line_in_the_front_process(case: str, tmp_path: Path) -> None:
    given, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as error:
        arguments(**given(tmp_path)).create_engine_config()
    assert "\n" not in str(error.value)


def test_missing_file_offline(tmp_path: Path) -> None:
    """vLLM then takes it for a name on the Hub, as the first thing of all."""
    code = "from vllm import EngineArgs; import sys; EngineArgs(model=sys.argv[1], quantization='w8a8')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "missing.gguf")],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stderr.strip().splitlines()[-1].endswith("missing.gguf does not exist: give the path of a GGUF file")


def test_a_damaged_folder_is_mended(file: Path) -> None:
    folder = gguf.metadata_folder(file)
    content = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert content.keys() >= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    (folder / "config.json").unlink()
    (folder / "tokenizer.json").write_text("{")
    assert gguf.metadata_folder(file) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == content


def test_many_make_the_same_folder(file: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(gguf.metadata_folder, [file] * 16))
    (folder,) = folders
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_other_metadata_make_another_folder(file: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.gguf", **{"llama.rope.freq_base": 500000.0})
    assert gguf.metadata_folder(file) != gguf.metadata_folder(other)


def test_a_cache_that_cannot_be_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.CACHE_DIR, str(file))  # a file, not a folder
    with pytest.raises(ValueError, match=f"set {envs.CACHE_DIR} to a folder that can be"):
        gguf.metadata_folder(file)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_are_rounded_once(file: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_w8a8_plugin import gguf_loader

    monkeypatch.setattr(gguf_loader, "_BLOCK_BYTES", 4 * 5 * HIDDEN)  # rows by fives: none of the sizes is a multiple
    loaded = dict(loader().get_all_weights(fake_config(file, dtype), torch.nn.Module()))
    values = stored(file)
    expected = {
        "model.embed_tokens.weight": values["token_embd.weight"],
        "model.norm.weight": values["output_norm.weight"],
    }
    for layer in range(LAYERS):
        for name, (theirs, _) in NAMES.items():
            tensor = values[f"blk.{layer}.{name}.weight"]
            if name in ("attn_q", "attn_k"):  # the file holds the two halves of each head's rows in turn
                tensor = tensor.reshape(HEADS, HIDDEN // HEADS // 2, 2, HIDDEN).transpose(1, 2).reshape(HIDDEN, HIDDEN)
            expected[f"model.layers.{layer}.{theirs}.weight"] = tensor
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == dtype
        assert loaded[name].device.type == "cpu"
        assert torch.equal(loaded[name], tensor.to(dtype)), name


def test_other_weights_by_the_same_loader(file: Path, tmp_path: Path) -> None:
    """Those of a draft model and of a reload: a folder, or another GGUF file."""
    folder = tmp_path / "draft"
    folder.mkdir()
    save_file({"a": torch.arange(6.0)}, folder / "model.safetensors")
    config = fake_config(file)
    config.model, config.revision = str(folder), None  # what reload_weights does; 0.25.1 leaves model_weights as it is
    loaded = dict(loader().get_all_weights(config, torch.nn.Module()))
    assert loaded.keys() == {"a"}
    config.model, config.model_weights = str(write(tmp_path / "other.gguf", seed=3)), ""
    loaded = dict(loader().get_all_weights(config, torch.nn.Module()))
    assert torch.equal(loaded["model.norm.weight"], stored(tmp_path / "other.gguf")["output_norm.weight"].bfloat16())


def test_processes_that_vllm_spawns_know_the_loader(file: Path, tmp_path: Path) -> None:
    """They get the quantization config; nobody else pays for the loader's import."""
    config = arguments(file).create_engine_config()
    (tmp_path / "config.pickle").write_bytes(pickle.dumps(config.quant_config))
    code = """
import pickle, sys
import vllm_w8a8_plugin
vllm_w8a8_plugin.register()
before = "vllm.model_executor.model_loader" in sys.modules
pickle.load(open(sys.argv[1], "rb"))
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
print(before, type(get_model_loader(LoadConfig(load_format="w8a8_gguf"))).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "config.pickle")], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip().splitlines()[-1] == "False GGUFModelLoader", done.stderr


def other_plugin(create_model_config: Callable, seen: list[str]) -> Callable:
    """What vllm-gguf-plugin 0.0.5 makes of the method: it takes every GGUF file for its own."""

    @functools.wraps(create_model_config)
    def wrapped(self, *args, **kwargs):
        seen.append(self.model)
        if self.model.endswith(".gguf"):
            if self.quantization is None:
                self.quantization = "gguf"
            if self.load_format == "auto":
                self.load_format = "gguf"
            if self.config_format == "auto":
                self.config_format = "gguf"
            if not self.model_weights:
                self.model_weights = self.model
            if self.served_model_name is None:
                self.served_model_name = [self.model]
            self.model = str(Path(self.model).parent)
        return create_model_config(self, *args, **kwargs)

    return wrapped


@pytest.mark.parametrize("method", ["create_engine_config", "create_model_config"])
@pytest.mark.parametrize("order", ["ours last", "theirs last"])
def test_beside_vllm_gguf_plugin(file: Path, order: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import EngineArgs

    arguments(file)  # loads the plugins
    seen: list[str] = []
    original = EngineArgs.create_model_config
    theirs = other_plugin(original if order == "theirs last" else original.__wrapped__, seen)
    monkeypatch.setattr(EngineArgs, "create_model_config", theirs)
    registration._wrap_engine_args()
    registration._wrap_engine_args()
    config = getattr(arguments(file), method)()
    model = config if method == "create_model_config" else config.model_config
    assert len(seen) == 1
    assert (model.quantization, model.model_weights) == ("w8a8", str(file))
    assert gguf.is_metadata_folder(model.model)
    assert model.served_model_name == str(file)

    args = arguments(file, quantization=None)
    with pytest.raises(Exception, match="gguf"):  # nobody here knows their formats
        args.create_model_config()
    assert args.quantization == args.load_format == "gguf"


def serve(monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[list[str], Any]:
    """The command that `vllm-w8a8 serve` becomes, and its result."""
    became: list[str] = []
    monkeypatch.setattr(os, "execv", lambda path, command: became.extend(command))
    return became, CliRunner().invoke(cli.app, ["serve", *options])


def test_serve_runs_vllms_server(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, result = serve(monkeypatch, str(file), "--port", "80", "--help")
    assert result.exit_code == 0, result.output
    assert command[:2] == [sys.executable, "-m"]
    assert command[3:] == ["serve", str(file), "--quantization", "w8a8", "--port", "80", "--help"]


def test_serve_expands_the_home_folder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(file.parent))
    assert gguf.locate(f"~/{file.name}") == file
    command, result = serve(monkeypatch, f"~/{file.name}")
    assert result.exit_code == 0, result.output
    assert command[4] == str(file)


def test_serve_without_the_metadata_of_the_vllm_command(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def version(name: str) -> str:
        if name == "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    command, result = serve(monkeypatch, str(file.parent.parent), "--port", "80")
    assert result.exit_code == 0, result.output
    assert command[2:4] == ["vllm.entrypoints.openai.api_server", "--model"]
    assert command[5:] == ["--quantization", "w8a8", "--port", "80"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["missing.gguf"], "missing.gguf does not exist"),
        (["--port", "80", "tiny.gguf"], "--port: MODEL comes first"),
    ],
)
def test_serve_refuses_before_vllm_starts(monkeypatch: pytest.MonkeyPatch, options: list[str], message: str) -> None:
    command, result = serve(monkeypatch, *options)
    assert (result.exit_code, command) == (1, [])
    assert f"error: {message}" in result.output
