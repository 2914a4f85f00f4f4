"""The `tokenizers` backend that GGUF metadata describes.

A GGUF carries vocabulary, merges and the *name* of its pre-tokenizer, so the tokenizer is built
from those; converters that guess the rest add a BOS and join digits on the default model.

Source: the splits of each pre-tokenizer as the models' own tokenizer.json state them; "default",
and the BOS that a GGUF without a flag gets, follow llama.cpp's llama-vocab.cpp.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _splits(*patterns: str, gpt2: bool = False) -> Callable[[], Any]:
    def build() -> Any:
        steps = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
        return pre_tokenizers.Sequence(
            [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2)]
        )

    return build


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "default": _splits(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": _splits(gpt2=True),
    "llama-bpe": _splits(_WORDS % "{1,3}"),
    "qwen2": _splits(_WORDS % ""),
    "smollm": _splits(r"\p{N}", gpt2=True),  # every digit is a token of its own
}


def build(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the backend; every token keeps its id.

    Args:
        metadata: the file's key-value pairs.

    Returns:
        Byte-level BPE for `tokenizer.ggml.model` "gpt2", SentencePiece's BPE for "llama".

    Raises:
        ValueError: a key is missing, or its value names what is not known.
    """

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    def need(key: str) -> Any:
        if get(key) is None:
            raise ValueError(
                f"the GGUF lacks 'tokenizer.ggml.{key}'; without it the tokenizer must come from "
                "a Hugging Face directory."
            )
        return get(key)

    kind, tokens = need("model"), list(need("tokens"))
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"tokenizer.ggml.model={kind!r} is unknown; known are gpt2, llama.")
    types = list(get("token_type", [_NORMAL] * len(tokens)))
    if kind == "gpt2":
        backend = _byte_level(tokens, need("merges"), get("pre", "default"))
    else:
        prefix, unknown = get("add_space_prefix", True), get("unknown_token_id", 0)
        backend = _sentence_piece(tokens, types, need("scores"), prefix, unknown)
    _mark_special(backend, tokens, types)
    return backend


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether the model expects a BOS: its flag, else what its kind of tokenizer does."""
    flag = metadata.get("tokenizer.ggml.add_bos_token")
    if flag is not None:
        return bool(flag)
    sentence_piece = metadata["tokenizer.ggml.model"] == "llama"
    return sentence_piece or metadata.get("tokenizer.ggml.pre") == "llama-bpe"


def _byte_level(tokens: list[str], merges: Sequence[str], pre: str) -> Tokenizer:
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre={pre!r} is unknown; known are {', '.join(PRE_TOKENIZERS)}. "
            "Otherwise the tokenizer must come from a Hugging Face directory."
        )
    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise ValueError(f"tokenizer.ggml.merges has {merge!r}; a merge is two tokens.")
        pairs.append((left, right))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"tokenizer.ggml.merges do not fit the tokens: {error}") from error
    backend = Tokenizer(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(
    tokens: list[str], types: list[int], scores: Sequence[float], prefix: bool, unknown: int
) -> Tokenizer:
    """BPE that merges, as SentencePiece does, the pair whose joint token scores best."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = []
    for i, token in enumerate(tokens):
        if types[i] not in (_NORMAL, _USER_DEFINED):
            continue
        cuts = ((token[:n], token[n:]) for n in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(scores[i], pair) for pair in pairs]
    merges.sort(key=lambda merge: -merge[0])  # stable: ties stay in the order of the tokens
    backend = Tokenizer(
        models.BPE(
            vocabulary,
            [pair for _, pair in merges],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), space] if prefix else [space]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _mark_special(backend: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Have control and user-defined tokens matched whole, before any splitting."""
    control = [t for t, kind in zip(tokens, types, strict=True) if kind in (_UNKNOWN, _CONTROL)]
    user = [t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in user])
