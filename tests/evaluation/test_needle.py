import pytest

from kvjax.evaluation import needle, text

BOS, START, END = 256, 257, 258
SPECIALS = {"<bos>": BOS, "<start>": START, "<end>": END}


class Bytes:
    """A token a byte, three special tokens; the template may write the BOS as some do."""

    bos_id = BOS

    def __init__(self, add_bos=False, template_bos=False):
        self.add_bos, self.template_bos = add_bos, template_bos

    def encode(self, text, bos=False):
        for name, number in SPECIALS.items():
            text = text.replace(name, chr(0xE000 + number))
        ids = [BOS] if bos else []
        for char in text:
            special = 0xE000 <= ord(char) < 0xE200
            ids += [ord(char) - 0xE000] if special else list(char.encode())
        return ids

    def decode(self, ids):
        names = {number: name for name, number in SPECIALS.items()}
        data = b"".join(names[i].encode() if i in names else bytes([i]) for i in ids)
        return data.decode(errors="replace")

    def chat(self, messages, add_generation_prompt=True):
        turns = "".join(f"<start>{m['role']}\n{m['content']}<end>\n" for m in messages)
        tail = "<start>assistant\n" if add_generation_prompt else ""
        return ("<bos>" if self.template_bos else "") + turns + tail


class Words(Bytes):
    """Merges over the space before a word and over runs of newlines, as BPE does."""

    def __init__(self):
        super().__init__()
        self.words = {}

    def encode(self, text, bos=False):
        import re

        pieces = re.findall(r"<start>|<end>| ?[A-Za-z]+| ?\d|[^\sA-Za-z\d]+\n*|\s", text)
        return [self.words.setdefault(piece, len(self.words) + 1000) for piece in pieces]

    def decode(self, ids):
        names = {number: word for word, number in self.words.items()}
        return "".join(names[i] for i in ids)


@pytest.mark.parametrize("tokenizer", [Bytes(), Words()], ids=["bytes", "words"])
@pytest.mark.parametrize("haystack", ["noise", "text"])
@pytest.mark.parametrize("num_needles", [1, 4])
def test_every_length_is_exact_and_every_needle_whole(tokenizer, haystack, num_needles):
    shortest = 900 if isinstance(tokenizer, Words) is False else 300
    for extra, depth in enumerate([0.0, 0.1, 0.37, 0.5, 0.9, 1.0, 0.5, 0.25, 0.75, 0.6]):
        prompt = needle.build(
            tokenizer,
            num_tokens=shortest + extra,
            depth=depth,
            haystack=haystack,
            num_needles=num_needles,
            seed=extra,
        )
        assert len(prompt.context_ids) == shortest + extra
        context = tokenizer.decode(prompt.context_ids)
        for key, value, span in zip(prompt.keys, prompt.values, prompt.spans, strict=True):
            sentence = f"special magic number{'s' * (num_needles == 1)} for {key} is: {value}."
            assert context.count(sentence) == 1 and context.count(value) == 1
            shown = tokenizer.decode(prompt.context_ids[slice(*span)]).strip()
            assert shown in (f"One of the {sentence}", f"The {sentence}")
        assert len(set(prompt.values)) == len(set(prompt.keys)) == num_needles


def test_the_three_parts_make_the_chat():
    tokenizer = Bytes()
    prompt = needle.build(tokenizer, num_tokens=700, depth=0.5, seed=3)
    whole = tokenizer.decode(prompt.context_ids + prompt.question_ids + prompt.answer_ids)
    assert whole.startswith("<start>user\nSome special magic numbers are hidden")
    question = f"\n\n{prompt.question}<end>\n<start>assistant\n{prompt.answer_prefix}"
    assert whole.endswith(f"{question} {prompt.answer}")
    assert prompt.answer == prompt.values[0] and prompt.keys[0] in prompt.question
    assert f"{prompt.answer_prefix} {prompt.answer}." in whole  # the prefix mirrors the needle
    # question and answer stand outside the context: what is compressed first is agnostic of them
    assert prompt.question not in tokenizer.decode(prompt.context_ids)
    assert prompt.max_new_tokens == len(prompt.answer_ids) == 8


def test_needle_stands_where_depth_says():
    places = []
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        prompt = needle.build(Bytes(), num_tokens=4000, depth=depth, haystack="text", seed=1)
        (start, stop), intro = prompt.spans[0], len(needle.INTRODUCTION) + 12
        rest = len(prompt.context_ids) - intro - (stop - start)
        places.append((start - intro) / rest)
    assert places == sorted(places)
    assert max(abs(a - b) for a, b in zip(places, (0, 0.25, 0.5, 0.75, 1), strict=True)) < 0.06
    assert needle.depth_grid(4) == (0.125, 0.375, 0.625, 0.875)


def test_four_needles_lie_apart():
    prompt = needle.build(Bytes(), num_tokens=4000, depth=0.1, num_needles=4, seed=1)
    starts = sorted(start for start, _ in prompt.spans)
    assert min(b - a for a, b in zip(starts, starts[1:], strict=False)) > 600
    assert prompt.spans[0][0] == starts[0] and prompt.task == "needle_noise_7_multikey4"


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("template_bos", [False, True])
def test_bos_at_most_once(add_bos, template_bos):
    tokenizer = Bytes(add_bos, template_bos)
    prompt = needle.build(tokenizer, num_tokens=600, depth=0.5, seed=0)
    assert prompt.context_ids.count(BOS) == int(add_bos or template_bos)
    assert BOS not in prompt.context_ids[1:] + prompt.question_ids + prompt.answer_ids
    assert needle.running_text(tokenizer, 50).count(BOS) == int(add_bos)


def test_seed_decides_everything():
    def build(seed):
        return needle.build(Bytes(), num_tokens=900, depth=0.5, haystack="text", seed=seed)

    assert build(5) == build(5)
    assert build(5).values != build(6).values and build(5).context_ids != build(6).context_ids


@pytest.mark.parametrize("digits", [1, 3, 7])
def test_digits(digits):
    prompt = needle.build(Bytes(), num_tokens=900, depth=0.5, haystack="noise", digits=digits)
    assert len(prompt.answer) == digits and prompt.task == f"needle_noise_{digits}"
    assert len(prompt.answer_ids) == digits + 1


def test_too_short_names_the_minimum_and_the_minimum_works():
    with pytest.raises(ValueError, match=r"num_tokens=10 must be at least (\d+)") as caught:
        needle.build(Bytes(), num_tokens=10, depth=0.5, num_needles=4)
    least = int(str(caught.value).split("at least ")[1].split()[0])
    for length in range(least, least + 60):
        prompt = needle.build(Bytes(), num_tokens=length, depth=0.5, num_needles=4)
        assert len(prompt.context_ids) == length
    with pytest.raises(ValueError, match=f"at least {least}"):
        needle.build(Bytes(), num_tokens=least - 1, depth=0.5, num_needles=4)


def test_wrong_arguments_are_errors():
    with pytest.raises(ValueError, match="depth=1.5"):
        needle.build(Bytes(), num_tokens=600, depth=1.5)
    with pytest.raises(ValueError, match="digits=0"):
        needle.build(Bytes(), num_tokens=600, depth=0.5, digits=0)


def test_a_tokenizer_that_loses_text_is_an_error():
    class Lossy(Bytes):
        def decode(self, ids):
            return super().decode(ids).replace("magic", "magical")

    with pytest.raises(ValueError, match="stands 0 times"):
        needle.build(Lossy(), num_tokens=600, depth=0.5)


def test_a_folder_of_text(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no text"):
        needle.build(Bytes(), num_tokens=900, depth=0.5, haystack=tmp_path)
    (tmp_path / "a.txt").write_text("A first tale.\n\nIt tells of\nthe sea. It ends – well.")
    prompt = needle.build(Bytes(), num_tokens=900, depth=0.5, haystack=tmp_path)
    context = Bytes().decode(prompt.context_ids)
    assert "It tells of the sea." in context and prompt.task == "needle_folder_7"
    assert "tale" in Bytes().decode(needle.running_text(Bytes(), 100, folder=tmp_path))


def test_running_text_is_exact_prose_even_beyond_its_source():
    size = len(" ".join(text.sentences("text", 0)))
    for length in (2, 100, 2048, size + 500):
        assert len(needle.running_text(Bytes(), length, seed=4)) == length
    shown = Bytes().decode(needle.running_text(Bytes(), 3000, seed=4))
    assert sum(c.isalpha() or c == " " for c in shown) > 0.9 * len(shown) and "::=" not in shown
    assert needle.running_text(Bytes(), 64, 1) != needle.running_text(Bytes(), 64, 2)
