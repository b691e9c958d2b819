"""README and docs: the site builds strictly, what they name exists, and every command in them is run, or said not to be.

Run: make test ARGS=tests/scripts/test_docs.py. The table of commands is tests/docs_commands.toml.
"""

import ast
import importlib
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import env_page
import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
GROUPS = tomllib.loads((ROOT / "tests" / "docs_commands.toml").read_text(encoding="utf-8"))["group"]
FOLDERS = ("vllm_w8a8_plugin", "kernels", "converters", "tests", "benchmarks", "scripts", "docs", ".ci")


def shell_commands(text: str) -> list[str]:
    """Commands of the shell blocks of a page, without comments."""
    found = []
    for block in re.findall(r"^ *```(?:bash|sh|shell|console)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            command = re.sub(r"(^|\s+)#\s.*$", "", line).strip()
            if command:
                found.append(command)
    return found


def without_blocks(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


COMMANDS = list(dict.fromkeys(command for text in TEXTS.values() for command in shell_commands(text)))
HERE = [(command, group.get("after")) for group in GROUPS if group.get("here") for command in group["commands"]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs-material is not installed: make docs and make test install it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


def test_strict_build(site: Path) -> None:
    assert {page.stem for page in DOCS.glob("*.md")} <= {page.stem for page in site.glob("*.html")}
    linked = re.findall(r'href="(repository/[^"]+)"', (site / "benchmarks.html").read_text(encoding="utf-8"))
    assert linked
    assert all((site / link).is_file() for link in linked)


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="((?:https?:)?//[^"]+)"', text)
        assert loaded == [], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//", style.read_text(encoding="utf-8")), style.name


def test_page_of_environment_variables() -> None:
    assert TEXTS[env_page.PAGE] == env_page.page(), "run: make docs"


def test_readme_fits_three_screens() -> None:
    assert len(TEXTS[ROOT / "README.md"].splitlines()) <= 150


def slugs(text: str) -> set[str]:
    """Anchors of a page's headings, as MkDocs makes them."""
    heads = re.findall(r"^#+ +(.+)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = without_blocks(TEXTS[page])
    for link in re.findall(r"\]\((?!https?://)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in slugs(TEXTS[target]), link
    for name in re.findall(rf"`((?:{'|'.join(map(re.escape, FOLDERS))})/[^`\s]*)`", text):
        assert (ROOT / name).exists(), name


def test_every_command_is_in_the_table() -> None:
    listed = [command for group in GROUPS for command in group["commands"]]
    assert sorted(listed) == sorted(set(listed))
    missing = [command for command in COMMANDS if command not in listed]
    assert missing == [], "tests/docs_commands.toml has to say what runs them"
    assert [command for command in listed if command not in COMMANDS] == [], "in no page any more"


def test_a_new_command_is_noticed() -> None:
    page = "text\n\n```bash\nmake new  # a comment\nA=1 vllm serve X \\\n    --b  # c\n```\n\n```python\nmake other\n```\n"
    assert shell_commands(page) == ["make new", "A=1 vllm serve X      --b"]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group["commands"][0])
def test_what_runs_a_command_exists(group: dict) -> None:
    assert group.keys() <= {"here", "after", "by", "needs", "not_run", "commands"}
    assert sum(key in group for key in ("here", "by", "not_run")) == 1
    for name in group.get("by", ()):
        file, _, test = name.partition("::")
        assert (ROOT / file).is_file(), name
        if test:
            assert re.search(rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), name


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    said = {word for text in TEXTS.values() for word in re.findall(r"`make ([a-z]+)", text)}
    said |= {command.split()[1] for command in COMMANDS if command.startswith("make ")}
    assert said <= targets


def test_extras() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    for text in TEXTS.values():
        for extra in re.findall(r"pip install '\.\[(\w+)\]'", text):
            assert f'"{extra}": [' in setup, extra


def test_options_of_the_command_exist() -> None:
    """Also in running text, as `vllm-w8a8 convert --quality auto`."""
    typer = pytest.importorskip("typer")
    from vllm_w8a8_plugin.cli import app

    group = typer.main.get_command(app)
    for text in TEXTS.values():
        spans = re.findall(r"`(vllm-w8a8 [^`]+)`", without_blocks(text))
        for said in [*spans, *(c for c in shell_commands(text) if re.match(r"(?:\S+=\S* )*vllm-w8a8 ", c))]:
            name, *words = said.partition("vllm-w8a8 ")[2].split()
            if name == "--help":
                continue
            assert name in group.commands, said
            if name != "serve":  # takes all of vLLM's
                options = {option for parameter in group.commands[name].params for option in parameter.opts}
                assert {word for word in words if word.startswith("--")} <= options, said


def first_column(page: str, heading: str) -> list[str]:
    """The code spans in the first column of the table under a heading."""
    section = TEXTS[DOCS / page].partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def test_table_of_architectures() -> None:
    from w8a8_converters.gguf.architectures import ARCHITECTURES

    assert sorted(first_column("gguf.md", "Architectures")) == sorted(ARCHITECTURES)


def test_table_of_keys() -> None:
    pytest.importorskip("vllm")
    from vllm_w8a8_plugin.config import KNOWN_KEYS

    assert set(KNOWN_KEYS) <= set(first_column("formats.md", "`w8a8`"))


def test_table_of_kernels() -> None:
    from w8a8_kernels.select import Facts, select_scaled_mm

    with pytest.raises(ValueError, match="Known: ") as error:
        select_scaled_mm(Facts(None), forced="none of them")
    known = re.search(r"Known: ([^.]+)\.", str(error.value))[1].split(", ")
    assert sorted(first_column("gpus.md", "Which kernel runs")) == sorted(known)


def write_models(folder: Path) -> None:
    """Tiny random models under the names that the commands have."""
    from gguf_models import DENSE_NAMES, QKV_BIAS_NAMES, VOCAB, random_model, renaming, write_gguf
    from tiny_models import make_model
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Qwen2Config

    model = random_model(
        Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
    )
    metadata = {
        "block_count": 1,
        "context_length": 256,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "attention.head_count": 2,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
    }
    tensors = renaming(DENSE_NAMES | QKV_BIAS_NAMES, 1)(dict(model.state_dict()))
    write_gguf(folder / "SmolLM2-135M-Instruct.Q8_0.gguf", "qwen2", metadata, tensors)

    make_model(folder / "Qwen3-8B", "qwen3")
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {word: i for i, word in enumerate(("the", "of", "and", "to"), 3)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "Qwen3-8B" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "Qwen3-8B" / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "TEXT_FILE").write_text("the of and to and of the " * 150)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


def run_here(command: str) -> list[str]:
    """Runs a command of vllm-w8a8 in this process; returns its arguments."""
    from typer.testing import CliRunner

    from vllm_w8a8_plugin.cli import app

    program, *arguments = shlex.split(command)
    assert program == "vllm-w8a8"
    if arguments[0] == "doctor":
        pytest.importorskip("vllm")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return arguments


@pytest.mark.parametrize(("command", "after"), HERE)
def test_command_runs_as_written(
    command: str, after: str | None, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    if after is not None:
        run_here(after)
    arguments = run_here(command)
    if arguments[0] == "convert":
        assert (tmp_path / arguments[2] / "config.json").is_file()


def serve_parser():
    """The parser of `vllm serve`, wherever this release has it."""
    pytest.importorskip("vllm")
    for name in ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"):
        if importlib.util.find_spec(name.rpartition(".")[0]) and importlib.util.find_spec(name):
            module = importlib.import_module(name)
            return module.make_arg_parser(module.FlexibleArgumentParser())
    pytest.fail("this release of vLLM has its parser elsewhere")


def test_vllm_knows_the_options() -> None:
    parser = serve_parser()
    for command in COMMANDS:
        words = [word for word in shlex.split(command) if not re.match(r"[A-Z0-9_]+=", word)]
        if words[:2] == ["vllm", "serve"] or words[:2] == ["vllm-w8a8", "serve"]:
            assert parser.parse_args(words[2:]).model_tag == words[2], command


def messages() -> Iterator[str]:
    """Texts of the code, with a NUL where a value stands."""
    for folder in ("vllm_w8a8_plugin", "kernels", "converters"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_messages_are_those_of_the_code() -> None:
    text = TEXTS[DOCS / "troubleshooting.md"]
    known = list(messages())
    entries = re.findall(r"^#### (.+)\n\n(.+)", text, re.MULTILINE)
    assert len(entries) == text.count("\n#### ")
    for heading, answer in entries:
        if not answer.startswith(("vLLM's own words", "Stock vLLM")):
            pattern = re.compile(".*".join(map(re.escape, heading.split("..."))), re.DOTALL)
            assert any(pattern.search(message) for message in known), heading
