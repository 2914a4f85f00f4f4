"""Two tokenizers made on the spot: a token a byte, and one that merges as trained ones do."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from models.tokenizer import Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|model|>{% endif %}"
)


def byte_level(merges=()):
    """A byte-level BPE with a BOS that the template writes, as Llama 3's does."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {c: i for i, c in enumerate([*letters, *("".join(m) for m in merges)])}
    backend = Backend(models.BPE(vocab=tokens, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<|user|>", "<|model|>", "<|end|>"])
    number = backend.token_to_id
    return Tokenizer(
        definition=backend.to_str(), chat_template=TEMPLATE, bos_id=number("<s>"), add_bos=True,
        stop_ids=frozenset({number("<|end|>")}), special_tokens=(("bos_token", "<s>"),),
    )  # fmt: skip


def merging():
    """A byte-level BPE that merges over spaces, newlines and the frequent pairs of letters."""
    pairs = ["Ġt", "Ġa", "Ġs", "Ġi", "he", "in", "er", "re", "on", "at", "ĊĊ", ".Ċ", "or", "es"]
    return byte_level([(pair[0], pair[1]) for pair in pairs])
