"""The 13 RULER-style tasks: exact lengths, structure, answers, scores, golden prompts."""

import collections
import functools
import hashlib
import json
import re
from pathlib import Path

import pytest

from kvjax.evaluation import ruler, ruler_qa
from kvjax.evaluation.rows import encode
from kvjax.evaluation.ruler_drafts import Needles
from kvjax.evaluation.ruler_words import all_words
from kvjax.evaluation.scoring import METRICS
from models.tokenizer import Tokenizer
from tests.evaluation.byte_tokenizers import byte_level, merging

GOLDEN = Path(__file__).parent / "golden" / "ruler.json"
TOKENIZERS = {"bytes": functools.cache(byte_level), "merging": functools.cache(merging)}


def text_of(encoded, tokenizer):
    return tokenizer.decode(encoded.context_ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("task", ruler.TASKS)
def test_every_task_is_exact_has_one_bos_and_holds_its_answer(task, name):
    tokenizer = TOKENIZERS[name]()
    for extra in (0, 1, 17):
        encoded = ruler.build(tokenizer, task, num_tokens=4000 + extra, number=extra, seed=3)
        row = encoded.row
        assert len(encoded.context_ids) == 4000 + extra
        assert encoded.context_ids[0] == tokenizer.bos_id
        assert (encoded.context_ids + encoded.question_ids).count(tokenizer.bos_id) == 1
        context = text_of(encoded, tokenizer)
        assert row.context in context and row.context.endswith("\n\n")
        for fact, span in zip(row.extra["facts"], ruler.spans(tokenizer, encoded), strict=True):
            assert context.count(fact) == 1
            assert fact in tokenizer.decode(encoded.context_ids[slice(*span)])
        for answer in row.answer:
            assert answer in context
            if row.extra["facts"]:
                assert sum(answer in fact for fact in row.extra["facts"]) >= 1
        # what is compressed first does not know the question; cwe's example asks the same
        asked = tokenizer.decode(encoded.question_ids)
        assert row.question in asked and asked.endswith(row.answer_prefix)
        assert context.count(row.question) == (task == "cwe")
        assert row.max_new_tokens == ruler.TASKS[task].max_new_tokens


@pytest.mark.parametrize("task", ruler.TASKS)
def test_oracle_scores_100_empty_0_and_a_wrong_answer_0(task):
    row = ruler.build(byte_level(), task, num_tokens=4000, seed=5).row
    score = METRICS[row.metric]
    assert score(row.extra["gold"], row) == 1.0
    assert score("It is " + row.extra["gold"].upper() + ".", row) == 1.0
    assert score("", row) == 0.0 and score("no idea", row) == 0.0
    if len(row.answer) > 1 and row.metric == "string_match_all":
        assert score(row.answer[0], row) == pytest.approx(1 / len(row.answer))


@pytest.mark.parametrize("task", ruler.TASKS)
def test_seed_and_number_decide_everything(task):
    def build(seed, number=0):
        return ruler.build(byte_level(), task, num_tokens=4000, seed=seed, number=number)

    assert build(1) == build(1)
    assert build(1).context_ids != build(2).context_ids
    assert build(1).row.answer != build(1, 1).row.answer != build(2).row.answer
    assert build(1).row.id != build(1, 1).row.id


@pytest.mark.parametrize("task", ruler.TASKS)
def test_a_row_encoded_again_is_nearly_the_same_prompt(task):
    """Only where filler was spliced in may tokens merge otherwise."""
    tokenizer = merging()
    encoded = ruler.build(tokenizer, task, num_tokens=4000, seed=2)
    again = encode(tokenizer, encoded.row)
    assert abs(len(again.context_ids) - 4000) <= 4
    assert tokenizer.decode(again.context_ids + again.question_ids) == tokenizer.decode(
        encoded.context_ids + encoded.question_ids
    )


def counted(task):
    tokenizer = byte_level()
    encoded = ruler.build(tokenizer, task, num_tokens=6000, seed=9)
    return encoded.row, encoded.row.context, encoded.row.extra["structure"]


@pytest.mark.parametrize(
    ("task", "keys", "values", "queries", "key", "value"),
    [
        ("niah_single_1", 1, 1, 1, "words", "numbers"),
        ("niah_single_2", 1, 1, 1, "words", "numbers"),
        ("niah_single_3", 1, 1, 1, "words", "uuids"),
        ("niah_multikey_1", 4, 1, 1, "words", "numbers"),
        ("niah_multikey_2", None, 1, 1, "words", "numbers"),
        ("niah_multikey_3", None, 1, 1, "uuids", "uuids"),
        ("niah_multivalue", 1, 4, 1, "words", "numbers"),
        ("niah_multiquery", 4, 1, 4, "words", "numbers"),
    ],
)
def test_needles_are_as_many_and_of_the_kinds_that_ruler_has(
    task, keys, values, queries, key, value
):
    forms = {
        "words": r"[a-z]+-[a-z]+", "numbers": r"[1-9]\d{6}",
        "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    }  # fmt: skip
    row, context, structure = counted(task)
    found = re.findall(rf"secret \w+ for ({forms[key]}) is: ({forms[value]})\.", context)
    pairs = collections.defaultdict(list)
    for name, drawn in found:
        pairs[name].append(drawn)
    assert {len(drawn) for drawn in pairs.values()} == {values}
    if keys is None:  # the haystack is nothing but pairs
        assert len(pairs) == structure["distractors"] + 1 > 25
        lines = context.split("\n\n")[1].splitlines()
        assert len([line for line in lines if line.startswith("The secret")]) == len(pairs)
    else:
        assert len(pairs) == structure["keys"] == keys
        assert structure["needles"] == len(found) == keys * values
    asked = [name for name in pairs if re.search(rf"\b{name}\b", row.question)]
    assert len(asked) == queries and len(row.answer) == queries * values
    assert sorted(row.answer) == sorted(v for name in asked for v in pairs[name])
    if values > 1:  # a key's values in the order of the text
        assert list(row.answer) == pairs[asked[0]]


def test_haystacks():
    noise = counted("niah_single_1")[1]
    prose = counted("niah_single_2")[1]
    assert noise.count("The grass is green.") > 30 and "The grass is green." not in prose
    letters = sum(c.isalpha() or c == " " for c in prose)
    assert letters > 0.85 * len(prose) and len(set(prose.split())) > 250


def test_a_folder_is_the_haystack_of_natural_text(tmp_path):
    (tmp_path / "a.txt").write_text("The sea was calm. " * 3 + "\n\nNobody spoke of the storm.")
    encoded = ruler.build(byte_level(), "niah_single_2", num_tokens=900, folder=tmp_path)
    assert "Nobody spoke of the storm." in encoded.row.context


def test_needles_lie_everywhere_over_seeds():
    places = []
    for number in range(60):
        encoded = ruler.build(byte_level(), "niah_single_1", num_tokens=1500, number=number)
        places.append(ruler.spans(byte_level(), encoded)[0][0] / 1500)
    quarters = collections.Counter(int(4 * place) for place in places)
    assert min(quarters[i] for i in range(4)) >= 6


def test_variables_form_one_chain_of_four_hops():
    row, context, structure = counted("vt")
    example, text = context.split("Now another text.\n")
    pairs = re.findall(r"^SET ([A-Z]{5}) = (\w+)$", text, re.M)
    assert len(pairs) == structure["hops"] + 1 == 5 and structure["chains"] == 1
    assert re.fullmatch(r"\d{5}", pairs[0][1]) and pairs[0][1] in row.question
    assert [before for _, before in pairs[1:]] == [name for name, _ in pairs[:-1]]
    assert row.answer == tuple(name for name, _ in pairs)
    shown = re.findall(r"^SET ([A-Z]{3}) = \w+$", example, re.M)
    assert len(shown) == 5 and example.rstrip().endswith(" ".join(shown))


@pytest.mark.parametrize(
    ("length", "often", "seldom", "shown"), [(4095, 6, 1, (3, 1, 20)), (9000, 30, 3, (10, 3, 40))]
)
def test_common_words_have_rulers_frequencies(length, often, seldom, shown):
    row = ruler.build(byte_level(), "cwe", num_tokens=length, seed=4).row
    parts = row.context.split("more often than the others.\n")
    for part, wanted in ((parts[1].split("\n")[0], shown), (parts[2], (often, seldom, None))):
        listed = re.findall(r"(\d+)\. ([a-z]+)", part)
        assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
        counts = collections.Counter(word for _, word in listed)
        assert collections.Counter(counts.values())[wanted[0]] == 10
        assert set(counts.values()) == set(wanted[:2])
        if wanted[2]:
            assert len(counts) == wanted[2]
    assert {w for w, n in counts.items() if n == often} == set(row.answer)
    assert row.extra["structure"]["uncommon"] == sum(n == seldom for n in counts.values())
    assert not any(a in b for a in row.answer for b in counts if a != b)


def test_code_words_follow_the_zeta_distribution():
    row, context, structure = counted("fwe")
    body = context.split("dots are no words.\n\n")[1]
    counts = collections.Counter(re.findall(r"\b[a-z]{6}\b", body))
    first = counts.most_common(4)
    assert tuple(word for word, _ in first[:3]) == row.answer
    assert [n for _, n in first[:3]] == structure["frequencies"]
    assert first[2][1] > first[3][1] == structure["next_frequency"]
    # count of rank k: n k^-2 / zeta(2), the dots being rank 1
    units = structure["dots"] * 1.6449
    for rank, (_, n) in enumerate(first, 2):
        assert abs(n - units / (1.6449 * rank**2)) <= 1
    assert abs(body.count("...") - structure["dots"]) <= 12  # the filler is dots too


def test_synthetic_documents_answer_their_questions_and_say_so():
    for task, gold in (("qa_1", 1), ("qa_2", 2)):
        row, context, structure = counted(task)
        assert row.task == f"{task}_synthetic" and structure["source"] == "synthetic"
        assert structure["gold_documents"] == gold == len(row.extra["facts"])
        numbers = [int(n) for n in re.findall(r"^Document (\d+):$", context, re.M)]
        assert numbers == list(range(1, structure["documents"] + 1)) and len(numbers) > 15
        assert context.count(row.answer[0]) == 1
        assert row.answer[0] in row.extra["facts"][-1]
        person = re.search(r"was (.+) born|where (.+) was born", row.question)
        person = person[1] or person[2]
        assert person in row.extra["facts"][0]
        assert sum(person in part for part in context.split("Document ")[1:]) == 1
    found = ruler_qa.synthetic(2)
    towns = [re.search(r"The town of (\w+) lies", text) for text in found.texts]
    towns = [town[1] for town in towns if town]
    assert len(set(towns)) == len(towns) > 500


def test_too_short_names_the_minimum_and_the_minimum_works():
    tokenizer = byte_level()
    for task in ruler.TASKS:
        with pytest.raises(ValueError, match=rf"{task}: num_tokens=40 must be at least") as caught:
            ruler.build(tokenizer, task, num_tokens=40)
        least = int(str(caught.value).split("at least ")[1].split()[0])
        if task == "cwe":
            continue  # its frequencies are other ones from 4,096 tokens on
        if task != "fwe":  # its vocabulary grows with the length
            for length in range(least, least + 12):
                assert len(ruler.build(tokenizer, task, num_tokens=length).context_ids) == length
            with pytest.raises(ValueError, match=f"at least {least}"):
                ruler.build(tokenizer, task, num_tokens=least - 1)


def test_wrong_arguments_are_errors():
    with pytest.raises(ValueError, match="task 'niah' must be one of niah_single_1"):
        ruler.build(byte_level(), "niah", num_tokens=900)

    class Lossy(Tokenizer):
        def decode(self, ids, special=False):
            return super().decode(ids).replace("secret", "secrets")

    plain = byte_level()
    lossy = Lossy(**{name: getattr(plain, name) for name in plain.__dataclass_fields__})
    with pytest.raises(ValueError, match="does not give back"):
        ruler.build(lossy, "niah_single_1", num_tokens=900)


def golden(folder):
    """What golden/ruler.json holds; running this file (PYTHONPATH=.) writes it."""
    tokenizer, rows = byte_level(), []
    for task in ruler.TASKS:
        encoded = ruler.build(tokenizer, task, num_tokens=3600, seed=42, folder=folder)
        row = encoded.row
        ids = json.dumps([encoded.context_ids, encoded.question_ids]).encode()
        structure = json.loads(json.dumps(row.extra["structure"]))
        rows.append({
            "task": row.task, "structure": structure, "question": row.question,
            "answer_prefix": row.answer_prefix, "answer": list(row.answer),
            "max_new_tokens": row.max_new_tokens, "metric": row.metric,
            "filler": row.extra["filler"], "begins": row.context[:160],
            "facts": list(row.extra["facts"]), "sha256": hashlib.sha256(ids).hexdigest(),
        })  # fmt: skip
    return rows


PROSE = (
    "The harbour lay still in the early light. Two boats came in before noon. Their crews carried "
    "baskets up the steps. An old man counted them twice. Nobody in the market asked for the price."
    "\n\nIn the evening the wind turned north. Windows were shut along the quay. The lamps burned "
    "until the last boat was tied. Then the street belonged to the cats."
)


@pytest.fixture(scope="module")
def prose(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prose")
    (folder / "harbour.txt").write_text(PROSE)
    return folder


def test_prompts_are_the_golden_ones(prose):
    """The prompts of one seed, to the token, and what they are made of."""
    kept = json.loads(GOLDEN.read_text(encoding="utf-8"))
    for made, wanted in zip(golden(prose), kept["prompts"], strict=True):
        for field, value in wanted.items():
            assert made[field] == value, (made["task"], field)


def test_settings_are_those_of_rulers_configuration():
    """NVIDIA/RULER, scripts/synthetic.yaml."""
    single = {t: ruler.TASKS[t].setting for t in ruler.TASKS if t.startswith("niah")}
    assert single["niah_single_3"] == Needles("text", "words", "uuids", 1, 1, 1)
    assert single["niah_multikey_1"] == Needles("text", "words", "numbers", 4, 1, 1)
    assert single["niah_multikey_3"] == Needles("needles", "uuids", "uuids", 1, 1, 1)
    assert single["niah_multivalue"].values == 4 and single["niah_multiquery"].queries == 4
    limits = {t: task.max_new_tokens for t, task in ruler.TASKS.items()}
    assert set(limits.values()) == {128, 30, 120, 50, 32} and len(limits) == 13
    parts = [t for t, task in ruler.TASKS.items() if task.metric == "string_match_part"]
    assert parts == ["qa_1", "qa_2"]
    assert len(all_words()) > 6000  # distinct words of a list at 64K tokens: some 4,500


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "harbour.txt").write_text(PROSE)
        record = {"tokenizer": "bytes", "num_tokens": 3600, "seed": 42, "prompts": golden(place)}
    GOLDEN.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
