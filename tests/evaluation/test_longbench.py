"""LongBench's rows: where they are read from, prompts, and the cut in the middle."""

import gzip
import json
import zipfile

import huggingface_hub
import pytest

from kvjax.evaluation import longbench
from kvjax.evaluation.longbench import DATASETS
from tests.evaluation.test_needle import BOS, Bytes


def record(**changes):
    return {
        "input": "Who?", "context": "It was Ann who did it.", "answers": ["Ann", "Ann B."],
        "length": 6, "dataset": "hotpotqa", "language": "en", "all_classes": None, "_id": "a",
    } | changes  # fmt: skip


def lines(*records):
    return "".join(json.dumps(r) + "\n" for r in records)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "hotpotqa.jsonl").write_text(lines(record(), record(_id="b")))
    (tmp_path / "trec_e.jsonl").write_text(lines(record(dataset="trec", _id="e")))
    with gzip.open(tmp_path / "lcc.jsonl.gz", "wt") as file:
        file.write(lines(record(dataset="lcc", input="")))
    return tmp_path


def test_a_folder_an_archive_and_the_hub_give_the_same_rows(folder, tmp_path, monkeypatch):
    found = longbench.read(folder)
    assert {name: len(rows) for name, rows in found.items()} == {"hotpotqa": 2, "lcc": 1}
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as made:
        for path in folder.glob("*.jsonl*"):
            made.write(path, f"data/{path.name}")
    assert longbench.read(archive) == found
    asked = []

    def download(name, file, repo_type):
        asked.append((name, file, repo_type))
        return str(archive)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert longbench.read("THUDM/LongBench") == found
    assert asked == [("THUDM/LongBench", "data.zip", "dataset")]
    assert list(longbench.read(folder, ("trec",), extended=True)["trec"])[0]["_id"] == "e"


def test_an_archive_parts_rows_at_line_ends_alone(tmp_path):
    odd = record(context="one\u2028two\x85three", dataset="lcc")
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("data/lcc.jsonl", json.dumps(odd, ensure_ascii=False) + "\n")
    assert longbench.read(archive)["lcc"] == [odd]
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("data/lcc.jsonl", lines(odd) + "{\n")
    with pytest.raises(ValueError, match=r"data\.zip/data/lcc\.jsonl, line 2"):
        longbench.read(archive)


def test_a_file_of_several_datasets_is_split_by_what_its_rows_name(tmp_path):
    path = tmp_path / "mixed.jsonl"
    path.write_text(lines(record(), record(dataset="lcc"), record(dataset="trec_e")))
    assert {n: len(r) for n, r in longbench.read(path).items()} == {
        "hotpotqa": 1, "lcc": 1, "trec": 1,
    }  # fmt: skip
    assert list(longbench.read(path, ("lcc",))) == ["lcc"]


def test_bad_sources_say_what_is_wrong(folder, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(FileNotFoundError, match="Name a folder with <dataset>.jsonl"):
        longbench.read("nobody/nothing")
    with pytest.raises(FileNotFoundError, match="holds no qasper.*hotpotqa, lcc"):
        longbench.read(folder, ("qasper",))
    with pytest.raises(ValueError, match="unknown dataset 'hotpot'"):
        longbench.read(folder, ("hotpot",))
    with pytest.raises(ValueError, match="LongBench-E has no musique"):
        longbench.read(folder, ("musique",), extended=True)
    bad = tmp_path / "qasper.jsonl"
    bad.write_text(lines(record(dataset="qasper"), record(dataset="qasper", answers=[])))
    with pytest.raises(ValueError, match="qasper, row 1: answers is missing or empty"):
        longbench.read(bad)
    bad.write_text(lines(record(dataset="qasper", answers="Ann")))
    with pytest.raises(ValueError, match="must be a list"):
        longbench.read(bad)
    for wrong in ({"context": 5}, {"input": 7}):
        bad.write_text(lines(*(record(dataset="qasper", **c) for c in ({"input": None}, wrong))))
        ((name, value),) = wrong.items()
        with pytest.raises(ValueError, match=f"qasper, row 1: {name}={value} must be text"):
            longbench.read(bad)
    empty = tmp_path / "none"
    empty.mkdir()
    with pytest.raises(FileNotFoundError, match="no .jsonl file"):
        longbench.read(empty)


def test_the_sixteen_english_datasets_and_the_thirteen_of_longbench_e():
    assert len(DATASETS) == 16
    assert sum(d.extended for d in DATASETS.values()) == 13
    plain = {name for name, d in DATASETS.items() if not d.chat}
    assert plain == {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
    assert {d.metric for d in DATASETS.values()} == set(longbench.METRICS)
    limits = {name: d.max_new_tokens for name, d in DATASETS.items()}
    assert limits["gov_report"] == limits["qmsum"] == limits["multi_news"] == 512
    assert limits["narrativeqa"] == limits["qasper"] == limits["samsum"] == 128
    assert {limits[n] for n in ("hotpotqa", "2wikimqa", "musique", "triviaqa")} == {32}


@pytest.mark.parametrize("name", DATASETS)
def test_every_prompt_holds_context_and_question_once_and_in_order(name):
    (row,) = longbench.make_rows(name, [record(dataset=name, input="WHO?")])
    whole = row.context + row.question
    assert whole.count("It was Ann who did it.") == 1 and row.question
    assert row.context.endswith("It was Ann who did it.")  # compressed right after the context
    asks = "{input}" in DATASETS[name].template
    assert row.question.count("WHO?") == asks
    assert row.answer == ("Ann", "Ann B.") and row.extra["dataset"] == name
    assert row.max_new_tokens == DATASETS[name].max_new_tokens and row.chat == DATASETS[name].chat


def test_official_prompts_are_taken_character_for_character(tmp_path):
    path = tmp_path / "dataset2prompt.json"
    template = "Read {braces}.\n\n{context}\n\nNow, Question: {input}\nAnswer:"
    path.write_text(json.dumps({"hotpotqa": template}))
    templates = longbench.read_table(path)
    inside = record(context="f{x} and {context}", input="{y}?")
    (row,) = longbench.make_rows("hotpotqa", [inside], templates, {"hotpotqa": 5})
    expected = "Read {braces}.\n\nf{x} and {context}\n\nNow, Question: {y}?\nAnswer:"
    assert row.context + row.question == expected
    assert row.answer_prefix == "" and row.max_new_tokens == 5
    prompt = longbench.encode(Bytes(), row, 10_000)
    text = Bytes().decode(prompt.context_ids + prompt.question_ids)
    assert text == f"<start>user\n{expected}<end>\n<start>assistant\n"
    with pytest.raises(ValueError, match="name no qasper"):
        longbench.make_rows("qasper", [record()], templates)
    with pytest.raises(ValueError, match="prompt of hotpotqa=5 must be text"):
        longbench.make_rows("hotpotqa", [record()], {"hotpotqa": 5})
    for limit in ("many", 0, 5.5):
        with pytest.raises(ValueError, match=f"limit of hotpotqa={limit!r} must be a whole"):
            longbench.make_rows("hotpotqa", [record()], templates, {"hotpotqa": limit})
    with pytest.raises(ValueError, match="must hold {context} once"):
        longbench.make_rows("hotpotqa", [record()], {"hotpotqa": "{input} {context}"})


def test_a_prompt_that_is_too_long_keeps_both_ends_in_equal_parts():
    text = "".join(chr(ord("a") + i % 26) for i in range(3000))
    (row,) = longbench.make_rows("trec", [record(context=text, input="WHO?")])
    whole = row.context + row.question
    prompt = longbench.encode(Bytes(), row, 1001)
    kept = Bytes().decode(prompt.context_ids + prompt.question_ids)
    assert kept == whole[:500] + whole[-500:]  # no chat template in trec
    assert prompt.removed == len(whole) - 1000
    assert Bytes().decode(prompt.question_ids) == row.question
    assert longbench.encode(Bytes(), row, len(whole)).removed == 0
    assert longbench.encode(Bytes(), row, len(whole) - 1).removed > 0


def test_the_chat_template_and_the_bos_are_outside_the_cut():
    (row,) = longbench.make_rows("hotpotqa", [record(context="x" * 3000)])
    prompt = longbench.encode(Bytes(add_bos=True), row, 800)
    ids = prompt.context_ids + prompt.question_ids
    assert ids.count(BOS) == 1 and ids[0] == BOS
    text = Bytes().decode(ids[1:])
    assert text.startswith("<start>user\nSeveral") and text.endswith("assistant\nAnswer:")


def test_a_question_longer_than_half_loses_its_beginning():
    (row,) = longbench.make_rows("repobench-p", [record(context="c" * 400, input="i" * 400)])
    whole = row.context + row.question
    prompt = longbench.encode(Bytes(), row, 200)
    assert Bytes().decode(prompt.context_ids) == whole[:100]
    assert Bytes().decode(prompt.question_ids) == whole[-100:]


def test_buckets_of_longbench_e():
    assert [longbench.bucket(n) for n in (0, 3999, 4000, 7999, 8000)] == [
        "0-4k", "0-4k", "4-8k", "4-8k", "8k+",
    ]  # fmt: skip
