"""Prompt files: three formats, plain and gzipped, and one clear line for each bad one."""

import gzip
import json

import pytest

from kvjax.evaluation import builtin_prompts, prompts

LINES = [
    {"id": "a", "source": "s", "task": "math", "prompt": "One?", "answer": "steps #### 1"},
    {"instruction": "Two?"},
]
SHAREGPT = [
    {
        "id": "x",
        "conversations": [
            {"from": "human", "value": "Hello"},
            {"from": "gpt", "value": "Hi"},
            {"from": "human", "value": "Why?"},
            {"from": "gpt", "value": "So."},
            {"from": "human", "value": "never answered"},
        ],
    },
    {"id": "nobody asks", "conversations": [{"from": "gpt", "value": "Welcome"}]},
    {"conversations": [{"from": "human", "value": "alone"}]},
]


def write(path, text):
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz"])
def test_json_lines(tmp_path, name):
    path = write(tmp_path / name, "\n".join(map(json.dumps, LINES)) + "\n\n")
    first, second = prompts.read(path)
    assert first == prompts.Prompt("a", "s", "math", (("user", "One?"),), ("steps #### 1",))
    assert second == prompts.Prompt("p-2", "p", "", (("user", "Two?"),))
    assert second.chat == [{"role": "user", "content": "Two?"}]


def test_a_line_separator_inside_a_text_ends_no_line(tmp_path):
    line = json.dumps({"prompt": "One\u2028two\x85three"}, ensure_ascii=False)
    (found,) = prompts.read(write(tmp_path / "p.jsonl", f"{line}\r\n"))
    assert found.messages[0][1] == "One\u2028two\x85three"


def test_csv_with_a_quoted_line_break_and_a_mark_of_byte_order(tmp_path):
    path = write(tmp_path / "p.csv", '\ufeffid,prompt,reference\n7,"a,\nb",3\n8,c,\n')
    first, second = prompts.read(path)
    assert (first.id, first.messages, first.references) == ("7", (("user", "a,\nb"),), ("3",))
    assert second.references == ()


@pytest.mark.parametrize("name", ["chats.json", "chats.json.gz"])
def test_sharegpt_asks_up_to_the_last_turn_that_was_answered(tmp_path, name):
    first, alone = prompts.read(write(tmp_path / name, json.dumps(SHAREGPT)))
    turns = (("user", "Hello"), ("assistant", "Hi"), ("user", "Why?"))
    assert (first.id, first.messages) == ("x", turns)
    assert (alone.id, alone.messages) == ("chats-3", (("user", "alone"),))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.txt", "x", "must be a .jsonl"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt', "line 2"),
        ("p.jsonl", "[1]", "line 1: must be a JSON object"),
        ("p.jsonl", '{"a": 1}', r"line 1: has \['a'\], one must be prompt"),
        ("p.jsonl", '{"prompt": " "}', "must be a text that is not empty"),
        ("p.jsonl", '{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}', "several prompts"),
        ("p.jsonl", "", "holds no prompt"),
        ("p.csv", "id,text_of_it\n1,a\n", "has columns"),
        ("p.csv", "id,prompt\n1\n", "must be a text"),
        ("p.json", "{}", "must hold a JSON list"),
        ("p.json", "[", "Expecting value"),
        ("p.json", '[{"conversations": [{"from": "dog", "value": "x"}]}]', "from 'dog'"),
        ("p.json", '[{"conversations": 3}]', "must be a list of objects"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message) as error:
        prompts.read(write(tmp_path / name, text))
    assert "\n" not in str(error.value)


def test_a_missing_file_and_one_that_is_not_gzip(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no file"):
        prompts.read(tmp_path / "none.jsonl")
    damaged = bytearray(gzip.compress(b'{"prompt": "a"}'))
    damaged[12] ^= 255
    for data in (b"plain", bytes(damaged)):
        (tmp_path / "p.jsonl.gz").write_bytes(data)
        with pytest.raises(ValueError, match="cannot be read"):
            prompts.read(tmp_path / "p.jsonl.gz")


def test_csv_is_written_the_same_every_time(tmp_path):
    rows = [{"id": "a", "n": 3, "more": 1}, {"id": "b", "n": 4, "more": 1}]
    one, two = (
        prompts.write_csv(tmp_path / f"{name}.csv.gz", rows, ("id", "n")).read_bytes()
        for name in "ab"
    )
    assert one == two and gzip.decompress(one) == b"id,n\na,3\nb,4\n"


def words(text):
    return len(text.split())


def test_built_in_prompts_fill_their_length_and_have_right_answers():
    made = builtin_prompts.make(8, 200, words, 3)
    assert made == builtin_prompts.make(8, 200, words, 3) != builtin_prompts.make(8, 200, words, 4)
    assert len({prompt.id for prompt in made}) == 8
    for prompt in made:
        text = prompt.messages[0][1]
        assert 120 <= words(text) <= 200
        assert bool(prompt.references) == (prompt.task == "sums")
        for line in text.split("\n"):  # every worked example adds up
            if line.startswith("Solution: "):
                last = line.rstrip(".").split(". ")[-1].split(" is ")[-1]
                left, right = last.removeprefix("Then ").split(" = ")
                assert eval(left) == int(right)
    with pytest.raises(ValueError, match="no room"):
        builtin_prompts.make(2, 20, words, 3)
