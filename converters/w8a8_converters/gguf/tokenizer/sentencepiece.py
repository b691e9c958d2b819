"""SentencePiece models of type BPE (`tokenizer.ggml.model` "llama"): Llama 2, Mistral, Gemma, Phi-3."""

from tokenizers import Tokenizer, decoders, models, normalizers


def sentencepiece_tokenizer(vocabulary: dict[str, int], scores: list[float], unknown: int, add_prefix: bool) -> Tokenizer:
    """Characters that are no piece become bytes; `add_prefix` puts a space before text, also after a special token."""
    tokens = list(vocabulary)
    merges = _merges_from_scores(vocabulary, scores)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if add_prefix else spaces
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if add_prefix else decoding)
    return tokenizer


def _merges_from_scores(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joined piece has the best score: that order, as a list of merges."""
    merges = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[index], index, vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]
