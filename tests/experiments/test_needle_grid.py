"""The needle grid on random weights: cells, turns, scores, maps, errors."""

import dataclasses

import pytest

from experiments import needle_grid, needle_grid_report
from experiments.needle_grid import AGNOSTIC, ASKED, TINY, digits_in_place, run
from experiments.runner import Run, main
from kvjax.evaluation import needle
from kvjax.evaluation.rows import Row
from tests.evaluation.test_needle import Bytes, Words


def test_every_cell_of_the_grid_has_a_row_of_every_method(tmp_path):
    config = dataclasses.replace(TINY, turns=2)
    with Run.create(config, tmp_path) as made:
        run(config, made)
        rows = made.rows
    cells = {(r["task"], r["id"], r["method"]) for r in rows}
    assert len(cells) == len(rows) == 2 * config.depths * 3  # forms, depths, methods
    for r in rows:  # turn 1's question of either form is compressed with the context
        assert r["aware"] == (r["task"] == ASKED) and r["context_tokens"] > 300
    depths = {needle_grid_report.depth_of(r) for r in rows}
    assert depths == set(needle.depth_grid(config.depths))
    summary = (made.path / "summary.md").read_text()
    assert "The question that eviction saw, and another one" in summary
    assert (made.path / "grid_3x.png").is_file()


def test_a_number_hidden_at_several_lengths_counts_once():
    named = {"task": AGNOSTIC, "method": "full"}
    rows = [named | {"id": i, "digits": v} for i, v in (("a", 1.0), ("a", 0.5), ("b", 0.25))]
    means = needle_grid_report.per_number(rows, ["task", "method"], ["digits"])
    assert means == [named | {"id": "a", "digits": 0.75}, named | {"id": "b", "digits": 0.25}]


def test_an_id_names_all_that_makes_a_prompt():
    config = config_of(turns=1)
    others = [config_of(digits=4), config_of(haystack="text"), config_of(turns=2)]
    names = {needle_grid_report.name_of(c, 0.5, 42) for c in (config, *others)}
    names |= {needle_grid_report.name_of(config, 0.25, 42)}
    names |= {needle_grid_report.name_of(config, 0.5, 43)}
    assert len(names) == 6


def config_of(**changes):
    return dataclasses.replace(TINY, **{"depths": 1, "prompts": 1, "haystack": "noise"} | changes)


@pytest.mark.parametrize("tokenizer", [Bytes(), Words()], ids=["bytes", "words"])
def test_compression_comes_before_or_after_the_question(tokenizer):
    (before,) = needle_grid.prompts(config_of(), tokenizer, 900)
    (after,) = needle_grid.prompts(config_of(aware=True), tokenizer, 900)
    assert (before.row.task, after.row.task) == (AGNOSTIC, ASKED)
    assert before.context_ids == after.context_ids and before.question_ids == after.question_ids
    assert len(before.context_ids) == 900


@pytest.mark.parametrize("tokenizer", [Bytes(), Words()], ids=["bytes", "words"])
def test_with_turns_only_turn_1_is_seen_and_the_last_asks_for_the_number(tokenizer):
    asked, later = needle_grid.prompts(config_of(turns=3, digits=4), tokenizer, 1500)
    assert later.row.task == "after_turn_1_of_3" and asked.row.answer == later.row.answer
    whole = tokenizer.decode(later.context_ids + later.question_ids)
    value, prefix = later.row.answer[0], later.row.answer_prefix
    assert whole.endswith(prefix) and whole.count(value) == 1  # in the haystack alone
    seen = tokenizer.decode(later.context_ids)
    question = later.row.question
    assert question not in seen and question in tokenizer.decode(later.question_ids)
    assert seen.count("What is the special magic number") == 1
    assert whole.count("What is the special magic number") == 3
    assert whole.count("<start>user") == 3 and whole.count("<start>assistant") == 3
    # the same haystack in both, and in the other form the number's own question is seen
    assert asked.context_ids[:1500] == later.context_ids[:1500]
    assert tokenizer.decode(asked.question_ids).startswith(question)
    # earlier turns are answered with the numbers that the context holds
    values = [s for s in whole.replace(".", " ").split() if s.isdigit() and len(s) == 4]
    assert sorted(map(values.count, set(values))) == [1, 2, 2] and values.count(value) == 1


def row(answer):
    return Row("0", "", "q", "", (answer,), 8, "t")


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        (" 1234567.", 1.0),
        ("It is 1,234,567", 1.0),
        (" 1234", 4 / 7),
        (" 1239567 and 1234567", 6 / 7),  # the first number counts
        (" 234567", 0.0),  # shifted
        ("none", 0.0),
        ("", 0.0),
    ],
)
def test_digits_in_place(prediction, expected):
    assert digits_in_place(prediction, row("1234567")) == pytest.approx(expected)


def test_a_negative_set_picks_its_prompts_in_all_their_forms(tmp_path):
    path, name = tmp_path / "set.jsonl", "depth 0.750, seed 45, 3 digits in noise, 2 numbers"
    path.write_text(f'{{"dataset": "after_turn_1_of_2@1500", "id": "{name}"}}\n')
    config = config_of(depths=2, prompts=2, turns=2, only=str(path))
    found = needle_grid.prompts(config, Bytes(), 1500)
    assert [q.row.task for q in found] == [ASKED, "after_turn_1_of_2"]
    assert {q.row.id for q in found} == {name}
    with pytest.raises(ValueError, match="names none of the 8 prompts"):  # of another seed
        needle_grid.prompts(dataclasses.replace(config, seed=7), Bytes(), 1500)


def test_a_key_of_64_digits_is_whole_in_its_prompt():
    built = needle.build(Bytes(), num_tokens=1200, depth=0.5, haystack="noise", digits=64)
    assert len(built.answer) == 64 and Bytes().decode(built.context_ids).count(built.answer) == 1
    with pytest.raises(ValueError, match="must be 1..64"):
        needle.build(Bytes(), num_tokens=1200, depth=0.5, digits=65)


def test_the_map_puts_depth_down_and_length_across():
    rows = [
        {"task": AGNOSTIC, "method": m, "length": n, "depth": d, "score": 100 * d + n / 100}
        | {"ratio": 1.0 if m == "full" else 4 + n / 1000}
        for m in ("full", "snapkv")
        for n in (100, 200, 400)
        for d in (0.25, 0.75)
    ]
    figure = needle_grid_report.heat_maps(rows, [AGNOSTIC], "title")
    axes = [a for a in figure.axes if a.images]
    assert [a.get_title() for a in axes] == ["full, 1.0x", "snapkv, 4.1–4.4x"]
    cells = axes[0].images[0].get_array()
    assert cells.shape == (2, 3) and cells[1, 0] == 76 and cells[0, 2] == 29
    assert axes[0].images[0].get_clim() == (0, 100)
    assert [t.get_text() for t in axes[0].get_yticklabels()] == ["25", "75"]


def test_the_loss_is_paired_over_the_same_contexts():
    rows = [
        {
            "task": t,
            "method": "snapkv",
            "target_ratio": 4.0,
            "length": 100,
            "id": str(i),
            "digits": s / 100,
        }
        for t, scores in ((ASKED, (100, 60)), ("after_turn_1_of_2", (80, 40)))
        for i, s in enumerate(scores)
    ]
    text = needle_grid_report.compare(rows, [ASKED, "after_turn_1_of_2"])
    assert "asked in turn 2" in text and "| 20 [20, 20] |" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "snapvk"], "unknown method 'snapvk'"),
        (["--turns", "2", "--aware"], "leave --aware out"),
        (["--depths", "0"], "depths=0"),
        (["--model", "tiny", "--lengths", "40"], "num_tokens=40"),
        (["--model", "tiny", "--lengths", "300", "--digits", "65"], "digits=65"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(needle_grid.Config, run, [*arguments, "--runs-dir", str(tmp_path)])
    assert stopped.value.code == 1
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
