"""Files of others: SQuAD's and HotpotQA's questions, and the prompts that RULER itself wrote."""

import json

import pytest

from kvjax.evaluation import ruler, ruler_qa
from kvjax.evaluation.rows import encode
from kvjax.evaluation.scoring import METRICS
from tests.evaluation.byte_tokenizers import byte_level

SQUAD = {"data": [{"title": "Rivers", "paragraphs": [
    {"context": "The Elbe rises in the Giant Mountains.", "qas": [
        {"id": "1", "question": "Where does the Elbe rise?",
         "answers": [{"text": "Giant Mountains"}, {"text": "the Giant Mountains"}]},
        {"id": "2", "question": "Who owns it?", "is_impossible": True, "answers": []}]},
    *({"context": f"River number {i} flows slowly through village {i}.", "qas": []}
      for i in range(60))]}]}  # fmt: skip
HOTPOT = [
    {
        "_id": "a",
        "question": "In which land lies the city of the Blue Bridge?",
        "answer": "Norway",
        "supporting_facts": [["Blue Bridge", 0], ["Hamlet", 0]],
        "context": [
            ["Blue Bridge", ["It stands in Hamlet.", " It is blue."]],
            ["Hamlet", ["A city in Norway."]],
            *([f"Place {i}", [f"Place {i} is elsewhere."]] for i in range(80)),
        ],
    }
]


def test_files_of_squad_and_hotpotqa(tmp_path):
    squad, hotpot = tmp_path / "squad.json", tmp_path / "hotpot.json"
    squad.write_text(json.dumps(SQUAD))
    hotpot.write_text(json.dumps(HOTPOT))
    tokenizer = byte_level()
    first, second = ruler.build_set(
        tokenizer, ["qa_1", "qa_2"], num_tokens=2000, prompts=1, squad=squad, hotpotqa=hotpot
    )
    assert first.row.task == "qa_1" and first.row.answer == (
        "Giant Mountains", "the Giant Mountains",
    )  # fmt: skip
    assert METRICS[first.row.metric]("In the giant mountains.", first.row) == 1
    assert second.row.extra["structure"]["gold_documents"] == 2
    assert "Hamlet\nA city in Norway." in second.row.context
    assert len(first.context_ids) == len(second.context_ids) == 2000
    with pytest.raises(ValueError, match=r"more than the .* fill .* name a larger source"):
        ruler.build(tokenizer, "qa_1", num_tokens=9000, questions=squad)
    squad.write_text('{"rows": []}')
    ruler_qa._read.cache_clear()
    with pytest.raises(ValueError, match="does not read like squad's JSON: KeyError 'data'"):
        ruler.build(tokenizer, "qa_1", num_tokens=2000, questions=squad)
    with pytest.raises(FileNotFoundError, match="name a JSON file"):
        ruler.build(tokenizer, "qa_2", num_tokens=2000, questions=tmp_path / "none.json")


def official(task, question, prefix=None):
    line = {"index": 7, "input": f"Text before.\nA fact: 42.\n{question}", "outputs": ["42"],
            "length": 4096}  # fmt: skip
    return line if prefix is None else line | {"answer_prefix": prefix}


def test_rulers_own_files_run_as_they_are(tmp_path):
    questions = {
        "niah_single_1": "What is the special magic number for x mentioned in the provided text?",
        "niah_multiquery": "What are all the special magic numbers for x, and y mentioned in it?",
        "vt": "Question: Find all variables that are assigned the value 42 in the text above.",
        "qa_1": "Answer the question based on the given documents. Only give me the answer.\n\n"
        "Question: Which number? Answer:",
    }  # fmt: skip
    for task, question in questions.items():
        folder = tmp_path / task
        folder.mkdir()
        line = official(task, question, " Answer: it is" if task == "vt" else None)
        (folder / "validation.jsonl").write_text(json.dumps(line) + "\n")
    rows = {row.task: row for row in ruler.read_official(tmp_path)}
    assert set(rows) == set(questions)
    tokenizer = byte_level()
    for task, row in rows.items():
        source = json.loads((tmp_path / task / "validation.jsonl").read_text())
        assert row.context + row.question == source["input"]
        assert row.context == "Text before.\nA fact: 42.\n" or task == "qa_1"
        assert not row.chat and row.answer == ("42",) and row.id == "7"
        assert row.max_new_tokens == ruler.TASKS[task].max_new_tokens
        made = encode(tokenizer, row)
        whole = source["input"] + source.get("answer_prefix", "")
        assert list(made.context_ids + made.question_ids) == tokenizer.encode(whole, bos=True)
    assert rows["qa_1"].metric == "string_match_part" and rows["vt"].answer_prefix
    assert ruler.read_official(tmp_path / "vt", "vt", chat=True)[0].chat


def test_rulers_own_files_with_other_questions_or_damage(tmp_path):
    file = tmp_path / "vt.jsonl"
    file.write_text(json.dumps(official("vt", "Name them all: ")) + "\n")
    assert ruler.read_official(file)[0].question == "Name them all: "
    assert ruler.read_official(file, marker="A fact")[0].context == "Text before.\n"
    file.write_text('{"index": 0, "prompt": "x"}\n')
    with pytest.raises(ValueError, match="row 1: has no input, outputs"):
        ruler.read_official(file)
    other = tmp_path / "mine.jsonl"
    other.write_text(json.dumps(official("vt", "x")) + "\n")
    with pytest.raises(ValueError, match="neither file nor folder is named like a task"):
        ruler.read_official(other)
    with pytest.raises(FileNotFoundError, match="neither a .jsonl file nor a folder"):
        ruler.read_official(tmp_path / "none.jsonl")
    with pytest.raises(FileNotFoundError, match="holds no"):
        (tmp_path / "empty").mkdir()
        ruler.read_official(tmp_path / "empty")
