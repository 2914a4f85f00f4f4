import json
import sys

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from models import tokenizer
from models.tokenizer import Tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["1 2", "12 3", "123 4", "h e", "l l", "he ll", "hell o", "Ġ hello"]
SPECIAL = ["<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
TOKENS = [*SPECIAL, *BYTES, *(m.replace(" ", "") for m in MERGES), "zqx", "<tool>"]
TYPES = [3] * 4 + [1] * (len(TOKENS) - 5) + [4]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "{% if m.role == 'bad' %}{{ raise_exception('no role bad') }}{% endif %}\n"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt and tools is none %}<|im_start|>assistant\n{% endif %}"
)


def metadata(**keys):
    base = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "token_type": TYPES,
        "merges": MERGES,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    base = {k: v for k, v in (base | keys).items() if v is not None}
    made = {f"tokenizer.ggml.{k}": v for k, v in base.items()}
    return made | {"tokenizer.chat_template": TEMPLATE}


def pieces(built, text, **options):
    return [TOKENS[i] for i in built.encode(text, **options)]


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("gpt-2", ["1234", "12"]),
        ("default", ["123", "4", "12"]),  # its last rule cuts a run into threes from the left
        ("llama-bpe", ["123", "4", "12"]),
        ("qwen2", ["1", "2", "3", "4", "1", "2"]),
        ("smollm", ["1", "2", "3", "4", "1", "2"]),
    ],
)
def test_pre_tokenizers_split_digits_each_their_way(pre, digits):
    built = tokenizer.from_gguf(metadata(pre=pre))
    assert pieces(built, "1234") + pieces(built, "12") == digits
    assert pieces(built, "hello hello") == ["hello", "Ġhello"]
    for text in ("héllo  wörld\n\n\tx=1", "日本語 🤖", "I'm DON'T 3.14%"):
        assert built.decode(built.encode(text)) == text


def test_llama_bpe_takes_whole_words_of_the_vocabulary_first():
    assert pieces(tokenizer.from_gguf(metadata(pre="llama-bpe")), "zqx") == ["zqx"]
    assert pieces(tokenizer.from_gguf(metadata(pre="gpt-2")), "zqx") == ["z", "q", "x"]


def test_qwen2_composes_accents():
    built = tokenizer.from_gguf(metadata(pre="qwen2"))
    assert built.encode("e\u0301") == built.encode("\u00e9")


def test_special_tokens_are_whole_or_letters():
    built = tokenizer.from_gguf(metadata())
    text = "<|im_start|>hello<|im_end|><tool>"
    assert pieces(built, text) == ["<|im_start|>", "hello", "<|im_end|>", "<tool>"]
    letters = pieces(built, text, special=False)
    assert "<|im_start|>" not in letters and len(letters) > 15
    assert pieces(built, text)[0] == "<|im_start|>"  # the two views do not disturb each other
    assert built.decode(built.encode(text)) == "hello<tool>"
    assert built.decode(built.encode(text), special=True) == text
    assert built.stop_ids == {2, 3}


@pytest.mark.parametrize(
    ("keys", "adds"),
    [
        ({"pre": "smollm"}, False),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"add_bos_token": True}, True),
        ({"add_bos_token": True, "bos_token_id": None}, False),
    ],
)
def test_bos_follows_the_flag_and_is_never_doubled(keys, adds):
    built = tokenizer.from_gguf(metadata(**keys))
    assert built.add_bos == adds
    assert built.encode("hello")[0] != 0
    assert (built.encode("hello", bos=True)[0] == 0) == adds
    assert built.encode("<|begin_of_text|>hello", bos=True)[:2].count(0) == 1


def test_chat_renders_the_template():
    built = tokenizer.from_gguf(metadata())
    text = built.chat([{"role": "user", "content": "hi"}])
    turn = "<|im_start|>user\nhi<|im_end|>\n"
    assert text == f"<|begin_of_text|>{turn}<|im_start|>assistant\n"
    text = built.chat([{"role": "user", "content": "hi"}], add_generation_prompt=False)
    assert text == f"<|begin_of_text|>{turn}"
    with pytest.raises(ValueError, match="refuses these messages: no role bad"):
        built.chat([{"role": "bad", "content": ""}])
    plain = {k: v for k, v in metadata().items() if k != "tokenizer.chat_template"}
    with pytest.raises(ValueError, match="has no chat_template"):
        tokenizer.from_gguf(plain).chat([])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"merges": None}, "lacks 'tokenizer.ggml.merges'"),
        ({"tokens": None}, "lacks 'tokenizer.ggml.tokens'"),
        ({"model": None}, "lacks 'tokenizer.ggml.model'"),
        ({"model": "bert"}, "tokenizer.ggml.model='bert' is unknown; known are gpt2, llama"),
        ({"model": "llama"}, "lacks 'tokenizer.ggml.scores'"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre='tekken' is unknown; known are default, gpt-2,"),
        ({"merges": ["ab"]}, "merges has 'ab'"),
        ({"merges": ["q q"]}, "merges do not fit the tokens"),
    ],
)
def test_gguf_errors_name_the_key(keys, message):
    with pytest.raises(ValueError, match=message):
        tokenizer.from_gguf(metadata(**keys))


def sentence_piece():
    words = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "ca", "▁▁", "ba"]
    scores = [-20.0, -21, -22, -23, -2, -1, -6, -5, -4, -3, -7, -8]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    types = [2, 3, 3] + [6] * 256 + [1] * len(words)
    keys = {"model": "llama", "tokens": tokens, "token_type": types, "merges": None, "pre": None}
    return tokens, metadata(**keys, scores=[0.0] * 259 + scores, bos_token_id=1)


def best_pair_merging(text, tokens, scores):
    """SentencePiece's own loop: join the adjacent pair whose token scores best, leftmost first."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [
            (-scores[t], i)
            for i, t in enumerate(map("".join, zip(parts, parts[1:], strict=False)))
            if t in scores
        ]
        if not joined:
            break
        _, i = min(joined)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = {t: i for i, t in enumerate(tokens)}
    out = []
    for part in parts:
        raw = [f"<0x{b:02X}>" for b in part.encode()]
        out += [ids[part]] if part in ids else [ids[b] for b in raw]
    return out


def test_sentence_piece_merges_by_score_and_falls_back_to_bytes():
    tokens, made = sentence_piece()
    built = tokenizer.from_gguf(made)
    scores = dict(zip(tokens[259:], made["tokenizer.ggml.scores"][259:], strict=True))
    draw = np.random.RandomState(0)
    texts = ["".join(draw.choice(list("abc "), 12)) for _ in range(50)]
    for text in [*texts, "abc é", "日"]:
        assert built.encode(text) == best_pair_merging(text, tokens, scores), text
        assert built.decode(built.encode(text)) == text
    assert built.add_bos and built.encode("ab", bos=True)[0] == 1 and built.stop_ids == {2}
    made["tokenizer.ggml.add_space_prefix"] = False
    assert tokenizer.from_gguf(made).encode("ab") == [tokens.index("ab")]


def test_hf_directory_gives_the_same_tokenizer(tmp_path):
    built = tokenizer.from_gguf(metadata(pre="qwen2"))
    (tmp_path / "tokenizer.json").write_text(built.definition)
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 260]}))
    loaded = tokenizer.from_hf(tmp_path)
    text = "<|im_start|>hello 1234 é<|im_end|>"
    for special in (True, False):
        assert loaded.encode(text, special=special) == built.encode(text, special=special)
    messages = [{"role": "user", "content": "hi"}]
    assert loaded.chat(messages) == built.chat(messages)
    assert loaded.stop_ids == {2, 3, 260} and loaded.bos_id == 0 and not loaded.add_bos
    assert Tokenizer.from_json(loaded.to_json()) == loaded
    assert "torch" not in sys.modules
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields | {"add_bos_token": True}))
    assert tokenizer.from_hf(tmp_path).encode("hello", bos=True)[0] == 0


def test_hf_directory_without_a_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="holds no tokenizer that can be read"):
        tokenizer.from_hf(tmp_path)
