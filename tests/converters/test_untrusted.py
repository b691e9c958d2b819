"""Checkpoints made to harm: files outside their folder, pipes and devices, absurd sizes, pickles, code, names that escape.

Each is refused in one line, with exit code 1, and nothing is written; or what could harm is not carried over and never run.
"""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from gguf import GGUFValueType as V
from gguf_pieces import Entry, string, take_apart, write_llama
from safetensors.torch import save_file
from typer.testing import CliRunner

from vllm_w8a8_plugin.cli import app
from w8a8_converters.convert import convert
from w8a8_converters.errors import ConversionError
from w8a8_converters.inspect import inspect

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
GATE = "model.layers.0.mlp.gate_proj.weight"
SIZE = 8 * 2**30  # of files that are holes on the disk
ROOTS = os.pathsep.join(path for path in sys.path if path)


@pytest.fixture
def command(tmp_path):
    """Runs `vllm-w8a8` in a process of its own, which is ended where it does not end itself."""

    def run(*arguments: str | Path, answer: str = "") -> subprocess.CompletedProcess:
        code = "from vllm_w8a8_plugin.cli import app; app()"
        environment = {**os.environ, "PYTHONPATH": ROOTS, "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
        call = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(
            call, cwd=tmp_path, env=environment, capture_output=True, text=True, input=answer, timeout=120
        )  # fmt: skip

    return run


@pytest.fixture(autouse=True)
def signal_handlers():
    """Those that `convert` sets in this process are taken back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def refuses(tmp_path):
    """Runs `convert` in this process; returns the one line of its error."""

    def run(source: Path, *options: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out"), *options])
        assert result.exit_code == 1, (result.stderr, result.exception)
        assert result.stdout == ""
        (line,) = [line for line in result.stderr.split("\n") if line.strip()]
        assert line.startswith("error: ")
        assert sorted(tmp_path.rglob("*")) == before
        return line

    return run


@pytest.fixture
def secret(tmp_path) -> Path:
    """A file of the machine that is no part of the checkpoint."""
    path = tmp_path / "elsewhere" / "secret"
    path.parent.mkdir()
    path.write_text('{"model_type": "llama", "password": "1234"}')
    return path


def put(folder: Path, name: str, target: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)


# Links out of the folder.


@pytest.mark.parametrize(
    "name", ["config.json", INDEX, "tokenizer.json", "generation_config.json", "notes.txt", "sub/merges.txt"]
)
@pytest.mark.parametrize("relative", [False, True], ids=["absolute", "relative"])
def test_link_out_of_the_folder(checkpoint, refuses, secret, name, relative):
    folder = checkpoint(shards=2)
    (folder / "sub").mkdir()
    target = os.path.relpath(secret, (folder / name).parent) if relative else secret
    put(folder, name, target)
    assert f"{name} is a link out of its folder, to {secret}: put the file itself there" in refuses(folder)


@pytest.mark.parametrize("with_index", [True, False])
def test_weights_that_link_out_of_the_folder(checkpoint, refuses, tmp_path, with_index):
    folder = checkpoint(shards=2)
    shutil.move(folder / SECOND, tmp_path / "private.safetensors")
    put(folder, SECOND, tmp_path / "private.safetensors")
    if not with_index:
        (folder / INDEX).unlink()
    assert f"{SECOND} is a link out of its folder" in refuses(folder)


def test_single_file_of_weights_that_links_out_of_the_folder(checkpoint, refuses, tmp_path):
    folder = checkpoint()
    shutil.move(folder / "model.safetensors", tmp_path / "private.safetensors")
    put(folder, "model.safetensors", tmp_path / "private.safetensors")
    assert "model.safetensors is a link out of its folder" in refuses(folder)


def test_folder_inside_that_links_out(checkpoint, secret, tmp_path):
    """What lies behind it is not the checkpoint's."""
    folder = checkpoint()
    (folder / "sub").symlink_to(secret.parent)
    (folder / "itself").symlink_to(folder)
    (folder / "gone.json").symlink_to("../nothing")
    for name in (".hidden", "optimizer.bin"):
        (folder / name).symlink_to(secret.parent)
    report = convert(folder, tmp_path / "out")
    assert not {"sub", "itself", "gone.json"} & set(os.listdir(tmp_path / "out"))
    (said,) = [note for note in report.notes if note.startswith("not carried over")]
    links = f"gone.json -> ../nothing, itself -> {folder}, sub -> {secret.parent}"
    assert said == f"not carried over, links that lead to no file: {links}; put the files themselves there"


def test_links_that_stay_inside(checkpoint, tmp_path):
    folder = checkpoint(shards=2)
    (folder / "files").mkdir()
    for name in (SECOND, "config.json"):
        shutil.move(folder / name, folder / "files" / f"_{name}")
        (folder / name).symlink_to(Path("files", f"_{name}"))
    (folder / "notes.txt").write_text("read me")
    (folder / "other.txt").symlink_to("notes.txt")
    report = convert(folder, tmp_path / "out")
    assert (tmp_path / "out" / "other.txt").read_text() == "read me"
    assert not [note for note in report.notes if note.startswith("not carried over")]


def test_settings_of_the_quantization_that_link_out(checkpoint, refuses, secret):
    folder = checkpoint()
    put(folder, "quantize_config.json", secret)
    assert "quantize_config.json is a link out of its folder" in refuses(folder, "--from-quantized")


def hub_cache(folder: Path, root: Path) -> Path:
    """The folder as the Hub's cache has it: a snapshot of links to blobs."""
    snapshot, blobs = root / "snapshots" / "0a1b", root / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.move(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", str(number)))
    return snapshot


def test_cache_of_the_hub(checkpoint, tmp_path):
    folder = checkpoint(shards=2)
    (folder / "tokenizer.json").write_text("{}")
    snapshot = hub_cache(folder, tmp_path / "models--a--b")
    report = convert(snapshot, tmp_path / "out")
    assert report.notes == []
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    (tmp_path / "link").symlink_to(snapshot)
    convert(tmp_path / "link", tmp_path / "again")


def test_blobs_of_a_cache_that_link_on(checkpoint, refuses, secret, tmp_path):
    folder = checkpoint()
    (folder / "tokenizer.json").write_text("{}")
    snapshot = hub_cache(folder, tmp_path / "models--a--b")
    put(snapshot, "tokenizer.json", secret)
    assert "tokenizer.json is a link out of its folder" in refuses(snapshot)
    blobs = tmp_path / "models--a--b" / "blobs"
    put(snapshot, "tokenizer.json", blobs / "secret")
    put(blobs, "secret", secret)
    assert "tokenizer.json is a link out of its folder" in refuses(snapshot)


def test_config_folder_of_a_gguf_that_links_out(refuses, secret, tmp_path):
    (gguf,) = write_llama(tmp_path / "model.gguf")
    folder = tmp_path / "config"
    folder.mkdir()
    put(folder, "config.json", secret)
    assert "config.json is a link out of its folder" in refuses(gguf, "--hf-config", str(folder))
    (folder / "config.json").unlink()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    put(folder, "tokenizer.json", secret)
    assert "tokenizer.json is a link out of its folder" in refuses(gguf, "--hf-config", str(folder))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()
    assert "tokenizer.json cannot be read: it is no regular file" in refuses(gguf, "--hf-config", str(folder))
    (folder / "tokenizer.json").rmdir()
    (folder / "tokenizer.json").touch()
    os.truncate(folder / "tokenizer.json", SIZE)
    assert "tokenizer.json has 8,589,934,592 bytes, expected" in refuses(gguf, "--hf-config", str(folder))


def test_part_of_a_gguf_that_links_out(refuses, tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    first, second, *_ = write_llama(folder / "model.gguf", tensors_per_part=6)
    shutil.move(second, tmp_path / "private.gguf")
    put(folder, second.name, tmp_path / "private.gguf")
    assert f"{second.name} is a link out of its folder" in refuses(first)
    # The file that the user names may be a link to anywhere.
    write_llama(folder / "whole.gguf")
    (tmp_path / "link.gguf").symlink_to(folder / "whole.gguf")
    convert(tmp_path / "link.gguf", tmp_path / "out")


# What an index may name.


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("../elsewhere/model.safetensors", "names a file outside its folder"),
        ("/etc/passwd", "names a file outside its folder"),
        ("sub/../../x.safetensors", "names a file outside its folder"),
        ("..", "names a file outside its folder"),
        ("config.json", "names no safetensors file: 'config.json'"),
        ("pytorch_model.bin", "names no safetensors file: 'pytorch_model.bin'"),
        ("x" * 300 + ".safetensors", "names no safetensors file: 'xxx"),
        ("\u0000.safetensors", "is not a safetensors index: it puts"),
        ("\ud800.safetensors", "is not a safetensors index: it puts"),
        ("\x1b[2J.safetensors", "is not a safetensors index: it puts"),
    ],
)
def test_index(checkpoint, refuses, name, match):
    folder = checkpoint(shards=2)
    content = json.loads((folder / INDEX).read_text())
    content["weight_map"][GATE] = name
    (folder / INDEX).write_text(json.dumps(content))
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert f"{INDEX} {match}" in refuses(folder)


# Files that never end, or are too large.

JSON_FILES = ("config.json", INDEX, "quantize_config.json")


@pytest.fixture
def impatient():
    """Ends a read that waits for ever."""

    def stop(*_):
        raise TimeoutError("it waits for ever")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ["config.json", INDEX, SECOND])
def test_pipe(checkpoint, refuses, impatient, name):
    folder = checkpoint(shards=2)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refuses(folder)
    assert inspect(folder).problems


@pytest.mark.parametrize("name", ["quantize_config.json", "tokenizer.json", "tokenizer_config.json", "sub/x.txt"])
def test_pipe_that_is_not_needed(checkpoint, impatient, tmp_path, name):
    """As if it were not there."""
    folder = checkpoint()
    (folder / "sub").mkdir()
    os.mkfifo(folder / name)
    convert(folder, tmp_path / "out")
    assert not (tmp_path / "out" / name).exists()
    assert inspect(folder).problems == []


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors"])
def test_pipe_of_weights_without_an_index(checkpoint, refuses, impatient, name):
    folder = checkpoint()
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / name)
    assert f"{name} cannot be read: it is no regular file" in refuses(folder)


DEVICES = """
import resource, shutil, sys
from pathlib import Path
from w8a8_converters.convert import convert
from w8a8_converters.errors import ConversionError
from w8a8_converters.inspect import inspect

resource.setrlimit(resource.RLIMIT_DATA, (2 * 10**9,) * 2)  # a device never ends
for name in sys.argv[1:]:
    folder = Path(shutil.copytree("src", name + "-src"))
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/dev/zero")
    inspect(folder)
    for quantized in (False, True):
        try:
            convert(folder, name + "-out", from_quantized=quantized)
        except ConversionError as error:
            print(error)
"""


def test_devices(checkpoint, tmp_path):
    checkpoint()
    names = [*JSON_FILES, "tokenizer.json", "model.safetensors"]
    call = [sys.executable, "-c", DEVICES, *names]
    environment = {**os.environ, "PYTHONPATH": ROOTS}
    result = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    # As these are not what is_file says is a file, some are as if they were not there; none is in the result.
    assert result.stdout
    assert not [name for name in names if (tmp_path / f"{name}-out" / name).is_symlink()]
    assert not any((tmp_path / f"{name}-out" / "tokenizer.json").exists() for name in names)


@pytest.mark.parametrize("name", JSON_FILES)
def test_json_of_absurd_size(checkpoint, refuses, name):
    folder = checkpoint(shards=2)
    (folder / name).touch()
    os.truncate(folder / name, SIZE)
    options = ["--from-quantized"] if name == "quantize_config.json" else []
    assert f"{name} has 8,589,934,592 bytes, expected 100,000,000 at most" in refuses(folder, *options)


def test_large_files_are_not_carried_over(checkpoint, tmp_path):
    folder = checkpoint()
    (folder / "tokenizer.json").touch()
    os.truncate(folder / "tokenizer.json", SIZE)
    report = convert(folder, tmp_path / "out")
    assert "not carried over, too large: tokenizer.json" in report.notes
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_inspect_reads_no_absurd_files(checkpoint):
    folder = checkpoint()
    for name in ("tokenizer.json", "tokenizer_config.json", "quantize_config.json"):
        (folder / name).touch()
        os.truncate(folder / name, SIZE)
    result = CliRunner().invoke(app, ["inspect", str(folder)], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert result.stderr.count("has 8,589,934,592 bytes, expected 100,000,000 at most") >= 2


def add_tensor(folder: Path, name: str, shape: list[int]) -> None:
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    end = len(raw) - 8 - size
    header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end]}
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + raw[8 + size :])


@pytest.mark.parametrize("shape", [[2**60, 0], [0, 2**60], [2**40, 2**40, 0], [10**400, 0]], ids=str)
def test_shape_of_nothing(checkpoint, refuses, shape):
    """It takes no bytes, and for ever to go through."""
    folder = checkpoint()
    add_tensor(folder, "x.weight", shape)
    assert "tensor x.weight has no values in a shape of [" in refuses(folder)


def test_empty_tensor(checkpoint, tmp_path):
    folder = checkpoint()
    add_tensor(folder, "x.bias", [0])
    convert(folder, tmp_path / "out")


def test_long_names_of_tensors(checkpoint, refuses):
    folder = checkpoint()
    add_tensor(folder, "x" * 10**6, [0])
    line = refuses(folder)
    assert "has 1,000,000 characters, expected 1,000 at most" in line
    assert len(line) < 600


# Code.


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_refused(checkpoint, refuses, tmp_path, name):
    folder = checkpoint()
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Payload(tmp_path / "mark")))
    line = refuses(folder)
    assert f"holds pickle files ({name}) and no safetensors" in line
    assert not (tmp_path / "mark").exists()


def test_pickle_by_another_name(checkpoint, refuses, tmp_path):
    folder = checkpoint()
    torch.save(Payload(tmp_path / "mark"), folder / "model.safetensors")
    assert "model.safetensors is truncated: its header" in refuses(folder)
    shutil.copy(folder / "model.safetensors", tmp_path / "model.gguf")
    assert "model.gguf is not a GGUF file" in refuses(tmp_path / "model.gguf")
    assert not (tmp_path / "mark").exists()


def test_pickles_are_not_carried_over(checkpoint, tmp_path):
    folder = checkpoint()
    data = pickle.dumps(Payload(tmp_path / "mark"))
    names = ("optimizer.bin", "a.PT", "b.pkl", "c.pickle", "d.joblib", "e.ckpt", "sub/f.pth")
    (folder / "sub").mkdir()
    for name in names:
        (folder / name).write_bytes(data)
    convert(folder, tmp_path / "out")
    assert not (tmp_path / "mark").exists()
    assert not [name for name in names if (tmp_path / "out" / name).exists()]


EVIL = "import pathlib\npathlib.Path({mark!r}).touch()\nraise SystemExit('the code of the checkpoint was run')\n"


@pytest.mark.parametrize(("model_type", "options"), [("evil", ["--equalize"]), ("llama", ["--quality", "auto"])])
def test_code_of_the_checkpoint_is_not_run(checkpoint, command, tmp_path, model_type, options):
    """Not even where somebody answers yes to transformers' question."""
    pytest.importorskip("transformers")
    auto_map = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel", "AutoModel": "evil.EvilModel"}
    folder = checkpoint(config={"model_type": model_type, "auto_map": auto_map, "architectures": ["EvilModel"]})
    settings = {
        "tokenizer_class": "EvilTokenizer",
        "auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "evil.py").write_text(EVIL.format(mark=str(tmp_path / "mark")))
    result = command("convert", folder, "out", *options, answer="yes\n" * 9)
    assert not (tmp_path / "mark").exists()
    assert "Do you wish to run the custom code" not in result.stdout + result.stderr
    assert result.returncode == 1, result.stderr  # transformers does not know the tokenizer


BOMB = "{% for i in range(10**9) %}{% for j in range(10**9) %}{{ ''.__class__ }}{% endfor %}{% endfor %}"


def test_chat_templates_are_not_run(checkpoint, tmp_path):
    """They are carried over as they are; no template engine is loaded."""
    (good,) = write_llama(tmp_path / "good.gguf")
    pieces = take_apart(good)
    pieces.extra_metadata = [Entry(string("tokenizer.chat_template"), V.STRING, string(BOMB))]
    (tmp_path / "model.gguf").write_bytes(pieces.pack())
    folder = checkpoint()
    (folder / "chat_template.jinja").write_text(BOMB)
    code = (
        # torch itself loads it in some releases.
        "import sys, torch; before = set(sys.modules)\n"
        "from w8a8_converters.convert import convert; from w8a8_converters.inspect import inspect\n"
        "for source in ('model.gguf', 'src'):\n    inspect(source)\n    convert(source, source + '-out')\n"
        "print('jinja2' in set(sys.modules) - before)"
    )
    environment = {**os.environ, "PYTHONPATH": ROOTS}
    call = [sys.executable, "-c", code]
    result = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "False\n"
    assert (tmp_path / "src-out" / "chat_template.jinja").read_text() == BOMB
    out = tmp_path / "model.gguf-out"
    assert any(BOMB in path.read_text() or json.dumps(BOMB)[1:-1] in path.read_text() for path in out.glob("*.j*"))


# Names that escape, and what is written under them.


@pytest.mark.parametrize("name", ["../../evil.weight", "/etc/evil.weight", "a/../../b.weight"])
def test_names_of_tensors_are_no_paths(checkpoint, tmp_path, name):
    before = set(tmp_path.iterdir())
    folder = checkpoint(tensors={name: torch.ones(4, 4)})
    convert(folder, tmp_path / "out" / "model", max_shard_size="1KB")
    assert set(tmp_path.iterdir()) - before == {folder, tmp_path / "out"}
    assert {path.parent for path in (tmp_path / "out").rglob("*")} == {tmp_path / "out", tmp_path / "out" / "model"}


@pytest.mark.parametrize(
    "name", ["w8a8.safetensors", "quant_config.json", "conversion_report.json", "w8a8.safetensors.index.json"]
)
def test_folders_in_the_way_of_what_is_written(checkpoint, tmp_path, name):
    """A side file in a folder of that name would make a folder of it."""
    folder = checkpoint()
    (folder / name).mkdir()
    (folder / name / "x.txt").write_text("x")
    report = convert(folder, tmp_path / "out")
    assert not (tmp_path / "out" / name).is_dir()
    assert report.files == ["w8a8.safetensors"]


def test_own_files_are_not_taken_from_the_checkpoint(checkpoint, tmp_path):
    folder = checkpoint()
    (folder / "conversion_report.json").write_text('{"layers": "forged"}')
    convert(folder, tmp_path / "out", format="bf16")
    assert json.loads((tmp_path / "out" / "conversion_report.json").read_text())["layers"] == []


def test_texts_that_utf8_has_not(checkpoint, tmp_path):
    """Half a surrogate pair is valid JSON."""
    folder = checkpoint(config={"note": "\ud800"})
    convert(folder, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["note"] == "\ud800"


def test_names_cannot_drive_the_terminal(checkpoint, refuses):
    """Escape sequences and line breaks in a file's name, and in a value that an error repeats."""
    folder = checkpoint(config={"quantization_config": {"quant_method": "\x1b[2Jx\nerror: all is well"}})
    line = refuses(folder)
    assert "\\x1b[2Jx\\nerror: all is well" in line
    (folder / "model.safetensors").unlink()
    (folder / "a\n\x1b]0;evil\x07.bin").write_bytes(b"x")
    assert "a\\n\\x1b]0;evil\\x07.bin" in refuses(folder)


def test_long_values_do_not_fill_the_terminal(checkpoint, refuses):
    folder = checkpoint(config={"quantization_config": {"quant_method": "x" * 10**6}})
    assert len(refuses(folder)) < 2100


def test_names_of_layers_are_no_markup(checkpoint, tmp_path):
    """The table of the worst layers takes them as they are."""
    name = "model.layers.0.mlp[/red].gate_proj"
    folder = checkpoint(tensors={f"{name}.weight": torch.randn(16, 16)})
    arguments = ["convert", str(folder), str(tmp_path / "out"), "--skip", "model.layers.1"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.exception


@pytest.mark.parametrize("others", [["LlamaForCausalLM"], []], ids=["served", "not served"])
def test_inspect_cannot_drive_the_terminal(checkpoint, others):
    folder = checkpoint(config={"architectures": ["\x1b[2Jx", *others]})
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "\x1b]0;evil\x07"}}))
    result = CliRunner().invoke(app, ["inspect", str(folder)], env={"COLUMNS": "200"})
    problems = result.stderr.splitlines()
    assert all(line.startswith("problem: architecture \\x1b[2Jx is known neither") for line in problems)
    assert result.exit_code == len(problems) <= (0 if others else 1)
    assert "\x1b" not in result.stdout + result.stderr
    assert "\\x1b[2Jx" in result.stdout


# Values of a config of other types than expected: one error, or none.

WRONG = (None, True, -1, 2**70, 1.5, float("nan"), "x", [], ["x"], {}, {"x": 1})


def test_config_of_wrong_types(checkpoint, tmp_path):
    folder = checkpoint()
    good = json.loads((folder / "config.json").read_text())
    keys = [*good, "quantization_config", "compression_config", "text_config", "auto_map", "layer_types"]
    for key in keys:
        for value in WRONG:
            (folder / "config.json").write_text(json.dumps({**good, key: value}))
            inspect(folder)
            if isinstance(value, (list, dict)):
                with suppress(ConversionError):
                    convert(folder, tmp_path / "out", overwrite=True)


def test_extra_files_of_every_kind(checkpoint, tmp_path):
    """Sockets, pipes and folders beside the weights are left where they are."""
    folder = checkpoint()
    os.mkfifo(folder / "pipe.txt")
    (folder / "merges.txt").mkdir()
    (folder / "nothing.json").symlink_to("gone")
    save_file({"x": torch.ones(1)}, folder / "adapter_model.safetensors")
    convert(folder, tmp_path / "out")
    assert not {"pipe.txt", "merges.txt", "nothing.json", "adapter_model.safetensors"} & set(os.listdir(tmp_path / "out"))
