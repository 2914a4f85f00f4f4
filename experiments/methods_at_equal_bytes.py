"""Which method keeps most of a prompt in the same bytes, and what does compressing cost?

    python -m experiments.methods_at_equal_bytes                    # every method
    python -m experiments.methods_at_equal_bytes --group anchorkv   # AnchorKV, one option at a time
    python -m experiments.methods_at_equal_bytes --tokens 128 256   # or --bits-per-value 2 4

Each prompt is prefilled once; every method compresses that same prefill to the same measured bytes,
the question comes later, and the gold answer is scored by teacher forcing. The evictors run once
more at the same number of tokens, which is how papers count. Then one longer prompt is timed:
prefill, compress and decode step of every method.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments import anchorkv_report, equal_bytes, methods_report
from experiments.arms import Arm, idealised, plan, solve
from experiments.runner import Run, bound_programs, main
from kvjax import accounting, decode, registry
from kvjax.accounting import Budget
from kvjax.evaluation import needle
from kvjax.types import PromptShape
from models import hub

GROUPS = {
    "all": (
        "anchorkv", "paper_short:anchorkv",
        "snapkv", "pyramidkv", "adakv", "pyramid:adakv", "h2o", "h2o(when='prompt')",
        "tova", "tova(when='prompt')", "streaming_llm",
        "streaming_llm(when='step', positions='cache')",
        "expected_attention", "keydiff", "knorm", "random", "snapkv+kivi",
        "kivi", "quantized_cache", "symmetric", "gear", "gear(outliers=0.0)", "turboquant",
    ),
    "anchorkv": (
        "anchorkv", "pooled:anchorkv", "paper_short:anchorkv",
        "anchorkv(attention_floor=0.0)", "anchorkv(attention_floor=0.1)",
        "anchorkv(centered=False)", "anchorkv(scale='absmax')", "anchorkv(gamma_bits=8)",
        "anchorkv(exact_window=True)", "anchorkv(bits=(2,))", "anchorkv(attention_share=1.0)",
        "anchorkv(key_share=None)", "anchorkv(wide_share=None)",
        "anchorkv(anchor_choice='coverage')", "anchorkv(anchors_per_token=2)",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """Every method at equal measured bytes."""

    group: Literal["all", "anchorkv"] = "all"
    """which methods, where `methods` names none: all, or AnchorKV with one option changed each"""
    methods: tuple[str, ...] = ()
    """methods: name, preset:name, name(option=value), evictor+quantizer; "full" is always there"""
    ratios: tuple[float, ...] = ()
    """full bfloat16 bytes over stored bytes; default 2 4 6 10 16"""
    tokens: tuple[int, ...] = ()
    """instead of ratios: tokens kept per KV head"""
    kv_bytes: tuple[float, ...] = ()
    """instead of ratios: stored bytes of a prompt, all layers"""
    bits_per_value: tuple[float, ...] = ()
    """instead of ratios: stored bits over elements of K and V"""
    matched: tuple[str, ...] = ()
    """methods that also run at exactly the bytes of each discrete setting of the others"""
    task: Literal["needle", "text"] = "needle"
    """needle: retrieval of a number; text: the rest of a running text"""
    model: str | None = None
    """GGUF file, Hugging Face directory, hub id or "tiny"; default SmolLM2-135M-Instruct"""
    length: int = 1024
    """context length, tokens"""
    needles: tuple[str, ...] = (
        "noise_7", "noise_3", "text_7", "text_3", "text_7_multikey4",
    )  # fmt: skip
    """needle formats: haystack_digits, or haystack_digits_multikeyN for N needles"""
    prompts: int = 5
    """prompts of each needle format (depths on a grid), or texts"""
    batch: int = 5
    """prompts that are prefilled together"""
    continuation: int = 128
    """later tokens of the same text that are scored in the text task, tokens"""
    aware: bool = False
    """compress after the question instead of before it"""
    generate: bool = False
    """also generate from the packed cache, greedily, and look for the number"""
    idealised_ratio: float = 4.0
    """tokens over kept tokens at which the evictors run once more at equal tokens; 0: not at all"""
    timing_length: int = 2048
    """context of the timed prompt, tokens; 0: nothing is timed"""
    timing_ratio: float = 4.0
    """the budget (or the nearest setting) at which a method is timed"""
    repeats: int = 3
    """times that prefill and every compression are timed; the median counts"""
    matmul: Literal["bfloat16", "float32"] = "bfloat16"
    """products with weights; float32 is exact, and as fast on a CPU without AVX512-BF16 or AMX"""
    folder: str | None = None
    """folder of .txt files for natural text; default: prose that every Python ships"""
    seed: int = 42
    """of needles, haystacks and texts"""


TINY = Config(
    model="tiny", ratios=(3.0,), methods=("h2o", "snapkv", "kivi(residual_length=64)"),
    matched=(), length=300, needles=("noise_3",), prompts=2, batch=2, idealised_ratio=3.0,
    timing_length=200, repeats=1,
)  # fmt: skip
STEPS, WARM_STEPS = 12, 3  # decode steps that are timed, the first of them not


def run(config: Config, run: Run) -> None:
    """Score, time, report."""
    labels = config.methods or GROUPS[config.group]
    budgets = budgets_of(config)
    for label in labels:
        registry.make(label)  # an unknown method fails before a model is loaded
    loaded = hub.load(config.model)
    timed = loaded  # speed is measured in the precision that the model was loaded in
    if config.matmul == "bfloat16":
        loaded = dataclasses.replace(loaded, params=equal_bytes.lighter(loaded.params))
    run.watch(scalars)
    rows = equal_bytes.prompts(config, loaded.tokenizer, config.length)
    shape = equal_bytes.shape_of(rows, loaded)
    layers = len(loaded.model.windows)
    budgets = [b._replace(bytes=b.bytes / layers) if b.bytes else b for b in budgets]
    arms = plan(labels, budgets, [m for m in config.matched if m in labels], shape, layers)
    if config.idealised_ratio and not config.tokens:
        arms += idealised(labels, config.idealised_ratio, shape)
    equal_bytes.sweep(config, run, loaded, rows, arms, config.length)
    if config.timing_length:
        time_methods(config, run, timed, labels)
    methods_report.report(config, run, loaded.name)


def budgets_of(config: Config) -> list[Budget]:
    """The budgets of the command line, in the one unit that it names.

    Raises:
        ValueError: for several units.
    """
    units = {
        "ratio": config.ratios, "tokens": config.tokens, "bytes": config.kv_bytes,
        "bits_per_value": config.bits_per_value,
    }  # fmt: skip
    given = {unit: values for unit, values in units.items() if values}
    if len(given) > 1:
        raise ValueError(f"budgets in {', '.join(given)}: they must be in one unit.")
    given = given or {"ratio": (2.0, 4.0, 6.0, 10.0, 16.0)}
    return [Budget(**{unit: value}) for unit, values in given.items() for value in values]


def scalars(row: dict[str, Any]) -> Any:
    """TensorBoard scalars of a row."""
    if row["task"] != "timing":
        for tag, value, step in anchorkv_report.scalars(row):
            yield tag.translate(_PLAIN), value, step
        return
    method = row["method"].translate(_PLAIN)
    yield f"speed/compress_seconds/{method}", row["compress_seconds"], 0
    yield f"speed/step_seconds/{method}", row["step_seconds"], 0


_PLAIN = str.maketrans({c: "_" for c in "():,='+[] "})


def timing_arms(labels: Sequence[str], ratio: float, shape: PromptShape, layers: int) -> list[Arm]:
    """One arm a method: at the ratio, or the discrete setting whose bytes are nearest to it."""
    arms = [Arm("full", 1.0, registry.make("full"), None)]
    for label in labels:
        method = registry.make(label)
        if not hasattr(method, "points"):
            arms.append(solve(label, method, Budget(ratio=ratio), shape, layers))
            continue

        def distance(point):
            stored = accounting.layer_bytes(point, shape, layers)
            return abs(np.log(shape.full_bytes / stored / ratio))

        arms.append(Arm(label, ratio, min(method.points(), key=distance), "discrete setting"))
    return arms


def time_methods(config: Config, run: Run, loaded: hub.Loaded, labels: Sequence[str]) -> None:
    """Time prefill, compress and decode step of every method on one prompt; a row each."""
    model, params = loaded.model, loaded.params
    length, repeats = config.timing_length, config.repeats
    text = needle.running_text(loaded.tokenizer, length, config.seed, config.folder)[:length]
    tokens, starts = jnp.asarray([text], jnp.int32), jnp.zeros(1, jnp.int32)
    shape = PromptShape(length, model.num_kv_heads, model.head_dim)
    arms = timing_arms(labels, config.timing_ratio, shape, len(model.windows))
    keys = [{"task": "timing", "length": length, "prompt": 0, **arm.key} for arm in arms]
    if all(run.finished(key) is not None for key in keys):
        return

    def prefill(column_sums):
        begin = time.perf_counter()
        made = jax.block_until_ready(
            decode.prefill(model, params, tokens, starts, column_sums=column_sums)
        )
        return time.perf_counter() - begin, made

    with run.progress(len(arms), "timing") as progress:
        for summed in (False, True):
            prefill(summed)  # compiles
        seconds = {
            summed: float(np.median([prefill(summed)[0] for _ in range(repeats)]))
            for summed in (False, True)
        }
        plain, with_sums = prefill(False)[1], prefill(True)[1]
        for arm, key in zip(arms, keys, strict=True):
            if run.finished(key) is not None:
                progress.advance(skipped=True)
                continue
            summed = getattr(arm.method, "column_sums", False)
            prompts = (with_sums if summed else plain).prompts

            def build(arm=arm, prompts=prompts):
                begin = time.perf_counter()
                made = jax.block_until_ready(
                    decode.compress(arm.method, prompts, model, reserve=STEPS)
                )
                return time.perf_counter() - begin, made

            build()  # compiles
            compress = float(np.median([build()[0] for _ in range(repeats)]))
            caches = build()[1]
            stored = int(accounting.live_bytes(caches).stored[0])
            run.append(
                key | {
                    "limit": arm.limit, "kv_bytes": stored, "depth": None,
                    "ratio": shape.full_bytes * len(caches) / stored,
                    "prefill_seconds": seconds[False],
                    "column_sums_seconds": seconds[True] - seconds[False] if summed else 0.0,
                    "compress_seconds": compress,
                    "step_seconds": step_seconds(model, params, caches, length),
                }
            )  # fmt: skip
            progress.advance(arm.label)
            bound_programs()


def step_seconds(model: Any, params: Any, caches: Any, length: int) -> float:
    """Median seconds of a donated decode step, in a Python loop."""
    took = []
    token = jnp.zeros(1, jnp.int32)
    for i in range(STEPS):
        begin = time.perf_counter()
        logits, caches = decode.decode_step(
            model, params, caches, token, jnp.asarray([length + i], jnp.int32)
        )
        jax.block_until_ready(logits)
        took.append(time.perf_counter() - begin)
    return float(np.median(took[WARM_STEPS:]))


if __name__ == "__main__":
    main(Config, run)
