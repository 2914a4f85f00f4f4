"""Rows as tokens: whole prompts, one cut, files, the rules of scoring."""

import gzip

import pytest

from kvjax.evaluation import rows, scoring
from kvjax.evaluation.rows import Row


class Words:
    """A tokenizer with a token a word and one for each run of spaces; 0 begins a text."""

    bos_id, add_bos = 0, True

    def __init__(self):
        self.words = ["<s>"]

    def encode(self, text, bos=False):
        ids, word = [], ""
        for c in text + "\0":
            if word and (c == "\0" or c.isspace() != word[-1].isspace()):
                if word not in self.words:
                    self.words.append(word)
                ids.append(self.words.index(word))
                word = ""
            word += c
        return ids

    def decode(self, ids):
        return "".join(self.words[i] for i in ids)

    def chat(self, messages, add_generation_prompt=True):
        return f"<user> {messages[0]['content']} <end> <model> "


def row(**changes):
    made = Row("7", "one two three four", " who?", "It is", ("Tom",), 4, "pets")
    return made._replace(**changes)


@pytest.mark.parametrize("chat", [True, False])
def test_context_and_question_are_the_whole_prompt_with_one_bos(chat):
    words = Words()
    made = rows.encode(words, row(chat=chat))
    text = words.decode(made.context_ids + made.question_ids)
    plain = "one two three four who?" + ("It is" if not chat else " <end> <model> It is")
    assert text == "<s>" + ("<user> " if chat else "") + plain
    assert made.context_ids.count(0) == 1 and made.context_ids[0] == 0 and made.removed == 0
    assert words.decode(made.context_ids).endswith("four")


def test_a_token_that_spans_context_and_question_belongs_to_the_question():
    words = Words()
    made = rows.encode(words, row(context="one two thr", question="ee who?", chat=False))
    assert words.decode(made.context_ids) == "<s>one two "
    assert words.decode(made.question_ids) == "three who?It is"


def test_a_row_without_a_question_still_asks_with_its_last_token():
    words = Words()
    made = rows.encode(words, row(question="", answer_prefix="", chat=False))
    assert words.decode(made.question_ids) == "four"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": " \n"}, "empty context"),
        ({"answer": ()}, "one or more references"),
        ({"answer": "Tom"}, "one or more references"),
        ({"answer": (" ",)}, "one or more references"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ],
)
def test_what_makes_no_prompt_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        rows.encode(Words(), row(**changes))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_files_come_back(tmp_path, name):
    made = [{"a": 1, "b": "é\ud800"}, {"a": [2]}]
    file = rows.write_jsonl(tmp_path / "a.jsonl", made)
    if name.endswith(".gz"):
        (tmp_path / name).write_bytes(gzip.compress(file.read_bytes()))
    assert rows.read_jsonl(tmp_path / name) == made
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted({"a.jsonl", name})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a": \n', "line 2"),
        (b"[1]\n", "line 1: must be a JSON object"),
        (b"\n", "is empty"),
        (b"\xff\xfe{}", "cannot be read"),
    ],
)
def test_bad_files_are_one_line(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        rows.read_jsonl(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read"):
        rows.read_jsonl(tmp_path / "a.jsonl.gz")
    broken = bytearray(gzip.compress(b'{"a": 1}' * 99))
    broken[12] ^= 0xFF
    (tmp_path / "a.jsonl.gz").write_bytes(bytes(broken))
    with pytest.raises(ValueError, match="cannot be read"):
        rows.read_jsonl(tmp_path / "a.jsonl.gz")
    with pytest.raises(FileNotFoundError, match="is no file"):
        rows.read_jsonl(tmp_path / "b.jsonl")


def test_official_string_match():
    two = row(answer=("Tom", "4096"))
    everything = scoring.METRICS["string_match_all"]
    part = scoring.METRICS["string_match_part"]
    assert everything("", row(answer=("Tom", ""))) == part("", row(answer=("Tom", ""))) == 0.0
    for text, all_of, any_of in [
        ("tom, and 4096.", 1.0, 1.0), ("it is TOM", 0.5, 1.0), ("", 0.0, 0.0), ("409 6", 0.0, 0.0),
    ]:  # fmt: skip
        assert everything(text, two) == all_of and part(text, two) == any_of
