"""`convert(..., from_quantized=True)`: what is packed here by loops, or by compressed-tensors itself, comes out exactly."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from w8a8_converters import convert as converter
from w8a8_converters.convert import convert
from w8a8_converters.errors import AlreadyW8A8Error, BrokenFileError, ConversionError
from w8a8_converters.folding.options import FoldingOptions
from w8a8_converters.quantized import gptq
from w8a8_converters.quantized.source import QuantizedSource

Parts = dict[str, Tensor]
DOWN = "model.layers.0.mlp.down_proj"
SHAPES = {
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (8, 16),
    "self_attn.v_proj": (8, 16),
    "self_attn.o_proj": (16, 16),
    "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
}
MODULES = {f"model.layers.{i}.{name}": shape for i in (0, 1) for name, shape in SHAPES.items()}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of five or seven rows: their beginnings fall into the middle of packed words and of fp8 blocks."""
    monkeypatch.setattr(converter, "_BLOCK_BYTES", 4 * 16 * 7)


# What each format makes of one weight [N, K]: its tensors, and the fp32 values that they stand for.


def random_integers(low: int, high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def random_scales(*shape: int, seed: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.1 + 0.01).to(dtype)


def as_int32(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def pack_down(values: Tensor, bits: int) -> Tensor:
    """[K, N] -> int32 [K * bits / 32, N], lowest bits first."""
    fields = 32 // bits
    rows = values.tolist()
    words = [
        [as_int32(sum(rows[row * fields + i][n] << (bits * i) for i in range(fields))) for n in range(len(rows[0]))]
        for row in range(len(rows) // fields)
    ]
    return torch.tensor(words, dtype=torch.int32)


def pack_right(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[G, N] -> int32 [G, N * bits / 32]; field i of a word holds its column order[i]."""
    fields = 32 // bits
    order = order or tuple(range(fields))
    words = [
        [
            as_int32(sum(row[word * fields + order[i]] << (bits * i) for i in range(fields)))
            for word in range(len(row) // fields)
        ]
        for row in values.tolist()
    ]
    return torch.tensor(words, dtype=torch.int32)


def grouped_values(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> Tensor:
    """codes [K, N], zeros and scales [G, N], the group of each of the K -> fp32 [N, K]."""
    q, z, s, groups = codes.tolist(), zeros.tolist(), scales.tolist(), group_of.tolist()
    return torch.tensor([[(q[k][n] - z[g][n]) * s[g][n] for k, g in enumerate(groups)] for n in range(len(q[0]))])


def gptq_parts(
    N: int, K: int, seed: int, bits: int = 4, group_size: int = 8, offset: int = 1, order: str = "none", sym: bool = False
) -> tuple[Parts, Tensor]:
    size = K if group_size == -1 else group_size
    groups = math.ceil(K / size)
    codes = random_integers(0, 1 << bits, K, N, seed=seed)
    zeros = random_integers(0, 1 << bits, groups, N, seed=seed + 1)
    if sym:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    scales = random_scales(groups, N, seed=seed + 2)
    group_of = torch.arange(K) // size
    if order == "act":
        group_of = group_of[torch.randperm(K, generator=torch.Generator().manual_seed(seed))]
    values = grouped_values(codes, zeros, scales, group_of)
    parts = {
        "qweight": pack_down(codes, bits),
        "qzeros": pack_right((zeros - offset) % (1 << bits), bits),
        "scales": scales,
    }
    if order != "absent":
        parts["g_idx"] = group_of.to(torch.int32)
    return parts, values


def awq_parts(N: int, K: int, seed: int, group_size: int = 8) -> tuple[Parts, Tensor]:
    size = K if group_size == -1 else group_size
    groups = K // size
    codes = random_integers(0, 16, K, N, seed=seed)
    zeros = random_integers(0, 16, groups, N, seed=seed + 1)
    scales = random_scales(groups, N, seed=seed + 2)
    values = grouped_values(codes, zeros, scales, torch.arange(K) // size)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": pack_right(codes, 4, order), "qzeros": pack_right(zeros, 4, order), "scales": scales}, values


def fp8_parts(N: int, K: int, seed: int, scale_shape: str, name: str = "weight_scale") -> tuple[Parts, Tensor]:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)
    shape = {"()": (), "[1]": (1,), "[N]": (N,), "[N, 1]": (N, 1), "blocks": (math.ceil(N / 5), math.ceil(K / 7))}[scale_shape]
    scale = random_scales(*shape, seed=seed, dtype=torch.float32)
    codes, scales = weight.tolist(), scale.tolist() if scale_shape == "blocks" else scale.flatten().tolist()

    def scale_of(n: int, k: int) -> float:
        return scales[n // 5][k // 7] if scale_shape == "blocks" else scales[n if len(scales) > 1 else 0]

    values = torch.tensor([[codes[n][k] * scale_of(n, k) for k in range(K)] for n in range(N)])
    return {"weight": weight, name: scale, "input_scale": torch.tensor(1.0)}, values


def compressed_parts(
    N: int, K: int, seed: int, format: str, arguments: dict, scale_dtype: torch.dtype = torch.bfloat16, act_order: bool = False
) -> tuple[Parts, Tensor]:
    """By the library: compressed by it, and dequantized by it."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(seed))
    sizes = {"tensor": (1,), "channel": (N, 1)}
    if args.strategy == "group":
        sizes["group"] = (N, math.ceil(K / args.group_size))
    if args.strategy == "block":
        sizes["block"] = tuple(math.ceil(n / b) for n, b in zip((N, K), args.block_structure, strict=True))
    shape = sizes[args.strategy]
    state = {"weight": weight, "weight_scale": random_scales(*shape, seed=seed, dtype=scale_dtype) * 4}
    half = 1 << (args.num_bits - 1)
    if not args.symmetric:
        state["weight_zero_point"] = random_integers(-half, half, *shape, seed=seed).to(torch.int8)
    if act_order:
        index = torch.arange(K) // args.group_size
        state["weight_g_idx"] = index[torch.randperm(K, generator=torch.Generator().manual_seed(seed))].to(torch.int32)
    compressor = BaseCompressor.get_value_from_registry(format)
    parts = {name: tensor.contiguous() for name, tensor in compressor.compress(state, scheme).items()}
    if args.strategy == "block":
        # Of a ragged edge `decompress` does not know the size of a block.
        return parts, dequantize(parts["weight"], parts["weight_scale"].float(), args=args)
    wide = {**parts, "weight_scale": parts["weight_scale"].float()}
    return parts, compressor.decompress(wide, scheme)["weight"]


def compressed_config(format: str, arguments: dict, **entries) -> dict:
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **entries,
    }


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8}
INT4_ASYM = {**INT4, "symmetric": False}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
FP8_BLOCK = {**FP8, "strategy": "block", "block_structure": [5, 7]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}
FP8_METHOD = {"quant_method": "fp8", "activation_scheme": "static"}
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [5, 7], "fmt": "e4m3"}


@dataclass
class Case:
    config: dict
    parts: Callable[..., tuple[Parts, Tensor]]
    options: dict


CASES = {
    "gptq": Case(GPTQ, gptq_parts, {}),
    "gptq-sym": Case(GPTQ, gptq_parts, {"sym": True}),
    "gptq-v2": Case({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq_parts, {"offset": 0}),
    "gptq-act-order": Case({**GPTQ, "desc_act": True}, gptq_parts, {"order": "act"}),
    "gptq-without-g_idx": Case(GPTQ, gptq_parts, {"order": "absent"}),
    "gptq-ragged-group": Case({**GPTQ, "group_size": 10}, gptq_parts, {"group_size": 10}),
    "gptq-channel": Case({**GPTQ, "group_size": -1}, gptq_parts, {"group_size": -1}),
    "gptq-8": Case({**GPTQ, "bits": 8}, gptq_parts, {"bits": 8}),
    "awq": Case(AWQ, awq_parts, {}),
    "awq-GEMM": Case({**AWQ, "version": "GEMM"}, awq_parts, {}),
    "awq-channel": Case({**AWQ, "group_size": -1}, awq_parts, {"group_size": -1}),
    "fp8": Case(FP8_METHOD, fp8_parts, {"scale_shape": "()"}),
    "fp8-1": Case(FP8_METHOD, fp8_parts, {"scale_shape": "[1]"}),
    "fp8-channel": Case(FP8_METHOD, fp8_parts, {"scale_shape": "[N, 1]"}),
    "fp8-channel-flat": Case(FP8_METHOD, fp8_parts, {"scale_shape": "[N]"}),
    "fp8-scale_inv": Case(FP8_METHOD, fp8_parts, {"scale_shape": "()", "name": "weight_scale_inv"}),
    "fp8-blocks": Case(FP8_BLOCKS, fp8_parts, {"scale_shape": "blocks", "name": "weight_scale_inv"}),
}
for name, format, arguments, options in (
    ("ct-fp8-tensor", "float-quantized", {**FP8, "strategy": "tensor"}, {}),
    ("ct-fp8-channel", "float-quantized", FP8, {}),
    ("ct-fp8-channel-fp32", "float-quantized", FP8, {"scale_dtype": torch.float32}),
    ("ct-fp8-blocks", "float-quantized", FP8_BLOCK, {}),
    ("ct-fp8-naive", "naive-quantized", FP8, {}),
    ("ct-int8", "int-quantized", INT8, {}),
    ("ct-int8-tensor", "int-quantized", {**INT8, "strategy": "tensor"}, {}),
    ("ct-int8-asym", "int-quantized", {**INT8, "symmetric": False}, {}),
    ("ct-int4", "pack-quantized", INT4, {}),
    ("ct-int4-fp16", "pack-quantized", INT4, {"scale_dtype": torch.float16}),
    ("ct-int4-asym", "pack-quantized", INT4_ASYM, {}),
    ("ct-int4-channel", "pack-quantized", {**INT8, "num_bits": 4}, {}),
    ("ct-int4-channel-asym", "pack-quantized", {**INT8, "num_bits": 4, "symmetric": False}, {}),
    ("ct-int4-act-order", "pack-quantized", {**INT4, "actorder": "group"}, {"act_order": True}),
    ("ct-int4-asym-act-order", "pack-quantized", {**INT4_ASYM, "actorder": "group"}, {"act_order": True}),
    ("ct-int8-packed", "pack-quantized", {**INT4, "num_bits": 8}, {}),
):
    parts_options = {"format": format, "arguments": arguments, **options}
    CASES[name] = Case(compressed_config(format, arguments), compressed_parts, parts_options)


@pytest.fixture
def quantized(checkpoint):
    """Writes a quantized checkpoint. Returns the folder and the values by the weights' names.

    Options: case, a key of CASES; plain: modules to leave unquantized; tensors: merged over all, None removes one;
    settings: merged over the case's; config: merged over the model's.
    """

    def write(case, plain=(), tensors=None, settings=None, config=None, modules=MODULES):
        case, packed, values = CASES[case], {}, {}
        for seed, (module, (N, K)) in enumerate(modules.items()):
            if module in plain:
                continue
            parts, values[f"{module}.weight"] = case.parts(N, K, 10 * seed, **case.options)
            packed |= {f"{module}.weight": None, **{f"{module}.{name}": tensor for name, tensor in parts.items()}}
        config = {"quantization_config": {**case.config, **(settings or {})}, **(config or {})}
        return checkpoint(tensors={**packed, **(tensors or {})}, config=config, shards=3), values

    return write


def outputs(folder: Path) -> Parts:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("case", CASES)
def test_bf16_is_the_values_rounded_once(quantized, tmp_path, case):
    src, values = quantized(case)
    stored = outputs(src)
    report = convert(src, tmp_path / "out", format="bf16", from_quantized=True)
    written = outputs(tmp_path / "out")
    plain = {name for name in stored if name.rpartition(".")[0] not in MODULES}
    assert written.keys() == values.keys() | plain
    for name, tensor in written.items():
        assert torch.equal(tensor, values[name].to(torch.bfloat16) if name in values else stored[name]), name
    assert report.quantized_source["weights"] == len(MODULES)


@pytest.mark.parametrize("case", CASES)
def test_int8_codes_are_those_of_the_fp32_values(quantized, tmp_path, case):
    src, values = quantized(case)
    report = convert(src, tmp_path / "out", hadamard=0, from_quantized=True)
    written = outputs(tmp_path / "out")
    for name, value in values.items():
        scale = value.abs().amax(1, keepdim=True) / 127
        assert torch.equal(written[f"{name}_scale"], scale), name
        assert torch.equal(written[name], (value / scale).round().to(torch.int8)), name
    assert report.ignore == ["lm_head"]


def test_the_result_is_not_quantized_twice(quantized, tmp_path):
    src, _ = quantized("gptq", config={"text_config": {"quantization_config": GPTQ, "dtype": "bfloat16"}})
    for name in ("quantize_config.json", "generation_config.json"):
        (src / name).write_text("{}")
    report = convert(src, tmp_path / "out", format="bf16", from_quantized=True)
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    assert (tmp_path / "out" / "generation_config.json").is_file()
    assert not (tmp_path / "out" / "quantize_config.json").exists()
    origin = json.loads((tmp_path / "out" / "conversion_report.json").read_text())["quantized_source"]
    assert origin == report.quantized_source
    assert origin["method"] == "gptq"
    assert origin["description"] == "GPTQ, 4 bit, groups of 8"
    assert origin["quantization_config"] == GPTQ
    assert any("GPTQ, 4 bit, groups of 8" in note for note in report.notes)
    # The folder is one that any tool takes for unquantized, and so does this one.
    convert(tmp_path / "out", tmp_path / "again")


def test_scales_of_activations_are_left_out_and_named(quantized, tmp_path):
    extra = {"model.layers.0.self_attn.k_scale": torch.ones(1), "model.layers.0.self_attn.v_scale": torch.ones(1)}
    src, _ = quantized("fp8", tensors=extra)
    report = convert(src, tmp_path / "out", format="bf16", from_quantized=True)
    assert set(report.quantized_source["dropped"]) == extra.keys() | {f"{module}.input_scale" for module in MODULES}
    assert f"{len(MODULES) + 2} tensors with scales of activations are not carried over" in report.notes


@pytest.mark.parametrize("case", ["gptq", "awq", "fp8", "ct-int4"])
def test_layers_that_the_source_left_unquantized_stay_so(quantized, tmp_path, case):
    settings = {"modules_to_not_convert": [DOWN], "ignore": ["lm_head", DOWN]}
    src, values = quantized(case, plain=[DOWN], settings=settings)
    stored = outputs(src)[f"{DOWN}.weight"]
    report = convert(src, tmp_path / "out", from_quantized=True)
    written = outputs(tmp_path / "out")
    assert torch.equal(written[f"{DOWN}.weight"], stored)
    assert report.ignore == [DOWN, "lm_head"] or report.ignore == ["lm_head", DOWN]
    assert {f"{layer.name}.weight" for layer in report.layers} == values.keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert sorted(config["ignore"]) == sorted(report.ignore)


def test_layers_that_vllm_fuses_are_quantized_together(quantized, tmp_path):
    key = "model.layers.1.self_attn.k_proj"
    src, _ = quantized("fp8", plain=[key])
    report = convert(src, tmp_path / "out", from_quantized=True)
    assert report.ignore == ["lm_head"]
    assert outputs(tmp_path / "out")[f"{key}.weight"].dtype == torch.int8


def test_quantized_lm_head(quantized, tmp_path):
    head = {"lm_head": (32, 16), **MODULES}
    src, values = quantized("awq", modules=head)
    convert(src, tmp_path / "out", from_quantized=True)
    assert torch.equal(outputs(tmp_path / "out")["lm_head.weight"], values["lm_head.weight"].to(torch.bfloat16))
    convert(src, tmp_path / "int8", from_quantized=True, quantize_lm_head=True)
    assert outputs(tmp_path / "int8")["lm_head.weight"].dtype == torch.int8


def test_weights_that_stay_have_the_dtype_of_the_model(quantized, tmp_path):
    src, values = quantized("gptq", config={"torch_dtype": "float16"})
    convert(src, tmp_path / "out", from_quantized=True, skip=["down_proj"])
    assert torch.equal(outputs(tmp_path / "out")[f"{DOWN}.weight"], values[f"{DOWN}.weight"].to(torch.float16))


def test_dynamic_settings_of_gptq(quantized, tmp_path):
    parts, value = gptq_parts(16, 24, 999, bits=8, group_size=12)
    tensors = {f"{DOWN}.{name}": tensor for name, tensor in parts.items()}
    other = "model.layers.1.mlp.down_proj"
    dynamic = {
        r"+:model\.layers\.0\.mlp\.down_proj": {"bits": 8, "group_size": 12},
        r"-:model\.layers\.1\.mlp\.down_proj": {},
    }
    src, _ = quantized("gptq", plain=[DOWN, other], tensors={f"{DOWN}.weight": None, **tensors}, settings={"dynamic": dynamic})
    convert(src, tmp_path / "out", format="bf16", from_quantized=True)
    assert torch.equal(outputs(tmp_path / "out")[f"{DOWN}.weight"], value.to(torch.bfloat16))


@pytest.mark.parametrize("case", ["gptq", "awq"])
def test_settings_in_files_of_their_own(quantized, tmp_path, case):
    """Older checkpoints' config.json says nothing."""
    src, values = quantized(case)
    config = json.loads((src / "config.json").read_text())
    settings = config.pop("quantization_config")
    settings.pop("quant_method")
    (src / "config.json").write_text(json.dumps(config))
    if case == "awq":
        settings = {"w_bit": 4, "q_group_size": 8, "zero_point": True, "version": "GEMM"}
    (src / ("quant_config.json" if case == "awq" else "quantize_config.json")).write_text(json.dumps(settings))
    with pytest.raises(ConversionError, match=r"already quantized .*--from-quantized"):
        convert(src, tmp_path / "out", format="bf16")
    report = convert(src, tmp_path / "out", format="bf16", from_quantized=True)
    assert report.quantized_source["method"] == case
    assert torch.equal(outputs(tmp_path / "out")[f"{DOWN}.weight"], values[f"{DOWN}.weight"].to(torch.bfloat16))


def test_checkpoint_format_of_the_file_beside(quantized, tmp_path):
    src, values = quantized("gptq-v2", settings={"checkpoint_format": None})
    config = json.loads((src / "config.json").read_text())
    del config["quantization_config"]["checkpoint_format"]
    (src / "config.json").write_text(json.dumps(config))
    (src / "quantize_config.json").write_text(json.dumps({"checkpoint_format": "gptq_v2"}))
    convert(src, tmp_path / "out", format="bf16", from_quantized=True)
    assert torch.equal(outputs(tmp_path / "out")[f"{DOWN}.weight"], values[f"{DOWN}.weight"].to(torch.bfloat16))


def test_several_config_groups(quantized, tmp_path):
    """The most specific target counts."""
    parts, value = compressed_parts(16, 24, 5, "pack-quantized", INT4_ASYM)
    tensors = {f"{DOWN}.{name}": tensor for name, tensor in parts.items()}
    linear, down = (
        {"targets": [target], "weights": weights, "input_activations": None}
        for target, weights in (("Linear", FP8), (r"re:.*layers\.0.*down_proj", INT4_ASYM))
    )
    groups = {"config_groups": {"a": linear, "b": {**down, "format": "pack-quantized"}}, "format": "mixed-precision"}
    src, values = quantized("ct-fp8-channel", plain=[DOWN], tensors={f"{DOWN}.weight": None, **tensors}, settings=groups)
    report = convert(src, tmp_path / "out", format="bf16", from_quantized=True)
    assert report.quantized_source["description"] == "compressed-tensors, fp8 and int4 in groups of 8"
    for name, expected in {**values, f"{DOWN}.weight": value}.items():
        assert torch.equal(outputs(tmp_path / "out")[name], expected.to(torch.bfloat16)), name


def test_folding_works_on_what_was_quantized(quantized, tmp_path):
    src, values = quantized("fp8")
    convert(src, tmp_path / "out", format="bf16", from_quantized=True, folding=FoldingOptions(rotate=True))
    rotated = outputs(tmp_path / "out")["model.layers.0.self_attn.q_proj.weight"].float()
    norm = outputs(src)["model.layers.0.input_layernorm.weight"].float()
    # A rotation of the input keeps the length of each row, of which the norm's weight has become a part.
    expected = (values["model.layers.0.self_attn.q_proj.weight"] * norm).norm(dim=1)
    assert torch.allclose(rotated.norm(dim=1), expected, rtol=1e-2)


def test_only_the_rows_that_are_read_are_unpacked(quantized, monkeypatch):
    src, _ = quantized("gptq")
    sizes = []

    def unpack(words, bits):
        sizes.append(words.shape)
        return original(words, bits)

    original = gptq.unpack
    monkeypatch.setattr(gptq, "unpack", unpack)
    QuantizedSource(src).rows("model.layers.0.mlp.gate_proj.weight", 9, 12)
    # Words of eight inputs; of the zero points the one word that holds the three.
    assert sizes == [(3, 16 // 8), (16 // 8, 1)]


# Refusals.


@pytest.fixture
def refuses(tmp_path):
    def check(src, match, error=ConversionError, **options):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(error, match=match) as raised:
            convert(src, tmp_path / "out", **{"from_quantized": True, **options})
        assert type(raised.value) is error
        assert "\n" not in str(raised.value)
        assert sorted(tmp_path.rglob("*")) == before

    return check


@pytest.mark.parametrize("case", ["gptq", "awq", "fp8", "ct-int4"])
def test_without_the_option_the_error_names_it(quantized, refuses, case):
    src, _ = quantized(case)
    refuses(
        src,
        "already quantized .*convert from the original .* or dequantize this one with --from-quantized",
        from_quantized=False,
    )


@pytest.mark.parametrize("method", ["bitsandbytes", "mxfp4", "quark", "hqq", "modelopt", "auto-round"])
def test_other_methods(checkpoint, refuses, method):
    src = checkpoint(config={"quantization_config": {"quant_method": method}})
    refuses(src, f"it is quantized by {method}, which is not dequantized here, only awq, compressed-tensors, fp8, gptq")
    with pytest.raises(ConversionError) as error:
        convert(src, src.parent / "out")
    assert "--from-quantized" not in str(error.value)


def test_w8a8_itself(checkpoint, refuses, tmp_path):
    for name, options in (("w8a8", {}), ("compressed", {"format": "compressed-tensors"})):
        src = tmp_path / "src"
        convert(src if src.exists() else checkpoint(), tmp_path / name, **options)
        refuses(tmp_path / name, "it is W8A8 already: serve it as it is", AlreadyW8A8Error)


def test_what_is_not_quantized(checkpoint, refuses, tmp_path):
    refuses(checkpoint(), "is not quantized: leave out --from-quantized")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refuses(tmp_path / "model.gguf", "--from-quantized is for folders with safetensors files")


def test_no_settings(checkpoint, refuses):
    src = checkpoint(tensors={f"{DOWN}.weight": torch.ones(16, 24).to(torch.float8_e4m3fn)})
    refuses(src, "has quantized tensors and no quantization_config")


def test_no_quantized_tensors(checkpoint, refuses):
    refuses(checkpoint(config={"quantization_config": GPTQ}), "no tensor is", BrokenFileError)


@pytest.mark.parametrize(
    ("case", "settings", "match"),
    [
        ("gptq", {"bits": 3}, "bits 3 is not supported, only 4, 8"),
        ("gptq", {"bits": None}, "bits None is not supported"),
        ("gptq", {"group_size": 0}, "group_size must be positive or -1, got 0"),
        ("gptq", {"group_size": None}, "group_size must be of type int, got None"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format True is not supported"),
        ("gptq", {"pack_dtype": "int8"}, "pack_dtype 'int8' is not supported"),
        ("gptq", {"dynamic": {"(": {}}}, "is not a regular expression"),
        ("awq", {"version": "gemv"}, "version 'gemv' is not supported, only 'gemm'"),
        ("awq", {"bits": 8}, "bits 8 is not supported"),
        ("awq", {"zero_point": False}, "zero_point False is not supported"),
        ("fp8", {"fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        ("fp8", {"weight_block_size": [128]}, r"weight_block_size must be two positive integers, got \[128\]"),
        ("ct-int4", {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' is not supported"),
        ("ct-int4", {"format": "marlin-24"}, "format 'marlin-24' is not supported"),
        ("ct-int4", {"quantization_status": "frozen"}, "quantization_status 'frozen' is not supported"),
        ("ct-int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format 'sparse-24-bitmask'"),
        ("ct-int4", {"transform_config": {"config_groups": {"u": {}}}}, "transform_config changes weights"),
        ("ct-int4", {"config_groups": {}}, "none of its config_groups quantizes weights"),
        ("ct-int4", {"config_groups": {"a": {"targets": ["re:x"], "weights": INT4}}}, "no target .* matches model.layers.0"),
        ("ct-int4", {"config_groups": {"a": {"targets": ["Linear"], "weights": {**INT4, "num_bits": 3}}}}, "num_bits 3"),
    ],
)
def test_settings_that_are_not_supported(quantized, refuses, case, settings, match):
    refuses(quantized(case, settings=settings)[0], match)


WORDS = torch.zeros(3, 16, dtype=torch.int32)


@pytest.mark.parametrize(
    ("case", "tensors", "match"),
    [
        ("gptq", {"scales": None}, f"tensor {DOWN}.scales is missing"),
        ("gptq", {"qzeros": None}, f"tensor {DOWN}.qzeros is missing"),
        ("gptq", {"qweight": None}, f"tensor {DOWN}.qweight is missing"),
        ("gptq", {"scales": torch.ones(2, 16)}, rf"tensor {DOWN}.scales has shape \[2, 16\], .* ask for \[3, 16\]"),
        ("gptq", {"qzeros": torch.zeros(3, 16, dtype=torch.int32)}, rf"tensor {DOWN}.qzeros has shape \[3, 16\], .*\[3, 2\]"),
        ("gptq", {"qweight": torch.zeros(3, 16)}, f"tensor {DOWN}.qweight is F32, .* ask for I32"),
        ("gptq", {"g_idx": torch.full((24,), 3, dtype=torch.int32)}, f"tensor {DOWN}.g_idx holds group 3, .* 3 groups"),
        ("gptq", {"g_idx": torch.zeros(23, dtype=torch.int32)}, rf"tensor {DOWN}.g_idx has shape \[23\]"),
        ("gptq", {"perm": torch.ones(24)}, f"tensor {DOWN}.perm .* belongs to no weight"),
        ("awq", {"scales": None}, f"tensor {DOWN}.scales is missing"),
        ("awq", {"qzeros": torch.zeros(2, 2, dtype=torch.int32)}, rf"tensor {DOWN}.qzeros has shape \[2, 2\], .*\[3, 2\]"),
        ("awq", {"g_idx": torch.zeros(24, dtype=torch.int32)}, f"tensor {DOWN}.g_idx .* belongs to no weight"),
        ("fp8", {"weight_scale": None}, f"tensor {DOWN}.weight_scale is missing"),
        ("fp8", {"weight_scale": torch.ones(8)}, rf"tensor {DOWN}.weight_scale has shape \[8\]"),
        ("fp8", {"weight_scale": torch.ones((), dtype=torch.int32)}, f"tensor {DOWN}.weight_scale is I32"),
        ("fp8", {"weight": torch.ones(16, 24)}, f"tensor {DOWN}.weight_scale .* belongs to no weight"),
        ("fp8", {"weight": torch.ones(16, 24).to(torch.float8_e5m2)}, f"tensor {DOWN}.weight is F8_E5M2, .* F8_E4M3"),
        ("fp8", {"weight": torch.ones(2, 16, 24).to(torch.float8_e4m3fn)}, "expected a matrix"),
        (
            "fp8",
            {"weight": torch.ones(16, 24, dtype=torch.int8)},
            rf"tensor {DOWN}.weight\S* .* belongs to no weight as fp8 stores it",
        ),
        ("fp8-blocks", {"weight_scale_inv": torch.ones(4, 3)}, rf"{DOWN}.weight_scale_inv has shape \[4, 3\], .*\[4, 4\]"),
        ("ct-int4", {"weight_scale": None}, f"tensor {DOWN}.weight_scale is missing"),
        ("ct-int4", {"weight_shape": None}, f"tensor {DOWN}.weight_shape is missing"),
        ("ct-int4", {"weight_packed": None}, f"tensor {DOWN}.weight_packed is missing"),
        ("ct-int4", {"weight_shape": torch.tensor([16, 32])}, f"tensor {DOWN}.weight_packed has shape"),
        ("ct-int4", {"weight_scale": torch.ones(16, 2)}, rf"tensor {DOWN}.weight_scale has shape \[16, 2\], .*\[16, 3\]"),
        ("ct-int4", {"weight_g_idx": torch.full((24,), -1)}, f"tensor {DOWN}.weight_g_idx holds group -1"),
        ("ct-int4-asym", {"weight_zero_point": None}, f"tensor {DOWN}.weight_zero_point is missing"),
        ("ct-int8", {"weight_scale": None}, f"tensor {DOWN}.weight_scale is missing"),
        ("ct-int8", {"weight_scale": torch.ones(8, 1)}, f"tensor {DOWN}.weight_scale has shape"),
    ],
)
def test_tensors_that_do_not_fit(quantized, refuses, case, tensors, match):
    tensors = {f"{DOWN}.{name}": tensor for name, tensor in tensors.items()}
    refuses(quantized(case, tensors=tensors)[0], match, BrokenFileError)


def test_nan_among_the_scales(quantized, refuses):
    src, _ = quantized("fp8", tensors={f"{DOWN}.weight_scale": torch.tensor(math.nan)})
    refuses(src, f"tensor {DOWN}.weight of .* holds NaN")


def test_settings_file_that_is_not_json(quantized, refuses):
    src, _ = quantized("gptq")
    (src / "quantize_config.json").write_text("{")
    refuses(src, "quantize_config.json is not JSON", BrokenFileError)


def test_the_command_takes_it(quantized, tmp_path):
    from typer.testing import CliRunner

    from vllm_w8a8_plugin.cli import app

    src, _ = quantized("awq")
    refused = CliRunner().invoke(app, ["convert", str(src), str(tmp_path / "out")])
    assert refused.exit_code == 1
    assert "--from-quantized" in refused.output
    done = CliRunner().invoke(app, ["convert", str(src), str(tmp_path / "out"), "--from-quantized"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "w8a8.safetensors").is_file()
