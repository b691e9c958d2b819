"""Where generation ends, how chats are written and how tokens are drawn, from a GGUF file's metadata."""

from w8a8_converters.gguf.metadata import FRACTION, NOT_NEGATIVE, POSITIVE, POSITIVE_FRACTION, number, text, wrong
from w8a8_converters.gguf.reader import GGUFFile

_CONTROL = 3  # tokenizer.ggml.token_type
# Control tokens that end a document, whichever end the metadata name: an instruction-tuned Gemma names <end_of_turn>, Qwen
# <|im_end|>. Of another type they are text: Gemma's </s> is the tag of HTML.
_DOCUMENT_ENDS = ("<eos>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<EOT>", "▁<EOT>")
# They end a turn where the chat template writes them. A base model's vocabulary holds them, too, and it was not taught them.
_TURN_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>"),
    *("<|flush|>", "<end_of_utterance>", "[EOT]", "[e~["),
)
# GLM has no token for the end: a turn ends where that of the user, or of a tool, begins.
_GLM, _GLM_TURN_ENDS = "[gMASK]", ("<|user|>", "<|observation|>")
# Where a turn is made of several messages, <|end|> ends only one of them: gpt-oss goes on after its reasoning.
_MESSAGE_END, _ENDS_OF_MESSAGES = "<|end|>", ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})

# All but top_k, which is an integer.
_SAMPLING = {
    "temp": ("temperature", NOT_NEGATIVE),
    "top_p": ("top_p", POSITIVE_FRACTION),
    "min_p": ("min_p", FRACTION),
    "penalty_repeat": ("repetition_penalty", POSITIVE),
}
CHAT_TEMPLATE, NAMED_CHAT_TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_template."

ChatTemplate = str | list[dict[str, str]] | None


def end_tokens(tokens: list[str], types: list[int], ids: dict[str, int], template: ChatTemplate) -> list[int]:
    """The ids at which generation stops, that of config.json first.

    Args:
        tokens: the vocabulary.
        types: of the tokens.
        ids: ids that the metadata name, by role; those of eos, eot and eom end generation.
        template: chat template or templates.
    """
    index_of = {token: index for index, token in enumerate(tokens)}
    turn_ends = (*_TURN_ENDS, *(_GLM_TURN_ENDS if _GLM in index_of else ()))
    templates = template if isinstance(template, list) else [{"template": template or ""}]
    written = [token for token in turn_ends if any(token in one["template"] for one in templates)]
    if any(group <= index_of.keys() for group in _ENDS_OF_MESSAGES):
        written = [token for token in written if token != _MESSAGE_END]
    control = [token for token in _DOCUMENT_ENDS if token in index_of and types[index_of[token]] == _CONTROL]
    ends = [ids[role] for role in ("eos", "eot", "eom") if role in ids]
    ends += [index_of[token] for token in (*written, *control) if token in index_of]
    return list(dict.fromkeys(ends))


def chat_template(file: GGUFFile) -> ChatTemplate:
    """The file's chat template; where it has several, all of them by name."""
    default = text(file, CHAT_TEMPLATE) if CHAT_TEMPLATE in file.metadata else None
    keys = [key for key in file.metadata if key.startswith(NAMED_CHAT_TEMPLATES)]
    named = {key.removeprefix(NAMED_CHAT_TEMPLATES): text(file, key) for key in keys}
    if not named:
        return default
    if default is not None:
        named = {"default": default, **named}
    return [{"name": name, "template": template} for name, template in named.items()]


def sampling_defaults(file: GGUFFile) -> dict[str, float | int | bool]:
    """How the file says tokens are to be drawn, under the names of generation_config.json."""
    defaults: dict[str, float | int | bool] = {}
    for key, (name, numbers) in _SAMPLING.items():
        if f"general.sampling.{key}" in file.metadata:
            defaults[name] = number(file, f"general.sampling.{key}", numbers=numbers)
    top_k = "general.sampling.top_k"
    if top_k in file.metadata:
        if type(file.metadata[top_k]) is not int:
            raise wrong(file, top_k, "one integer")
        defaults["top_k"] = max(file.metadata[top_k], 0)  # llama.cpp takes all tokens also with -1
    if defaults.keys() - {"repetition_penalty"}:
        defaults["do_sample"] = defaults.get("temperature") != 0
    return defaults
