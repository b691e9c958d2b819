"""Every refusal: one clear error, and nothing written."""

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from w8a8_converters import convert as converter
from w8a8_converters import staging
from w8a8_converters.convert import convert
from w8a8_converters.errors import ConversionError

INDEX = "model.safetensors.index.json"
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def refuses(tmp_path):
    """Asserts that the conversion fails with one line and leaves the folder of OUT as it was."""

    def check(src, match, out=None, **options):
        out = out or tmp_path / "out"
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ConversionError, match=match) as error:
            convert(src, out, **options)
        assert "\n" not in str(error.value)
        assert sorted(tmp_path.rglob("*")) == before

    return check


def edit_index(src, edit):
    index = json.loads((src / INDEX).read_text())
    edit(index["weight_map"])
    (src / INDEX).write_text(json.dumps(index))


def edit_header(path, edit):
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = edit(raw[8 : 8 + size].decode())
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + raw[8 + size :])


def test_missing_shard(checkpoint, refuses):
    src = checkpoint(shards=3)
    (src / "model-00002-of-00003.safetensors").unlink()
    refuses(src, r"lacks 1 of the 3 files .*model-00002-of-00003\.safetensors")
    (src / INDEX).unlink()
    refuses(src, r"lacks model-00002-of-00003\.safetensors, and has no model\.safetensors\.index\.json")


@pytest.mark.parametrize("cut", [1, 3000, "header", 5])
def test_truncated_shard(checkpoint, refuses, cut):
    src = checkpoint(shards=2)
    path = src / "model-00002-of-00002.safetensors"
    size = path.stat().st_size
    os.truncate(path, {"header": 100, 5: 5}.get(cut) or size - cut)
    refuses(src, r"model-00002-of-00002\.safetensors is truncated: .* bytes")


def test_file_with_a_tail(checkpoint, refuses):
    src = checkpoint()
    with (src / "model.safetensors").open("ab") as file:
        file.write(b"x")
    refuses(src, "longer than its header says")


def test_index_names_a_tensor_that_no_file_holds(checkpoint, refuses):
    src = checkpoint(shards=2)
    edit_index(src, lambda m: m.update({"model.layers.9.x.weight": "model-00001-of-00002.safetensors"}))
    refuses(src, r"names 1 tensors that no file holds: model\.layers\.9\.x\.weight")


def test_file_holds_a_tensor_that_the_index_does_not_name(checkpoint, refuses):
    src = checkpoint(shards=2)
    edit_index(src, lambda m: m.pop(DOWN))
    refuses(src, f"holds tensor {DOWN}, which {INDEX} does not name")


def test_index_puts_a_tensor_into_the_wrong_file(checkpoint, refuses):
    src = checkpoint(shards=2)

    def swap(weight_map):
        names = sorted(set(weight_map.values()))
        weight_map[DOWN] = names[1 - names.index(weight_map[DOWN])]

    edit_index(src, swap)
    refuses(src, f"puts tensor {DOWN} into")


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "sub/model.safetensors", ".."])
def test_index_leaves_the_folder(checkpoint, refuses, name):
    src = checkpoint(shards=2)
    edit_index(src, lambda m: m.update({DOWN: name}))
    refuses(src, "outside its folder" if name != ".." else "outside its folder|lacks 1 of")


def test_broken_index(checkpoint, refuses):
    src = checkpoint(shards=2)
    (src / INDEX).write_text("{}")
    refuses(src, "is not a safetensors index")


def test_tensor_in_two_shards(checkpoint, refuses):
    src = checkpoint(shards=2)
    other = src / "model-00002-of-00002.safetensors"
    save_file({**load_file(other), **load_file(src / "model-00001-of-00002.safetensors")}, other)
    refuses(src, "is in both model-00001-of-00002.safetensors and model-00002-of-00002.safetensors")


def test_tensor_twice_in_a_header(checkpoint, refuses):
    src = checkpoint()
    edit_header(src / "model.safetensors", lambda h: h.replace("layers.1.mlp.down_proj", "layers.0.mlp.down_proj"))
    refuses(src, f"'{DOWN}' appears twice")


def test_unknown_dtype(checkpoint, refuses):
    src = checkpoint()
    edit_header(src / "model.safetensors", lambda h: h.replace('"BF16"', '"F6_E2M3"', 1))
    refuses(src, "unknown dtype F6_E2M3")


def test_header_that_contradicts_itself(checkpoint, refuses):
    src = checkpoint()
    edit_header(src / "model.safetensors", lambda h: h.replace("[32,16]", "[32,17]", 1))
    refuses(src, r"needs 1,088 bytes, its header gives it 1,024")


def test_header_that_is_not_json(checkpoint, refuses):
    src = checkpoint()
    edit_header(src / "model.safetensors", lambda h: "[" + h[1:])
    refuses(src, "no valid safetensors header")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [DOWN, "model.norm.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("fmt", ["w8a8", "bf16"])
def test_non_finite_weight(checkpoint, refuses, value, name, fmt):
    src = checkpoint()
    tensors = load_file(src / "model.safetensors")
    tensors[name].view(-1)[3] = value
    save_file(tensors, src / "model.safetensors")
    refuses(src, f"tensor {name} of .* holds NaN, inf or values beyond bfloat16", format=fmt)


def test_value_beyond_the_dtype_of_the_config(checkpoint, refuses, tmp_path):
    weight = torch.randn(16, 24)
    weight[2, 2] = 70000.0
    src = checkpoint(dtype=torch.float32, tensors={DOWN: weight}, config={"torch_dtype": "float16"})
    refuses(src, f"{DOWN} .*beyond float16")
    convert(src, tmp_path / "out", format="bf16")


def test_too_little_disk(checkpoint, refuses, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**6, 10**6))
    refuses(checkpoint(), "0.00 GB free, the conversion needs 0.06 GB")


def test_output_exists(checkpoint, refuses, tmp_path):
    src = checkpoint()
    out = tmp_path / "out"
    out.write_text("a file")
    refuses(src, "is no folder")
    refuses(src, "is no folder", overwrite=True)
    out.unlink()
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    refuses(src, "not empty: choose another name or give --overwrite")
    refuses(src, "no config.json or no safetensors file, so it is no model folder", overwrite=True)
    (out / "config.json").write_text("{}")
    refuses(src, "no config.json or no safetensors file, so it is no model folder", overwrite=True)
    assert (out / "thesis.tex").read_text() == "precious"


def test_empty_output_folder_is_used(checkpoint, tmp_path):
    (tmp_path / "out").mkdir()
    convert(checkpoint(), tmp_path / "out")
    assert (tmp_path / "out" / "w8a8.safetensors").is_file()


def test_output_overlaps_the_source(checkpoint, refuses, tmp_path):
    src = checkpoint()
    link = tmp_path / "link"
    link.symlink_to(src)
    for out in (src, src / "converted", tmp_path, link, link / "x"):
        refuses(src, "overlap", out=out, overwrite=True)


def test_output_holds_the_files_that_the_source_links_to(checkpoint, refuses, tmp_path):
    """Hugging Face's cache: a snapshot is a folder of links to blobs."""
    src = checkpoint()
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0a1b"
    shutil.copytree(src, snapshot)
    blobs.mkdir()
    (blobs / "config.json").write_text("{}")
    shutil.move(snapshot / "model.safetensors", blobs / "blob")
    (snapshot / "model.safetensors").symlink_to(blobs / "blob")
    refuses(snapshot, "overlap", out=blobs, overwrite=True)


def test_overwrite_replaces_everything(checkpoint, tmp_path):
    src, out = checkpoint(), tmp_path / "out"
    convert(src, out, format="compressed-tensors")
    convert(src, out, overwrite=True)
    assert not (out / "model.safetensors").exists()
    assert (out / "w8a8.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


def appears(monkeypatch, out, *names):
    """Lets files appear in `out` while a conversion writes."""
    write = converter._write_side_files

    def write_and_appear(*args):
        write(*args)
        out.mkdir(exist_ok=True)
        for name in names:
            (out / name).write_text("precious")

    monkeypatch.setattr(converter, "_write_side_files", write_and_appear)


def test_output_that_appears_while_converting_is_kept(checkpoint, tmp_path, monkeypatch):
    src, out = checkpoint(), tmp_path / "out"
    appears(monkeypatch, out, "config.json", "model.safetensors")
    with pytest.raises(ConversionError, match=f"OUT {out} appeared while converting: .*--overwrite"):
        convert(src, out)
    assert {path.name: path.read_text() for path in out.iterdir()} == dict.fromkeys(
        ("config.json", "model.safetensors"), "precious"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]
    convert(src, out, overwrite=True)
    assert (out / "w8a8.safetensors").is_file()


def test_file_that_appears_while_converting_is_kept(checkpoint, tmp_path, monkeypatch):
    src, out = checkpoint(), tmp_path / "out"
    monkeypatch.setattr(converter, "_write_side_files", lambda *_: out.write_text("precious"))
    for overwrite in (False, True):
        out.unlink(missing_ok=True)
        with pytest.raises(ConversionError, match="appeared while converting"):
            convert(src, out, overwrite=overwrite)
        assert out.read_text() == "precious"


def test_overwrite_looks_again_at_the_end(checkpoint, tmp_path, monkeypatch):
    src, out = checkpoint(), tmp_path / "out"
    appears(monkeypatch, out, "thesis.tex")
    with pytest.raises(ConversionError, match="so it is no model folder: it is not overwritten"):
        convert(src, out, overwrite=True)
    assert [path.read_text() for path in out.iterdir()] == ["precious"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


def test_overwritten_folder_is_not_lost_where_another_appears(checkpoint, tmp_path, monkeypatch):
    src, out = checkpoint(), tmp_path / "out"
    convert(src, out, format="compressed-tensors")
    rename = os.rename

    def rename_late(folder, name):
        if Path(name) == out:
            appears_now = out / "config.json"
            out.mkdir(exist_ok=True)
            appears_now.write_text("precious")
        rename(folder, name)

    monkeypatch.setattr(staging.os, "rename", rename_late)
    with pytest.raises(ConversionError, match=r"what was to be replaced is in .*/\.out\.replaced-") as error:
        convert(src, out, overwrite=True)
    assert "\n" not in str(error.value)
    assert [path.read_text() for path in out.iterdir()] == ["precious"]
    (moved,) = tmp_path.glob(".out.*")
    assert (moved / "model.safetensors").is_file()


def test_second_of_two_conversions_fails(checkpoint, tmp_path, monkeypatch):
    src, out = checkpoint(), tmp_path / "out"
    write = converter._write_side_files
    code = "import sys; from w8a8_converters.convert import convert; convert(*sys.argv[1:], format='compressed-tensors')"

    def let_another_finish(*args):
        write(*args)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        subprocess.run([sys.executable, "-c", code, str(src), str(out)], env=environment, check=True)

    monkeypatch.setattr(converter, "_write_side_files", let_another_finish)
    with pytest.raises(ConversionError, match="appeared while converting"):
        convert(src, out)
    assert (out / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


def no_values_are_read(monkeypatch):
    def fail(*_):
        raise AssertionError("values were read")

    monkeypatch.setattr(converter, "_check_values", fail)


@pytest.mark.parametrize("out", ["file/out", "x" * 250, "x" * 300, "new/" + "x" * 250])
def test_output_that_cannot_be_made(checkpoint, refuses, tmp_path, monkeypatch, out):
    src = checkpoint()
    (tmp_path / "file").write_text("")
    no_values_are_read(monkeypatch)
    reasons = "Not a directory|File exists|File name too long"
    refuses(src, rf"OUT .* cannot be made in .* \(({reasons})\): choose", out=tmp_path / out)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_output_where_one_may_not_write(checkpoint, refuses, tmp_path, monkeypatch, code):
    """Root may write everywhere, so the system's refusal is made up."""
    src, mkdir = checkpoint(), os.mkdir

    def refused(path, *args, **options):
        if Path(path).parent == tmp_path:
            raise OSError(code, os.strerror(code), path)
        mkdir(path, *args, **options)

    monkeypatch.setattr(os, "mkdir", refused)
    no_values_are_read(monkeypatch)
    refuses(src, f"OUT {tmp_path}/out cannot be made in {tmp_path} .{os.strerror(code)}.: choose")


def test_failed_overwrite_keeps_the_old_folder(checkpoint, tmp_path, monkeypatch):
    src, out = checkpoint(), tmp_path / "out"
    convert(src, out, format="compressed-tensors")
    before = {path: path.read_bytes() for path in out.iterdir()}

    def fail(*args):
        raise OSError("disk on fire")

    monkeypatch.setattr(converter, "_write_side_files", fail)
    with pytest.raises(OSError, match="disk on fire"):
        convert(src, out, overwrite=True)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "src"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"skip": ["q_proj"]}, r"q_proj of model\.layers\.0\.self_attn would be skipped but not k_proj, v_proj"),
        ({"skip": ["down_prj"]}, "--skip down_prj matches no module .*near names: .*down_proj"),
        ({"skip": ["re:(x"]}, "not a regular expression"),
        ({"skip": ["self_attn", "mlp"]}, "no weight is left to quantize"),
        ({"skip": ["lm_head"], "quantize_lm_head": True}, "both name lm_head"),
        ({"skip": ["mlp"], "format": "bf16"}, "--skip has no effect with --format bf16"),
        ({"quantize_lm_head": True, "format": "bf16"}, "--quantize-lm-head has no effect"),
        (
            {"hadamard": "auto", "format": "bf16"},
            "--hadamard auto is for --format w8a8 only, not for bf16: nothing is quantized",
        ),
        (
            {"hadamard": 64, "format": "compressed-tensors"},
            "--hadamard 64 is for --format w8a8 only, not for compressed-tensors: its other readers would not transform",
        ),
        ({"hadamard": 48}, "--hadamard=48: expected auto, 0, 16, 32, 64 or 128"),
        ({"format": "int4"}, "format 'int4' is not known; known are w8a8, compressed-tensors, bf16"),
        ({"max_shard_size": "big"}, "'big' is not a size"),
        ({"max_shard_size": "4XB"}, "'4XB' is not a size"),
        ({"max_shard_size": "0GB"}, "'0GB' is not a size"),
        ({"max_shard_size": -5}, "is not a size"),
    ],
)
def test_options(checkpoint, refuses, options, match):
    refuses(checkpoint(), match, **options)


def test_tied_model_whose_lm_head_is_skipped_and_asked_for(checkpoint, refuses):
    refuses(checkpoint(tied=True), "both name lm_head", skip=["lm_head"], quantize_lm_head=True)


def test_unknown_skip_of_a_tied_model_names_a_layer(checkpoint, refuses):
    refuses(checkpoint(tied=True), "a name is like (gate|up|down|q|k|v|o)_proj$", skip=["nosuchmodule"])


def test_no_lm_head_at_all(checkpoint, refuses):
    src = checkpoint(tensors={"lm_head.weight": None}, config={"tie_word_embeddings": False})
    refuses(src, "has no lm_head", quantize_lm_head=True)


def test_stacked_experts(checkpoint, refuses, tmp_path):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    experts = torch.randn(4, 6, 8).to(torch.bfloat16)
    src = checkpoint(tensors={name: experts})
    refuses(src, rf"{name} \[4, 6, 8\] stacks the weights of several experts")
    report = convert(src, tmp_path / "out", skip=["experts"])
    assert "model.layers.0.mlp.experts" in report.ignore  # or vLLM would build int8 experts
    assert torch.equal(load_file(tmp_path / "out" / "w8a8.safetensors")[name], experts)
    convert(src, tmp_path / "bf16", format="bf16")


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "gptq"}},
        {"text_config": {"quantization_config": {"quant_method": "gptq"}}},
        {"compression_config": {"quant_method": "gptq"}},
    ],
    ids=str,
)
def test_quantized_config(checkpoint, refuses, config):
    refuses(checkpoint(config=config), "already quantized .*gptq.*original")


def test_quant_config_file(checkpoint, refuses):
    src = checkpoint()
    (src / "quant_config.json").write_text("{}")
    refuses(src, "already quantized .*quant_config.json")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_quantized_tensors(checkpoint, refuses, dtype):
    refuses(checkpoint(tensors={DOWN: torch.ones(16, 24).to(dtype)}), f"already quantized: tensor {DOWN} is")


def test_own_output_is_not_a_source(checkpoint, refuses, tmp_path):
    convert(checkpoint(), tmp_path / "converted")
    refuses(tmp_path / "converted", "converted: it is W8A8 already: serve it as it is$")


def test_compressed_tensors_w8a8_is_not_a_source(checkpoint, refuses, tmp_path):
    convert(checkpoint(), tmp_path / "converted", format="compressed-tensors")
    refuses(tmp_path / "converted", "converted: it is W8A8 already: serve it as it is$")


def test_sources_that_are_none(checkpoint, refuses, tmp_path):
    refuses(tmp_path / "nowhere", "does not exist")
    (tmp_path / "link").symlink_to("nowhere")
    refuses(tmp_path / "link", "link is a link to nowhere, which does not exist")
    empty = tmp_path / "empty"
    empty.mkdir()
    refuses(empty, "no config.json")
    (empty / "config.json").write_text("{")
    refuses(empty, "not JSON")
    (empty / "config.json").write_text("{}")
    refuses(empty, "no model_type")
    (empty / "config.json").write_text('{"model_type": "llama"}')
    refuses(empty, "holds no .*safetensors")
    (empty / "pytorch_model.bin").write_bytes(b"")
    refuses(empty, "pickle files .pytorch_model.bin.*save the model as safetensors")
    save_file({}, empty / "model.safetensors")
    refuses(empty, "holds no tensors")


@pytest.mark.parametrize("config", [False, True])
@pytest.mark.parametrize("from_quantized", [False, True])
def test_folder_of_gguf_files(refuses, tmp_path, config, from_quantized):
    src = tmp_path / "files"
    src.mkdir()
    (src / "b.gguf").write_bytes(b"GGUF")
    if config:
        (src / "config.json").write_text('{"model_type": "llama"}')
    refuses(src, f"files is a folder of GGUF files, .*: give one of them, as {src}/b.gguf$", from_quantized=from_quantized)
    (src / "a.GGUF").write_bytes(b"GGUF")
    refuses(src, rf"as {src}/a.GGUF \(it holds a.GGUF, b.gguf\)$", from_quantized=from_quantized)


def test_extra_files_are_not_used_but_noted(checkpoint, tmp_path):
    src = checkpoint(shards=2)
    save_file({"x": torch.ones(1)}, src / "model-00003-of-00003.safetensors")
    save_file({"x": torch.ones(1)}, src / "consolidated.safetensors")
    report = convert(src, tmp_path / "out")
    assert f"not in {INDEX}, not used: model-00003-of-00003.safetensors" in report.notes


def test_missing_tokenizer_is_noted(checkpoint, tmp_path):
    src = checkpoint()
    assert any("no tokenizer to carry over" in note for note in convert(src, tmp_path / "without").notes)
    (src / "tokenizer.json").write_text("{}")
    assert not any("tokenizer" in note for note in convert(src, tmp_path / "with").notes)


# The child stops in the middle of writing the second of several shards and says so.
CHILD = textwrap.dedent(
    """
    import sys, time
    from w8a8_converters.convert import convert

    def progress(stage, done, total):
        if stage == "write" and done > total / 2:
            print("writing", flush=True)
            time.sleep(60)

    convert(sys.argv[1], sys.argv[2], max_shard_size="1KB", overwrite=True, progress=progress)
    """
)


@pytest.fixture
def interrupted(checkpoint, tmp_path):
    """Runs a conversion of `src` in a child, sends a signal in mid-write, returns its exit status."""
    src = checkpoint()

    def run(kind: signal.Signals) -> int:
        roots = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-c", CHILD, str(src), str(tmp_path / "out")]
        environment = {**os.environ, "PYTHONPATH": roots}
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        try:
            assert child.stdout.readline() == b"writing\n"
            partial = list(tmp_path.glob(".out.partial-*"))
            assert len(partial) == 1
            assert list(partial[0].glob("w8a8-00002-of-*.safetensors")), "not in mid-write"
            child.send_signal(kind)
            return child.wait(timeout=30)
        finally:
            child.kill()
            child.stdout.close()
            child.wait()

    return run


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_ctrl_c_leaves_nothing(interrupted, tmp_path):
    assert interrupted(signal.SIGINT) != 0
    assert names(tmp_path) == ["src"]


def test_kill_leaves_no_output_and_the_next_run_cleans_up(interrupted, tmp_path, caplog):
    assert interrupted(signal.SIGKILL) == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    partial = [name for name in names(tmp_path) if name.startswith(".out.partial-")]
    assert len(partial) == 1
    convert(tmp_path / "src", tmp_path / "out")
    assert names(tmp_path) == ["out", "src"]
    assert f"removed {tmp_path / partial[0]}, left by an interrupted run" in caplog.text


def test_kill_while_overwriting_keeps_the_old_folder(interrupted, tmp_path):
    convert(tmp_path / "src", tmp_path / "out", format="compressed-tensors")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    interrupted(signal.SIGKILL)
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_folder_of_a_living_run_is_left_alone(checkpoint, tmp_path):
    running = tmp_path / f".out.partial-{staging.socket.gethostname()}-{os.getppid()}"
    elsewhere = tmp_path / ".out.partial-another.host-1"
    for folder in (running, elsewhere):
        folder.mkdir()
    convert(checkpoint(), tmp_path / "out")
    assert running.is_dir()
    assert elsewhere.is_dir()


def test_folder_moved_away_by_a_killed_overwrite_comes_back(checkpoint, tmp_path, caplog):
    src, out = checkpoint(), tmp_path / "out"
    convert(src, out, format="compressed-tensors")
    dead = subprocess.Popen(["true"])
    dead.wait()
    out.rename(tmp_path / f".out.replaced-{staging.socket.gethostname()}-{dead.pid}")
    staging.remove_stale(out, print)
    assert (out / "model.safetensors").is_file()
    assert names(tmp_path) == ["out", "src"]
