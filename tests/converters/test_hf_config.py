"""--hf-config: the config and tokenizer of a folder in place of those of a GGUF file's metadata."""

import json

import pytest
from gguf_models import TOKENIZER, write_gguf
from test_gguf_llama import METADATA, llama, rope, saved, to_gguf

from w8a8_converters.convert import convert
from w8a8_converters.errors import ConversionError
from w8a8_converters.gguf.source import GGUFSource


@pytest.fixture
def model(tmp_path):
    """A GGUF file with scaled positions that its metadata do not tell of, and the folder it was made from."""
    scaled = llama(rope_parameters=rope("linear", factor=4.0), tie_word_embeddings=True)
    scaled.save_pretrained(tmp_path / "reference")
    tensors = saved(tmp_path / "reference")
    (tmp_path / "reference" / "generation_config.json").unlink()
    (tmp_path / "reference" / "model.safetensors").unlink()

    def write(**metadata):
        return write_gguf(tmp_path / "model.gguf", "llama", METADATA | metadata, to_gguf(tensors))

    write.folder, write.scaled = tmp_path / "reference", scaled
    return write


def change(folder, **entries):
    """Entries of config.json that are other; None takes one out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_config_alone(model, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    change(
        model.folder, quantization_config=quantized, dtype="float16", auto_map={"AutoConfig": "code.Config"}, eos_token_id=7
    )
    path = model()
    report = convert(path, tmp_path / "out", format="bf16", hf_config=model.folder)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert not {"quantization_config", "dtype", "auto_map"} & set(config)
    assert config["eos_token_id"] == 7  # TOKENIZER says 2
    # The tokenizer and what goes with it are still those of the metadata.
    for name, content in GGUFSource(path).side_files.items():
        assert (tmp_path / "out" / name).read_bytes() == content
    assert report.notes == [f"taken from {model.folder} instead of the metadata: config.json"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    ids = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model.scaled(ids).logits)


def test_tokenizer_and_generation_config(model, tmp_path):
    files = {
        "tokenizer.json": "{}",
        "tokenizer_config.json": '{"a": 1}',
        "chat_template.jinja": "{{ messages }}",
        "additional_chat_templates/tool.jinja": "{{ tools }}",
        "generation_config.json": '{"eos_token_id": [5, 6]}',
        "README.md": "not taken",
        "code.py": "not taken",
    }
    for name, content in files.items():
        (model.folder / name).parent.mkdir(exist_ok=True)
        (model.folder / name).write_text(content)
    # A tokenizer that is not known is in nobody's way then.
    path = model(**{"tokenizer.ggml.model": "no such kind"})
    with pytest.raises(ConversionError, match="no such kind"):
        convert(path, tmp_path / "out")
    convert(path, tmp_path / "out", hf_config=model.folder)
    taken = {name for name in files if name not in ("README.md", "code.py")}
    assert {name: (tmp_path / "out" / name).read_text() for name in taken} == {name: files[name] for name in taken}
    written = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert written == taken | {"config.json", "conversion_report.json", "quant_config.json", "w8a8.safetensors"}


def test_a_tokenizer_without_generation_config_gets_none(model, tmp_path):
    (model.folder / "tokenizer.json").write_text("{}")
    convert(model(), tmp_path / "out", format="bf16", hf_config=model.folder)
    assert not (tmp_path / "out" / "generation_config.json").exists()


def test_special_ids_that_the_config_lacks_are_the_metadata_s(model, tmp_path):
    change(model.folder, eos_token_id=None, bos_token_id=None)
    convert(model(), tmp_path / "out", format="bf16", hf_config=model.folder)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == TOKENIZER["tokenizer.ggml.eos_token_id"]
    assert config["bos_token_id"] == TOKENIZER["tokenizer.ggml.bos_token_id"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"hidden_size": 64}, r"config.json does not fit .*model.gguf: it has hidden_size 64, the file 32"),
        ({"num_hidden_layers": 3}, "it has num_hidden_layers 3, the file 2"),
        ({"num_attention_heads": 8}, "it has num_attention_heads 8, the file 4"),
        ({"num_key_value_heads": 4}, "it has num_key_value_heads 4, the file 2"),
        ({"intermediate_size": 40}, "it has intermediate_size 40, the file 48"),
        ({"vocab_size": 32000}, "it has vocab_size 32000, the file"),
        ({"hidden_size": None, "text_config": {"hidden_size": 32}}, "it has no hidden_size, the file 32"),
        ({"tie_word_embeddings": False}, "it has tie_word_embeddings false, the file no output.weight"),
        ({"model_type": None}, "config.json does not describe a model: it has no model_type"),
    ],
)
def test_configs_that_do_not_fit(model, tmp_path, entries, message):
    change(model.folder, **entries)
    with pytest.raises(ConversionError, match=message) as error:
        convert(model(), tmp_path / "out", hf_config=model.folder)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_what_a_config_need_not_say(model, tmp_path):
    change(model.folder, num_key_value_heads=None, head_dim=None)
    convert(model(), tmp_path / "out", format="bf16", hf_config=model.folder)


def test_options_that_do_not_fit(model, checkpoint, tmp_path):
    with pytest.raises(ConversionError, match="--hf-config is for GGUF files, a folder has its own config"):
        convert(checkpoint(), tmp_path / "out", hf_config=model.folder)
    with pytest.raises(ConversionError, match=r"nowhere has no config\.json: give a folder with the Hugging Face config"):
        convert(model(), tmp_path / "out", hf_config=tmp_path / "nowhere")
    with pytest.raises(ConversionError, match="overlap: choose a folder elsewhere"):
        convert(model(), model.folder, hf_config=model.folder, overwrite=True)


def test_command(model, tmp_path):
    from typer.testing import CliRunner

    from vllm_w8a8_plugin.cli import app

    arguments = ["convert", str(model()), str(tmp_path / "out"), "--hf-config", str(model.folder)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "rope_parameters" in json.loads((tmp_path / "out" / "config.json").read_text())
