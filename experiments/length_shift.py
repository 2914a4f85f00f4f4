"""Does compression change how long answers become, where they part, and what they say?

    python -m experiments.length_shift                    # built-in prompts, four methods
    python -m experiments.length_shift --prompts FILE     # .jsonl, .csv, ShareGPT's .json
    python -m experiments.length_shift --temperatures 0 0.7 1 --top-ps 0.9 1 --seeds 1 2 3
    python -m experiments.length_shift --dataset          # the length predictor's training set

The same prompts are answered to their real end of sequence under the full cache and each method.
Every method compresses the same prefill to the same measured bytes; samples draw with the same
keys. An answer that the limit cut off is counted as truncated and has no length. D = (L_full -
L_compressed) / L_full. Beside the methods stand two controls: the full cache in float32 (greedy)
and the full cache with another seed (sampled).
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments import length_dataset, length_report, length_timing
from experiments.answers import arm_for
from experiments.arms import Arm, solve
from experiments.length_dataset import Request
from experiments.length_rows import (
    answer_row,
    decoder_encoder,
    forced_row,
    keys_for,
    pair_row,
    pooled,
)
from experiments.ratio_arms import nearest_point
from experiments.runner import Run, bound_programs, main
from kvjax import accounting, decode, registry
from kvjax.accounting import Budget
from kvjax.evaluation import length_shift, stepwise
from kvjax.evaluation.stepwise import Answer, Sampling
from kvjax.types import PromptShape
from models import hub

FLOAT32, OTHER_SEED = "full, float32", "full, other seed"


@dataclass(frozen=True)
class Config:
    """Answers under the full cache and under compressed ones."""

    methods: tuple[str, ...] = (
        "kivi(residual_length=32)", "streaming_llm(when='step')", "anchorkv",
    )  # fmt: skip
    """methods: name, preset:name, name(option=value); "full" is always there"""
    ratio: float = 4.0
    """full bfloat16 bytes over stored bytes, right after the prompt"""
    match: bool = True
    """give every method the bytes of the first one with discrete settings (KIVI's bit widths)"""
    prompts: str | None = "builtin"
    """prompt file (.jsonl, .csv, ShareGPT's .json, or with .gz); "builtin": worked sums with a
    known answer and passages to write about, long enough to be compressed"""
    count: int = 8
    """prompts"""
    max_prompt: int = 448
    """longest prompt, tokens with the chat's frame; built-in ones are three quarters of it"""
    limit: int = 192
    """most tokens of an answer; with fewer than 512 more answers are cut off"""
    temperatures: tuple[float, ...] = (0.0, 0.8)
    """0 = greedy"""
    top_ps: tuple[float, ...] = (0.95,)
    """nucleus masses; each with each temperature above 0"""
    seeds: tuple[int, ...] = (1, 2)
    """of the samples; with two or more the full cache's noise is measured"""
    force: bool = True
    """run the full cache's greedy answer through each cache: P(EOS) where it stopped"""
    batch: int = 8
    """prompts that are prefilled and decoded together"""
    timed_prompts: int = 2
    """prompts answered alone, with a clock; 0: none"""
    model: str | None = None
    """GGUF file, Hugging Face directory, hub id or "tiny"; default SmolLM2-135M-Instruct"""
    dataset: bool = False
    """write the length predictor's training set instead: experiments.length_dataset with its own
    defaults, this `model` and `seed`, and of `methods`, `prompts`, `count`, `limit`, `batch` and
    `max_prompt` those that are not the defaults here; nothing else may be given"""
    seed: int = 42
    """of the built-in prompts, or of which ones of a file are taken"""


TINY = Config(
    model="tiny", methods=("h2o",), count=2, batch=2, limit=8,
    max_prompt=700, timed_prompts=1, ratio=3.0,
)  # fmt: skip


def run(config: Config, run: Run) -> None:
    """Answer batch by batch, time some, report."""
    if config.dataset:
        length_dataset.run(dataset_config(config), run)
        return
    settings = grid(config)
    if min(config.count, config.batch, config.limit) < 1:
        raise ValueError("count, batch and limit must be at least 1.")
    if config.timed_prompts < 0:
        raise ValueError(f"timed_prompts={config.timed_prompts} must be 0 or more.")
    if config.ratio <= 0:
        raise ValueError(f"ratio={config.ratio} must be positive, above 1 for smaller caches.")
    for label in config.methods:
        registry.make(label)  # an unknown method fails before a model is loaded
    found = length_dataset.read(config.prompts)
    loaded = hub.load(config.model)
    if found is None:
        found = length_dataset.built_in(config, loaded.tokenizer)
    encoded = length_dataset.encode(found, loaded.tokenizer)
    requests, left_out = length_dataset.choose(config, encoded)
    requests.sort(key=lambda request: len(request.ids))
    run.watch(length_report.scalars)
    arms = plan(config, loaded, requests)
    total = len(settings) * (len(arms) + 1) * -(-len(requests) // config.batch)
    with run.progress(total, "answers") as progress:
        for at in range(0, len(requests), config.batch):
            measure(config, run, loaded, arms, requests, at, progress)
    if config.timed_prompts:
        picked = requests[:: max(len(requests) // config.timed_prompts, 1)]
        timed = [arm for arm in arms if arm.label != FLOAT32]
        methods = solved(timed, loaded, requests)
        length_timing.time_requests(
            run, loaded, timed, methods, picked[: config.timed_prompts], config.limit
        )
    length_report.report(run, config, loaded.name, left_out)


def dataset_config(config: Config) -> length_dataset.Config:
    """The data set's own defaults, with what this command line changed.

    Raises:
        ValueError: for a setting that has no part in it.
    """
    changed = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)
               if getattr(config, f.name) != f.default and f.name != "dataset"}  # fmt: skip
    unknown = sorted(set(changed) - {f.name for f in dataclasses.fields(length_dataset.Config)})
    if unknown:
        raise ValueError(f"{', '.join(unknown)} must not be given with dataset: it has no such.")
    return length_dataset.Config(**changed)


def grid(config: Config) -> list[tuple[float, float, int | None]]:
    """(temperature, top_p, seed) of every setting; greedy has neither of the last two.

    Raises:
        ValueError: for a temperature, top-p or seeds out of range, or one that is there twice.
    """
    if not config.temperatures or min(config.temperatures) < 0:
        raise ValueError(f"temperatures={config.temperatures} must be some, 0 or more each.")
    hot = [t for t in config.temperatures if t > 0]
    if hot and not (config.top_ps and config.seeds and all(0 < p <= 1 for p in config.top_ps)):
        raise ValueError(
            f"top_ps={config.top_ps} must be in (0, 1] and seeds={config.seeds} at least one,"
            " for temperatures above 0."
        )
    for name in ("temperatures", "top_ps", "seeds"):
        values = getattr(config, name)
        if len(set(values)) != len(values):
            raise ValueError(f"{name}={values} must be different from each other.")
    greedy = [(0.0, 1.0, None)] if 0 in config.temperatures else []
    return greedy + list(itertools.product(hot, config.top_ps, config.seeds))


def plan(config: Config, loaded: hub.Loaded, requests: Sequence[Request]) -> list[Arm]:
    """The full cache, its float32 form, and every method at the ratio or as near as it gets."""
    shape = shape_of(requests, loaded)
    layers, ratio, arms = len(loaded.model.windows), config.ratio, {}
    made = {label: registry.make(label) for label in config.methods}
    for label, method in made.items():
        if hasattr(method, "points"):
            point, own = nearest_point(method, config.ratio, shape, layers)
            arms[label] = Arm(label, own, point, "discrete setting")
            if config.match and ratio == config.ratio:
                ratio = own
    for label, method in made.items():
        if label not in arms:
            arms[label] = solve(label, method, Budget(ratio=ratio), shape, layers)
    full = registry.make("full")
    controls = [Arm("full", 1.0, full, None), Arm(FLOAT32, 1.0, full, None)]
    return controls + [arms[label] for label in config.methods]


def shape_of(requests: Sequence[Request], loaded: hub.Loaded) -> PromptShape:
    """Of the longest prompt."""
    longest = max(len(request.ids) for request in requests)
    return PromptShape(longest, loaded.model.num_kv_heads, loaded.model.head_dim)


def solved(arms: Sequence[Arm], loaded: hub.Loaded, requests: Sequence[Request]) -> dict[str, Any]:
    """Each arm's method at the arm's ratio for these prompts."""
    shape, layers = shape_of(requests, loaded), len(loaded.model.windows)
    return {
        arm.label: (arm if arm.target_ratio == 1.0 else arm_for(arm, shape, layers)).method
        for arm in arms
    }


def key(arm: Arm, request: Request, setting: tuple) -> dict[str, Any]:
    """What identifies a row."""
    temperature, top_p, seed = setting
    return {
        "kind": "answer", "prompt": request.prompt.id, "temperature": temperature,
        "top_p": top_p, "seed": seed, **arm.key,
    }  # fmt: skip


class Batch:
    """One batch of prompts, prefilled once; answers of any method from that same prefill."""

    def __init__(
        self, config: Config, loaded: hub.Loaded, requests: Sequence[Request], at: int,
        column_sums: bool,
    ):  # fmt: skip
        """Take the batch that begins at request `at`; a short one repeats its last prompt.

        `column_sums`: some method ranks by them.
        """
        self.config, self.loaded, self.first, self.sums = config, loaded, at, column_sums
        self.requests = list(requests[at : at + config.batch])
        spare = config.batch - len(self.requests)
        rows = self.requests + self.requests[-1:] * spare
        self.tokens = decode.left_pad([request.ids for request in rows], 64)
        self.prefills: dict[Any, decode.Prefill] = {}

    def prefill(self, dtype: Any) -> decode.Prefill:
        """The prompts' keys and values in a dtype."""
        if dtype not in self.prefills:
            sums = self.sums and dtype == jnp.bfloat16  # the other is for the full cache alone
            self.prefills[dtype] = decode.prefill(
                self.loaded.model, self.loaded.params, *self.tokens, dtype=dtype, column_sums=sums
            )
        return self.prefills[dtype]

    def answers(
        self, label: str, method: Any, setting: tuple, forced: Any = None, limit: int | None = None
    ) -> tuple[list[Answer], np.ndarray]:
        """Each prompt's answer, and the bytes stored right after the prompts."""
        model, (temperature, top_p, seed) = self.loaded.model, setting
        prefill = self.prefill(jnp.float32 if label == FLOAT32 else jnp.bfloat16)
        caches = decode.compress(method, prefill.prompts, model, reserve=self.config.limit)
        stored = accounting.live_bytes(caches).stored
        keys = None
        if seed is not None:
            keys = keys_for(seed, range(self.first, self.first + self.config.batch))
        if forced is not None:
            forced = [answer.tokens for answer in forced]
        found = stepwise.answer(
            model, self.loaded.params, caches, prefill.logits, prefill.lengths,
            limit=limit or self.config.limit, stop_ids=sorted(self.loaded.tokenizer.stop_ids),
            real=len(self.requests), sampling=Sampling(temperature, top_p, keys), forced=forced,
            smallest=max(self.config.batch // 2, 1),
        )  # fmt: skip
        return found, stored


def measure(
    config: Config,
    run: Run,
    loaded: hub.Loaded,
    arms: Sequence[Arm],
    requests: Sequence[Request],
    at: int,
    progress: Any,
) -> None:
    """One batch under every arm and setting; finished cells are skipped."""
    settings = grid(config)
    sums = any(getattr(arm.method, "column_sums", False) for arm in arms)
    batch = Batch(config, loaded, requests, at, sums)
    methods = solved(arms, loaded, batch.requests)
    other = Arm(OTHER_SEED, 1.0, methods["full"], None)
    cells = [(arm, s) for arm in [*arms, other] for s in settings if applies(arm, s, config)]
    todo = [
        (arm, s)
        for arm, s in cells
        if any(run.finished(key(arm, request, s)) is None for request in batch.requests)
    ]
    for _ in range(len(settings) * (len(arms) + 1) - len(todo)):
        progress.advance(skipped=True)
    if not todo:
        return
    full = {s: batch.answers("full", methods["full"], s) for s in settings}
    if not run.rows:
        check_no_op(batch, full[settings[0]][0], settings[0])
    encode = decoder_encoder(loaded, config.batch)
    every = [encode([a.tokens for a in full[s][0]]) for s in settings]
    center = np.mean([pooled(x, len(x)) for found in every for x in found], 0)
    for arm, setting in todo:
        if arm.label == "full":
            answers, stored = full[setting]
        elif arm.label == OTHER_SEED:
            answers, stored = full[next_seed(setting, config)]
        else:
            answers, stored = batch.answers(arm.label, methods[arm.label], setting)
        forced = None
        if config.force and setting[2] is None and arm.label != FLOAT32:
            forced = full[setting][0]
            if arm.label != "full":
                forced, _ = batch.answers(arm.label, methods[arm.label], setting, forced=forced)
        reference, states = full[setting][0], encode([a.tokens for a in answers])
        for i, (request, answer) in enumerate(zip(batch.requests, answers, strict=True)):
            if run.finished(key(arm, request, setting)) is not None:
                continue
            own = every[settings.index(setting)]
            row = key(arm, request, setting) | {"limit": arm.limit}
            row["setting"] = repr(methods.get(arm.label, arm.method))
            row |= answer_row(request, answer, loaded, int(stored[i]), len(reference[i].tokens))
            if arm.label == "full" and len(own) > 1:
                far = own[(i + 1) % len(own)]  # another prompt's answer: what unrelated looks like
                vectors = pooled(own[i], len(own[i]))[None], pooled(far, len(far))[None]
                row["similarity_floor"] = float(length_shift.similarity(*vectors, center)[0])
            if arm.label != "full":
                pair = (own[i], states[i])
                stops = loaded.tokenizer.stop_ids
                row |= pair_row(reference[i], answer, pair, center, stops)
            if forced is not None:
                row |= forced_row(reference[i], forced[i])
            run.append(row)
        progress.advance(f"{arm.label} {setting}")
        bound_programs()


def applies(arm: Arm, setting: tuple, config: Config) -> bool:
    """Whether an arm is measured: float32 where nothing is drawn, another seed where it is."""
    if arm.label == OTHER_SEED:
        return setting[2] is not None and len(config.seeds) > 1
    return arm.label != FLOAT32 or setting[2] is None


def next_seed(setting: tuple, config: Config) -> tuple:
    """The same setting with the seed that comes next."""
    at = config.seeds.index(setting[2])
    return (*setting[:2], config.seeds[(at + 1) % len(config.seeds)])


def check_no_op(batch: Batch, full: Sequence[Answer], setting: tuple) -> None:
    """Fail unless an evictor that keeps everything gives the full cache's answers exactly."""
    limit = min(batch.config.limit, 16)
    kept, _ = batch.answers("snapkv", registry.make("snapkv").exact(), setting, limit=limit)
    for request, a, b in zip(batch.requests, full, kept, strict=True):
        n = len(b.tokens)
        same = (a.tokens[:n] == b.tokens).all() and (a.gap[:n] == b.gap).all()
        if not same:
            raise ValueError(
                f"the no-op arm differs from the full cache on {request.prompt.id}: it must not."
            )


if __name__ == "__main__":
    main(Config, run)
