"""What comes out of a conversion, tensor by tensor and file by file."""

import errno
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from w8a8_converters import convert as converter
from w8a8_converters.convert import convert
from w8a8_converters.writer import ShardWriter
from w8a8_kernels.hadamard import block_size
from w8a8_kernels.quantize.weight import quantize_weight

PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def load(folder):
    """All tensors of a folder, read by the safetensors library."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def read_json(path):
    return json.loads(path.read_text())


def rounded(weight, fmt="w8a8"):
    """Codes and scale of a weight whose block does not depend on its layer's name, as all of the tiny model's."""
    return quantize_weight(weight, hadamard=block_size(weight.shape[1]) if fmt == "w8a8" else 0)


def module(name):
    return name.removesuffix(".weight")


@pytest.mark.parametrize("fmt", ["w8a8", "compressed-tensors"])
@pytest.mark.parametrize("shards", [1, 3])
def test_quantized_output(checkpoint, tmp_path, fmt, shards):
    src = checkpoint(shards=shards)
    before = load(src)
    report = convert(src, tmp_path / "out", format=fmt)
    after = load(tmp_path / "out")
    for name, tensor in before.items():
        if module(name).rpartition(".")[2] in PROJECTIONS:
            codes, scale = rounded(tensor, fmt)
            assert torch.equal(after.pop(name), codes), name
            stored_scale = after.pop(f"{name}_scale")
            assert stored_scale.dtype == torch.float32
            assert torch.equal(stored_scale, scale), name
        else:
            kept = after.pop(name)
            assert kept.dtype == tensor.dtype
            assert torch.equal(kept, tensor), name
    assert not after, "tensors that the source does not have"
    assert len(report.layers) == 14
    config = read_json(tmp_path / "out" / "config.json")
    assert config["quantization_config"]["quant_method"] == fmt
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert {**read_json(src / "config.json"), "quantization_config": config["quantization_config"]} == config


@pytest.mark.parametrize(("option", "entry"), [(None, 64), ("auto", 64), (0, 0), ("16", 16), (128, 128)])
def test_w8a8_config_is_the_documented_one(checkpoint, tmp_path, option, entry):
    convert(checkpoint(), tmp_path / "out", hadamard=option)
    expected = {
        "quant_method": "w8a8",
        "weight_dtype": "int8",
        "scale_dtype": "fp32",
        "hadamard": entry,
        "ignore": ["lm_head"],
    }
    assert read_json(tmp_path / "out" / "quant_config.json") == expected
    assert read_json(tmp_path / "out" / "config.json")["quantization_config"] == expected


DOWN, UP = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("option", "blocks"),
    [("auto", {DOWN: 32, UP: 64}), (0, {DOWN: 0, UP: 0}), (128, {DOWN: 128, UP: 64}), (16, {DOWN: 16, UP: 16})],
    ids=str,
)
def test_hadamard(checkpoint, tmp_path, option, blocks):
    """By the rule, or the largest up to a number that divide; the config says it so that no reader needs the rule."""
    tensors = {f"{DOWN}.weight": torch.randn(8, 256), f"{UP}.weight": torch.randn(8, 192)}
    src = checkpoint(tensors={name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})
    report = convert(src, tmp_path / "out", hadamard=option)
    before, after = load(src), load(tmp_path / "out")
    reported = {layer.name: layer.hadamard for layer in report.layers}
    for name, block in blocks.items():
        codes, scale = quantize_weight(before[f"{name}.weight"], hadamard=block)
        assert torch.equal(after[f"{name}.weight"], codes)
        assert torch.equal(after[f"{name}.weight_scale"], scale)
        assert reported[name] == block
    assert sum(report.hadamard_blocks().values()) == len(report.layers)
    config = read_json(tmp_path / "out" / "config.json")["quantization_config"]
    # The other layers' down_proj has 24 input features, for which no block fits.
    assert config.get("hadamard_blocks") == ({"down_proj": 32} if option == "auto" else None)
    assert read_json(tmp_path / "out" / "quant_config.json") == config


def test_hadamard_blocks_of_layers_that_share_a_name(checkpoint, tmp_path):
    """Under one last component blocks can differ so that no entry covers them: then full names stand in the config."""
    other = DOWN.replace("layers.0", "layers.1")
    tensors = {f"{DOWN}.weight": torch.randn(8, 256), f"{other}.weight": torch.randn(8, 512)}
    src = checkpoint(tensors={name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})
    report = convert(src, tmp_path / "out")
    assert {layer.name: layer.hadamard for layer in report.layers if "down" in layer.name} == {DOWN: 32, other: 64}
    assert read_json(tmp_path / "out" / "config.json")["quantization_config"]["hadamard_blocks"] == {DOWN: 32}


def test_compressed_tensors_config_is_what_its_library_reads(checkpoint, tmp_path):
    library = pytest.importorskip("compressed_tensors.quantization")
    convert(checkpoint(tied=True), tmp_path / "out", format="compressed-tensors")
    written = read_json(tmp_path / "out" / "config.json")["quantization_config"]
    parsed = library.QuantizationConfig.model_validate(written)
    scheme = parsed.config_groups["group_0"]
    preset = library.preset_name_to_scheme("INT8", ["Linear"])
    for ours, theirs in ((scheme.weights, preset.weights), (scheme.input_activations, preset.input_activations)):
        for key in ("num_bits", "type", "symmetric", "strategy", "dynamic"):
            assert getattr(ours, key) == getattr(theirs, key), key
    assert parsed.format == "int-quantized"
    assert parsed.ignore == ["lm_head"]
    assert not (tmp_path / "out" / "quant_config.json").exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_bf16_output(checkpoint, tmp_path, dtype):
    src = checkpoint(dtype=dtype)
    before = load(src)
    report = convert(src, tmp_path / "out", format="bf16")
    after = load(tmp_path / "out")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor.to(torch.bfloat16)), name
    config = read_json(tmp_path / "out" / "config.json")
    assert "quantization_config" not in config
    assert config["torch_dtype"] == "bfloat16"
    assert (report.layers, report.ignore) == ([], [])


def test_fp32_checkpoint_is_rounded_to_its_config_dtype_first(checkpoint, tmp_path):
    """So that quantizing the checkpoint and quantizing while loading it in its dtype give the same codes."""
    src = checkpoint(dtype=torch.float32)
    before = load(src)
    convert(src, tmp_path / "out")
    after = load(tmp_path / "out")
    name = "model.layers.0.mlp.down_proj.weight"
    codes, scale = quantize_weight(before[name].to(torch.bfloat16))
    assert torch.equal(after[name], codes)
    assert torch.equal(after[f"{name}_scale"], scale)
    assert after["model.norm.weight"].dtype == torch.bfloat16


def test_fp32_checkpoint_with_fp32_config_is_quantized_as_it_is(checkpoint, tmp_path):
    src = checkpoint(dtype=torch.float32, config={"torch_dtype": "float32"})
    before = load(src)
    convert(src, tmp_path / "out")
    after = load(tmp_path / "out")
    name = "model.layers.0.mlp.down_proj.weight"
    codes, _ = quantize_weight(before[name])
    assert torch.equal(after[name], codes)
    assert after["model.norm.weight"].dtype == torch.float32


@pytest.mark.parametrize("fmt", ["w8a8", "bf16"])
def test_fp32_among_16_bit_tensors_stays(checkpoint, tmp_path, fmt):
    bias = torch.randn(8)
    src = checkpoint(tensors={"model.layers.0.mlp.gate.e_score_correction_bias": bias})
    convert(src, tmp_path / "out", format=fmt)
    kept = load(tmp_path / "out")["model.layers.0.mlp.gate.e_score_correction_bias"]
    assert kept.dtype == torch.float32
    assert torch.equal(kept, bias)


def test_odd_tensors_are_carried(checkpoint, tmp_path):
    odd = {
        "model.scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "model.empty": torch.empty(0, 7, dtype=torch.bfloat16),
        "model.rows_without_columns": torch.empty(3, 0, dtype=torch.bfloat16),
        "model.position_ids": torch.arange(5),
        "model.mask": torch.tensor([True, False, True]),
        "model.conv.weight": torch.randn(3, 2, 2, 2).to(torch.bfloat16),
    }
    src = checkpoint(tensors=odd)
    convert(src, tmp_path / "out")
    after = load(tmp_path / "out")
    for name, tensor in odd.items():
        assert after[name].dtype == tensor.dtype
        assert after[name].shape == tensor.shape
        assert torch.equal(after[name], tensor), name


def test_unaligned_source_header(checkpoint, tmp_path):
    """Old safetensors files do not pad the header, so that tensors begin at odd addresses."""
    src = checkpoint()
    path = src / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + size].rstrip(b" ")
    header += b" " * (1 - len(header) % 2)
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])
    assert len(header) % 2 == 1
    before = load(src)
    convert(src, tmp_path / "out", format="bf16")
    after = load(tmp_path / "out")
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.fixture
def torch_threads():
    """Sets how many threads torch uses, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_do_not_show(checkpoint, tmp_path, monkeypatch, torch_threads, threads):
    src = checkpoint()
    expected = convert(src, tmp_path / "whole")
    monkeypatch.setattr(converter, "_BLOCK_BYTES", 4 * 16 * 5)
    torch_threads(threads)
    done = []
    report = convert(
        src, tmp_path / "blocks", progress=lambda stage, *bytes_done: done.append((stage == "write", *bytes_done))
    )
    whole, blocks = load(tmp_path / "whole"), load(tmp_path / "blocks")
    assert whole.keys() == blocks.keys()
    assert all(torch.equal(whole[name], blocks[name]) for name in whole)
    assert report.layers == expected.layers
    assert done == sorted(done)
    assert len(done) > 2 * len(whole)
    with ThreadPoolExecutor(1) as new:
        assert {torch.get_num_threads(), new.submit(torch.get_num_threads).result()} == {threads}, "as it was before"


def test_error_in_a_thread(checkpoint, tmp_path, monkeypatch, torch_threads):
    """What it was is told; no block is begun any more, and no thread writes when the folder is removed."""
    src, writes = checkpoint(), []

    class Full(ShardWriter):
        def write(self, *args):
            writes.append(threading.current_thread())
            if len(writes) > 30:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().write(*args)

    monkeypatch.setattr(converter, "ShardWriter", Full)
    monkeypatch.setattr(converter, "_BLOCK_BYTES", 4)
    torch_threads(3)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        convert(src, tmp_path / "out")
    assert writes[30] is not threading.main_thread()
    assert len(writes) < 40
    assert not any(thread.is_alive() for thread in writes if thread is not threading.main_thread())
    assert torch.get_num_threads() == 3
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


DEFAULTS = {
    "model.layers.0.mlp.gate.weight": False,
    "model.layers.0.block_sparse_moe.gate.weight": False,
    "model.layers.0.mlp.shared_expert_gate.weight": False,
    "model.layers.0.feed_forward.router.weight": False,
    "model.layers.0.mlp.experts.7.down_proj.weight": True,
    "model.layers.0.linear_attn.in_proj_qkv.weight": False,
    "model.layers.0.mixer.x_proj.weight": False,
    "model.visual.blocks.0.mlp.fc1.weight": False,
    "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight": False,
    "model.multi_modal_projector.linear_1.weight": False,
    "model.layers.2.eh_proj.weight": False,
    "mtp.fc.weight": False,
    "mtp.layers.0.mlp.up_proj.weight": False,
    "transformer.h.0.mlp.dense_h_to_4h.weight": True,
}


@pytest.mark.parametrize(("name", "quantized"), DEFAULTS.items(), ids=DEFAULTS)
def test_what_is_quantized_by_default(checkpoint, tmp_path, name, quantized):
    src = checkpoint(tensors={name: torch.randn(4, 6).to(torch.bfloat16)})
    report = convert(src, tmp_path / "out")
    assert (load(tmp_path / "out")[name].dtype == torch.int8) is quantized
    assert (module(name) in report.ignore) is not quantized


def test_embeddings_are_not_linear_modules(checkpoint, tmp_path):
    report = convert(checkpoint(tensors={"model.layers.0.pos_embed.weight": torch.randn(4, 6)}), tmp_path / "out")
    assert report.ignore == ["lm_head"]


@pytest.mark.parametrize(
    ("skip", "kept"),
    [
        (["down_proj"], {"mlp.down_proj"}),
        (["qkv_proj"], {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}),
        (["mlp"], {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}),
        (["re:.*(gate|up)_proj", "*.o_proj"], {"mlp.gate_proj", "mlp.up_proj", "self_attn.o_proj"}),
    ],
)
def test_skip(checkpoint, tmp_path, skip, kept):
    src = checkpoint()
    before = load(src)
    report = convert(src, tmp_path / "out", skip=skip)
    after = load(tmp_path / "out")
    expected = {f"model.layers.{i}.{name}" for i in range(2) for name in kept}
    assert set(report.ignore) == expected | {"lm_head"}
    for name in expected:
        assert torch.equal(after[f"{name}.weight"], before[f"{name}.weight"])
        assert f"{name}.weight_scale" not in after
    assert len(report.layers) == 14 - len(expected)


def test_quantize_untied_lm_head(checkpoint, tmp_path):
    src = checkpoint()
    report = convert(src, tmp_path / "out", quantize_lm_head=True)
    after = load(tmp_path / "out")
    codes, scale = rounded(load(src)["lm_head.weight"])
    assert torch.equal(after["lm_head.weight"], codes)
    assert torch.equal(after["lm_head.weight_scale"], scale)
    assert report.ignore == []
    assert report.lm_head_extra_bytes == 0


@pytest.mark.parametrize("explicit", [True, False], ids=["config-says-tied", "config-silent"])
@pytest.mark.parametrize("fmt", ["w8a8", "compressed-tensors"])
def test_quantize_tied_lm_head(checkpoint, tmp_path, fmt, explicit):
    src = checkpoint(tied=True)
    if not explicit:
        config = read_json(src / "config.json")
        del config["tie_word_embeddings"]
        (src / "config.json").write_text(json.dumps(config))
    embedding = load(src)["model.embed_tokens.weight"]
    plain = convert(src, tmp_path / "plain", format=fmt)
    report = convert(src, tmp_path / "out", format=fmt, quantize_lm_head=True)
    after = load(tmp_path / "out")
    codes, scale = rounded(embedding, fmt)
    assert torch.equal(after["model.embed_tokens.weight"], embedding)
    assert torch.equal(after["lm_head.weight"], codes)
    assert torch.equal(after["lm_head.weight_scale"], scale)
    assert read_json(tmp_path / "out" / "config.json")["tie_word_embeddings"] is False
    assert report.ignore == []
    assert plain.ignore == ["lm_head"]
    assert report.lm_head_extra_bytes == codes.numel() + 4 * len(scale)


def test_tied_lm_head_stored_twice(checkpoint, tmp_path):
    """Tied means that the embedding counts, even where a stale lm_head is in the files."""
    src = checkpoint(tied=True, tensors={"lm_head.weight": torch.zeros(32, 16, dtype=torch.bfloat16)})
    convert(src, tmp_path / "out", quantize_lm_head=True)
    codes, _ = rounded(load(src)["model.embed_tokens.weight"])
    assert torch.equal(load(tmp_path / "out")["lm_head.weight"], codes)


def test_shards_and_index(checkpoint, tmp_path):
    src = checkpoint()
    report = convert(src, tmp_path / "out", max_shard_size="1KB")
    index = read_json(tmp_path / "out" / "w8a8.safetensors.index.json")
    assert len(report.files) > 3
    assert report.files[0] == f"w8a8-00001-of-{len(report.files):05}.safetensors"
    held = {}
    for name in report.files:
        with safe_open(tmp_path / "out" / name, framework="pt") as file:
            assert file.metadata() == {"format": "w8a8"}
            keys = set(file.keys())
        size = (tmp_path / "out" / name).stat().st_size
        assert size < 1000 + 1000 or len(keys) <= 2, "only a single weight may pass the limit (header aside)"
        held |= dict.fromkeys(keys, name)
    assert index["weight_map"] == held
    for name, file_name in held.items():
        assert held.get(f"{name}_scale", file_name) == file_name, "a weight and its scale are in one file"
    assert report.output_bytes == sum((tmp_path / "out" / name).stat().st_size for name in report.files)


def test_small_files_are_carried(checkpoint, tmp_path):
    src = shutil.copytree(checkpoint(), tmp_path / "snapshots" / "0a1b")
    (src / "tokenizer.json").write_text('{"a": "é"}')
    (src / "chat_template.jinja").write_text("{{ x }}")
    (src / "sub").mkdir()
    (src / "sub" / "config.json").write_text("{}")
    (src / ".cache").mkdir()
    (src / ".cache" / "x").write_text("no")
    (src / "pytorch_model.bin").write_bytes(b"no")
    real = tmp_path / "blobs" / "blob"
    real.parent.mkdir()
    real.write_text("linked")
    (src / "generation_config.json").symlink_to(real)
    convert(src, tmp_path / "out")
    out = tmp_path / "out"
    names = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert names == {
        "chat_template.jinja", "config.json", "conversion_report.json", "generation_config.json", "quant_config.json",
        "sub/config.json", "tokenizer.json", "w8a8.safetensors",
    }  # fmt: skip
    assert (out / "tokenizer.json").read_bytes() == (src / "tokenizer.json").read_bytes()
    assert not (out / "generation_config.json").is_symlink()
    assert (out / "generation_config.json").read_text() == "linked"


def test_report(checkpoint, tmp_path):
    # q_proj: scale 1, so int8 is exact; o_proj: one large value drowns the rest.
    exact = torch.full((16, 16), -127.0, dtype=torch.bfloat16)
    bad = torch.full((16, 16), 0.01, dtype=torch.bfloat16)
    bad[:, 0] = 100.0
    src = checkpoint(tensors={"model.layers.0.self_attn.q_proj.weight": exact, "model.layers.1.self_attn.o_proj.weight": bad})
    stages = []
    report = convert(src, tmp_path / "out", progress=lambda stage, done, total: stages.append((stage, done, total)))
    by_name = {layer.name: layer.sqnr_db for layer in report.layers}
    assert by_name["model.layers.0.self_attn.q_proj"] is None

    name = "model.layers.0.mlp.down_proj"
    weight = load(src)[f"{name}.weight"].double()
    after = load(tmp_path / "out")
    restored = after[f"{name}.weight"].double() * after[f"{name}.weight_scale"].double()
    expected = 10 * torch.log10(weight.square().sum() / (weight - restored).square().sum())
    assert by_name[name] == pytest.approx(expected.item(), abs=0.01)
    assert 35 < by_name[name] < 50

    worst = report.worst_layers(3)
    assert [layer.sqnr_db for layer in worst] == sorted(value for value in by_name.values() if value is not None)[:3]
    assert read_json(tmp_path / "out" / "conversion_report.json") == json.loads(json.dumps(report.to_dict()))
    assert stages[-1][0] == "write"
    assert stages[-1][1] == stages[-1][2]
    assert {stage for stage, _, _ in stages} == {"check", "write"}


def test_transformers_refuses_w8a8(checkpoint, tmp_path):
    """It would skip the unknown method with a warning and cast the codes to weights."""
    transformers = pytest.importorskip("transformers")
    src = checkpoint()
    convert(src, tmp_path / "one")
    convert(src, tmp_path / "many", max_shard_size="4KB")
    for folder in ("one", "many"):
        for options in ({}, {"dtype": torch.bfloat16}, {"dtype": "auto"}, {"use_safetensors": True}):
            with pytest.raises(OSError, match=r"no file named model\.safetensors"):
                transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, **options)
    # The same folder under the usual name loads: what refuses is the name, and the test can fail.
    (tmp_path / "one" / "w8a8.safetensors").rename(tmp_path / "one" / "model.safetensors")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one")


def test_compressed_tensors_output_in_transformers(checkpoint, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    convert(checkpoint(), tmp_path / "out", format="compressed-tensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    layer = model.model.layers[0].mlp.down_proj
    model(torch.tensor([[1]]))  # decompresses the weights
    stored = load(tmp_path / "out")
    name = "model.layers.0.mlp.down_proj.weight"
    expected = stored[name].float() * stored[f"{name}_scale"]
    # It keeps the scales in bf16.
    torch.testing.assert_close(layer.weight.float(), expected, rtol=2**-7, atol=0)


def test_gpt2_is_refused(tmp_path):
    src = tmp_path / "src"
    src.mkdir()
    (src / "config.json").write_text('{"model_type": "gpt2"}')
    save_file({"h.0.attn.c_attn.weight": torch.randn(4, 12)}, src / "model.safetensors")
    with pytest.raises(ValueError, match="transposed"):
        convert(src, tmp_path / "out")
