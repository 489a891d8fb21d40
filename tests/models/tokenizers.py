"""Small tokenizers of the kinds that language models have, trained here."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and then it jumps again",
    "def f(x):\n    return x\n\n\nprint(f(12), f(345))",
    "日本語のテキスト 长城是中国的",
    "👩‍👩‍👧 👍🏽 naïve café",
] * 3


def byte_level() -> Backend:
    """As of GPT-2, Llama 3, Qwen: every byte has a character."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def sentencepiece(start: bool = True) -> Backend:
    """As of Llama 2 (`start`: a space is put before the text) and Gemma: spaces are U+2581, what is not in the
    vocabulary becomes bytes."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghij", "ab", "▁a", "▁ab", "▁▁"]
    merges = [("a", "b"), ("▁", "a"), ("▁", "ab"), ("▁", "▁")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if start else [replace])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if start else steps)
    backend.add_special_tokens(SPECIAL)
    return backend


def metaspace() -> Backend:
    """As of T5's descendants: the first token loses its space."""
    backend = Backend(models.BPE({"<unk>": 0, "▁": 1, "a": 2, "b": 3, "▁a": 4}, [("▁", "a")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def wordpiece() -> Backend:
    """As of BERT: words and their parts (##ing), lower case, no way to spell an unknown character."""
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def unigram() -> Backend:
    """As of T5: Unigram over words that begin with U+2581, no way to spell an unknown character."""
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend
