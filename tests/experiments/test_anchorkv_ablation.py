"""AnchorKV's studies: the rules of their verdicts, their formulas against numpy, their options."""

import dataclasses
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import (
    ablation_content,
    ablation_geometry,
    ablation_groups,
    ablation_linear,
    ablation_prompts,
    ablation_recode,
    ablation_settings,
    anchorkv_ablation,
)
from experiments.ablation_batch import Question, cache_and_view, prepare
from experiments.ablation_texts import output_error
from experiments.ablation_verdict import above, below, mean_of, paired, together, within
from experiments.anchorkv_ablation import Config, settle
from experiments.record import read_rows
from experiments.runner import Run, main
from kvjax import anchors, registry
from kvjax.metrics import Interval
from kvjax.pallas.anchor_decode import xla
from kvjax.types import PromptShape
from models import hub, tiny
from tests import prompts

SHAPE = prompts.Shape(dim=32, heads=4, kv_heads=2, lengths=(160, 160))


def test_verdicts_are_a_rule_on_the_interval():
    low, high, both = Interval(-1, -2, -0.5, 4), Interval(1, 0.5, 2, 4), Interval(0, -1, 1, 4)
    assert [below(i, 0) for i in (low, high, both)] == ["confirmed", "refuted", "undecided"]
    assert [above(i, 0) for i in (low, high, both)] == ["refuted", "confirmed", "undecided"]
    assert [within(i, -3, 0) for i in (low, high, both)] == ["confirmed", "refuted", "undecided"]
    one = Interval(5, None, None, 1)
    assert {below(one, 9), above(one, 0), within(one, 0, 9)} == {"undecided"}
    at = Interval(0, 0, 0, 4)  # on a bound that has to be passed
    assert below(at, 0) == above(at, 0) == "refuted" and within(at, 0, 1) == "confirmed"
    assert below(Interval(-1, -2, 0, 4), 0) == above(Interval(1, 0, 2, 4), 0) == "undecided"
    assert together(["confirmed", "undecided"]) == "undecided" == together([])
    assert together(["confirmed", "refuted", "undecided"]) == "refuted"


def test_pairs_are_matched_by_prompt():
    rows = [
        {"task": "a", "prompt": i, "method": m, "x": float(10 * i + (m == "two") * (i + 1))}
        for m in ("one", "two") for i in (2, 0, 1)
    ]  # fmt: skip
    gap = paired(rows[:5], "x", {"method": "two"}, {"method": "one"})
    assert gap.n == 2 and gap.mean == pytest.approx((3 + 1) / 2)  # the third pair has no partner
    assert paired(rows, "x", {"method": "two"}, {"method": "three"}) is None
    assert mean_of(rows, "x", method="one").mean == pytest.approx(10)


def head(seed=0, tokens=40, queries=6, dim=8, error=0.05):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(n, dim)) for n in (queries, tokens, tokens))
    rough = k + error * rng.normal(size=k.shape), v + error * rng.normal(size=v.shape)
    return [jnp.asarray(x, jnp.float32) for x in (q, k, v, *rough)]


def outputs(q, k, v):
    logits = np.asarray(q, np.float64) @ np.asarray(k, np.float64).T / np.sqrt(q.shape[1])
    p = np.exp(logits - logits.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True), p / p.sum(1, keepdims=True) @ np.asarray(v, np.float64)


def test_predicted_and_measured_change_against_numpy():
    q, k, v, rough_k, rough_v = head()
    found = ablation_linear.squares(q, k, v, rough_k, rough_v)
    alpha, y = outputs(q, k, v)
    after = outputs(q, rough_k, rough_v)[1]
    assert found["measured"] == pytest.approx(np.square(after - y).sum(1).mean(), rel=1e-4)
    own, linear = np.zeros(len(q)), np.zeros((len(q), q.shape[1]))
    for t in range(len(k)):
        ds = np.asarray(q @ (rough_k[t] - k[t])) / np.sqrt(q.shape[1])
        of_key = (alpha[:, t] * ds)[:, None] * (np.asarray(v[t]) - y)
        of_value = alpha[:, t, None] * np.asarray(rough_v[t] - v[t])
        own += np.square(of_key).sum(1) + np.square(of_value).sum(1)
        linear += of_key + of_value
    assert found["predicted"] == pytest.approx(own.mean(), rel=1e-3)
    assert found["linear"] == pytest.approx(np.square(linear).sum(1).mean(), rel=1e-3)
    assert found["measured"] == pytest.approx(float(found["linear"]), rel=0.05)  # errors are small


def test_leave_one_out_is_what_replacing_one_key_does():
    q, k, v, rough_k, _ = head(error=1.0)
    first, exact = ablation_linear.leave_one_out(q, k, v, rough_k)
    y = outputs(q, k, v)[1]
    for t in (0, 7, 39):
        changed = outputs(q, k.at[t].set(rough_k[t]), v)[1]
        assert exact[t] == pytest.approx(np.square(changed - y).sum(1).mean(), rel=1e-3)
    small = ablation_linear.leave_one_out(q, k, v, k + 1e-3 * (rough_k - k))
    np.testing.assert_allclose(*small, rtol=0.02, atol=1e-12)
    assert np.abs(np.log(np.asarray(first / exact))).max() > 0.3  # far from first order here


def compressed(label, ratio=4.0):
    prompt, layer = prompts.prompt(SHAPE), prompts.info(SHAPE)
    shape = PromptShape(160, 2, 32, prompt.k.dtype.itemsize)
    method = dataclasses.replace(registry.make(label), theta=1 / ratio).resolve(shape)
    return prompt, *cache_and_view(method, prompt, layer, 256)


def test_coding_anew_with_the_methods_own_code_changes_nothing():
    prompt, cache, view = compressed(ablation_settings.BASE)
    same = ablation_recode.recoded(cache, prompt, view, spin=True, uniform=False)
    np.testing.assert_allclose(same.k, view.k, atol=2e-2)
    np.testing.assert_allclose(same.v, view.v, atol=2e-2)
    plain = ablation_recode.recoded(cache, prompt, view, spin=False, uniform=False)
    bad = ablation_recode.naive(cache, prompt, view)
    queries = prompt.q[:, :, -8:]
    errors = [float(output_error(x, prompt, queries).mean()) for x in (view, plain, bad)]
    assert errors[2] > 1.1 * max(errors[:2]) and errors[1] != errors[0]


def present(label):
    _, cache, _ = compressed(label, 6.0)
    return np.asarray(xla.slots(cache.body.coded().residuals[0])[1])


def test_rankings_and_quota_spend_the_same_residuals_elsewhere():
    masks = {name: present(label) for name, label in ablation_settings.RANKING.items()}
    assert len({m.sum() for m in masks.values()}) == 1
    names = list(masks)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert (masks[one] != masks[other]).any(), (one, other)
    pooled = masks["utility (floor 1)"].sum(-1)
    quota = present(ablation_settings.COMPONENTS["quota per head"]).sum(-1)
    assert quota.sum() == pooled.sum() and np.ptp(quota, axis=-1).max() <= 1
    assert np.ptp(pooled, axis=-1).max() > 1


def test_the_norm_ranking_takes_the_largest_residuals():
    prompt, cache, _ = compressed("anchorkv(bits=(2,), ranking='norm')", 6.0)
    rough = np.asarray(anchors.rebuild(cache.body.coded(), cache.body.widths))
    chosen = np.asarray(xla.slots(cache.body.coded().residuals[0])[1])
    count = int(cache.body.num_coded[0])
    exact = np.stack([np.asarray(x, np.float32) for x in (prompt.k_unrotated, prompt.v)], 1)
    norm = np.square(exact[:, :, :, :count] - rough[:, :, :, :count]).sum(-1)
    for row in range(2):
        for side in range(2):
            on = chosen[row, side, :, :count]
            assert norm[row, side][on].min() >= norm[row, side][~on].max() * (1 - 1e-4)


def test_pooled_layers_need_utilities():
    method = registry.make("anchorkv(layer_budget='pooled', ranking='random')")
    with pytest.raises(ValueError, match="must be 'utility'"):
        method.resolve(PromptShape(512, 3, 64))


def test_every_token_of_an_answer_is_scored():
    loaded = hub.load("tiny")
    ids = tuple(loaded.tokenizer.encode("one two three four five six seven eight nine ten " * 9))
    long = Question("long", 0, ids[:40], ids[40:80], 10)  # an answer of 30 tokens
    batch = prepare(loaded, [long, Question("also", 0, ids[:30], ids[30:65], 25)])
    assert batch.scored.sum(1).tolist() == [30, 10]
    with pytest.raises(ValueError, match="an answer has 30 tokens"):
        prepare(loaded, [long, Question("short", 0, ids[:30], ids[30:40], 2)])


def test_all_anchors_spend_the_bytes_and_no_more():
    shape = PromptShape(768, 3, 64)
    for ratio in (5.0, 20.0):
        found = ablation_recode.all_anchors("x", ratio, shape)
        stored, target = found.method.layer_bytes(shape), shape.full_bytes / ratio
        more = dataclasses.replace(
            found.method, extra_anchors=found.method.extra_anchors + 1, theta=1.0
        )
        assert stored <= target < more.layer_bytes(shape) and found.limit is None
    limited = ablation_recode.all_anchors("x", 1000.0, shape)
    assert limited.limit.startswith("limit") and limited.method.extra_anchors == 0


def test_the_settings_meet_their_ratios_once_each():
    shape = PromptShape(768, 3, 64)
    studies = ("ranking", "components", "split", "two_anchors")
    made = ablation_settings.settings(studies, (5.0, 10.0, 20.0), 10.0, shape)
    keys = [(s.label, s.target_ratio) for s in made]
    assert len(keys) == len(set(keys)) and len({s.label for s in made}) >= 25
    for s in made:
        stored = s.method.resolve(shape).layer_bytes(shape)
        assert s.limit is None and stored <= shape.full_bytes / s.target_ratio + 0.5, s.label
        assert stored >= 0.93 * shape.full_bytes / s.target_ratio, s.label


def test_cosines_and_second_anchor_against_numpy():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(1, 2, 20, 6)).astype(np.float32)
    at = np.array([[[3, 11, 17], [0, 5, 9]]])
    absolute, signed = ablation_geometry.cosines(jnp.asarray(x), jnp.asarray(at))
    left = ablation_geometry.second_gain(jnp.asarray(x), jnp.asarray(at))
    for h in range(2):
        unit = x[0, h] / np.linalg.norm(x[0, h], axis=1, keepdims=True)
        dots = unit @ unit[at[0, h]].T
        np.testing.assert_allclose(absolute[0, h], np.abs(dots).max(1), atol=1e-5)
        np.testing.assert_allclose(signed[0, h], np.maximum(dots.max(1), 0), atol=1e-5)
        rest = unit.copy()
        for turn in range(2):
            dots = rest @ unit[at[0, h]].T
            best = np.abs(dots).argmax(1)
            rest -= np.take_along_axis(dots, best[:, None], 1) * unit[at[0, h]][best]
            np.testing.assert_allclose(left[turn][0, h], np.square(rest).sum(1), atol=1e-5)


def test_a_claim_on_every_third_of_the_layers_needs_all_three(tmp_path):
    sides = {"keys": 0.9, "keys after RoPE": 0.5, "keys less their mean": 0.8, "values": 0.7}
    depths, words = ("early", "middle", "late"), []
    with Run.create(Config(), tmp_path) as made:
        for depth in depths:
            made.rows.extend(
                {"group": "geometry", "depth": depth, "content": "prose", "prompt": i, "side": side,
                 "absolute": value + 0.001 * i * (side == "keys"), "signed": value}
                for i in range(4) for side, value in sides.items()
            )  # fmt: skip
            verdict = ablation_geometry.rope_report(made)[1][0]
            words.append(verdict.word)
            assert verdict.measured.count("no layer") == 2 - depths.index(depth)
    assert words == ["undecided", "undecided", "confirmed"]


def test_regrouped_and_shortened_prompts():
    prompt = prompts.prompt(SHAPE)
    assert (ablation_groups.regroup(prompt.q, 2, 2) == prompt.q).all()
    wide = ablation_groups.regroup(prompt.q, 2, 3)
    assert (wide == prompt.q[:, jnp.array([0, 1, 2, 2, 3, 0])]).all()
    short = ablation_groups.shortened(prompt, [160, 100])
    assert short.starts.tolist() == [0, 60]
    assert (short.k[1, :, 60:] == prompt.k[1, :, :100]).all()
    assert (short.k[0] == prompt.k[0]).all()


def test_changes_between_texts_tell_kinds_apart():
    rows = [
        {"prompt": i, "layer": 0, "content": kind, "share": [[a, 1 - a], [a, 1 - a]]}
        for i, (kind, a) in enumerate([("prose", 0.5), ("prose", 0.5), ("code", 0.8)])
    ]
    same, other = ablation_content._changes(rows)
    assert same.mean == 0 and other.mean == pytest.approx(0.6) and other.n == 2


def test_the_kept_summary_is_what_the_kept_rows_say(tmp_path):
    folder = Path(__file__).parents[2] / "results" / "anchorkv_ablation"
    loaded = types.SimpleNamespace(
        name="SmolLM2-135M-Instruct", model=types.SimpleNamespace(num_heads=9, num_kv_heads=3)
    )
    with Run.create(Config(), tmp_path) as made:
        made.rows.extend(read_rows(folder / "metrics.jsonl"))
        anchorkv_ablation.report(Config(), made, loaded)
        ours, kept = (
            (path / "summary.md").read_text().partition("\nSmolLM2")[2]
            for path in (made.path, folder)
        )
        assert ours == kept
        plots = {path.name for path in made.path.glob("*.png")}
        assert plots == {path.name for path in folder.glob("*.png")}
    for study in range(1, 11):  # each has a table of its own and a verdict
        assert f"\n## {study} " in ours and f"\n| {study} " in ours
    assert {w for w in ("confirmed", "refuted", "undecided") if f"| {w} |" in ours} > {"confirmed"}


@pytest.mark.parametrize("content", ablation_prompts.CONTENTS)
def test_texts_have_their_length_and_depend_on_the_seed(content):
    tokenizer = tiny.tokenizer()
    one, two = ablation_prompts.texts(tokenizer, content, 300, 2, seed=3)
    assert len(one) == len(two) == 300 and one != two
    assert [one, two] == ablation_prompts.texts(tokenizer, content, 300, 2, seed=3)


def test_conversations_ask_for_the_same_needle_in_three_ways():
    tokenizer = tiny.tokenizer()
    made = ablation_prompts.conversations(tokenizer, 700, 2, seed=1, digits=3)
    assert len({q.task for q in made}) == 3
    for number in range(2):
        own = {q.task: q for q in made if q.number == number}
        text = {t: tokenizer.decode([*q.context, *q.follows]) for t, q in own.items()}
        answers = {tokenizer.decode(q.follows[q.answer_start :]).strip() for q in own.values()}
        assert len(answers) == 1 and answers.pop().isdigit()
        assert text["question"] == text["end of context"]
        context = own["end of context"].context
        assert len(context) == 700 and own["turn 1"].context[:700] == context
        assert text["turn 1"].count("What is the special magic number") == 3
        first = tokenizer.decode(own["turn 1"].context[700:])
        assert first.count("What is") == 1 and first.endswith("\nuser\n")
        assert own["question"].answer_start == 1


def test_what_piles_up_ends_with_the_question():
    tokenizer = tiny.tokenizer()
    made = ablation_prompts.piling(tokenizer, 700, 64, 1, seed=1)
    for q in made:
        text = tokenizer.decode(q.follows[64:])
        answer = tokenizer.decode(q.follows[q.answer_start :]).strip()
        assert text.count("What is the special magic number") == 1
        assert answer.isdigit() and answer in tokenizer.decode(q.context)
    assert made[0].follows[:64] != made[1].follows[:64]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"studies": ()}, "studies is empty"),
        ({"ratios": (0.5,)}, "must be at least 1"),
        ({"layers": 0}, "layers=0"),
        ({"length": -30}, "length=-30 must be at least"),
        ({"group_sizes": (0,)}, "group_sizes=.0,. must be some, at least 1"),
        ({"needles": ("noise_7", "bad")}, "needles='bad' must be haystack_digits"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        settle(dataclasses.replace(Config(), **changes))


def test_an_unknown_study_stops_the_command(tmp_path, capsys):
    arguments = ["--studies", "rankings", "--runs-dir", str(tmp_path)]
    with pytest.raises(SystemExit) as stopped:
        main(Config, anchorkv_ablation.run, arguments)
    assert stopped.value.code != 0 and "rankings" in capsys.readouterr().err
