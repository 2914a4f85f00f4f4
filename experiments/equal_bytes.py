"""Arms of a comparison at equal bytes over prompts: one prefill, every method, a row each.

Each prompt is prefilled once; every method compresses that same prefill; what follows (a question
and its gold answer, or the text's own continuation) is scored by teacher forcing over what the
cache attends to. A configuration here is any dataclass with the fields that `Settings` names.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from experiments import anchorkv_report
from experiments.arms import Arm
from experiments.runner import Run, bound_programs
from kvjax import accounting, decode, registry, turns
from kvjax.evaluation import continuation, needle
from kvjax.types import PromptShape
from models import hub


class Settings(Protocol):
    """What of a configuration is read here."""

    task: str  # "needle" or "text"
    needles: tuple[str, ...]  # formats: haystack_digits, or haystack_digits_multikeyN
    prompts: int  # of each format, or texts
    batch: int  # prompts that are prefilled together
    continuation: int  # later tokens of a text that are scored
    aware: bool  # compress after the question instead of before it
    generate: bool  # also generate from the packed cache
    folder: str | None  # of .txt files for natural text
    seed: int


class Prompt(NamedTuple):
    """A context, what follows it, and where in that the gold answer begins."""

    task: str
    number: int
    depth: float | None
    context: tuple[int, ...]
    follows: tuple[int, ...]
    answer_start: int  # column in `follows`; its length where there is no answer
    answer: str


def prompts(config: Settings, tokenizer: Any, length: int) -> list[Prompt]:
    """The prompts of one context length."""
    if config.task == "text":
        texts = []
        for i in range(config.prompts):
            total = length + config.continuation
            ids = needle.running_text(tokenizer, total, config.seed + i, config.folder)
            texts.append(Prompt("text", i, None, ids[:length], ids[length:], total - length, ""))
        return texts
    made = []
    for name in config.needles:
        found = re.fullmatch(r"(noise|text)_(\d+)(?:_multikey(\d+))?", name)
        if not found:
            raise ValueError(f"needles={name!r} must read like noise_7 or text_7_multikey4.")
        haystack, digits, count = found[1], int(found[2]), int(found[3] or 1)
        if haystack == "text" and config.folder:
            haystack = config.folder
        for i, depth in enumerate(needle.depth_grid(config.prompts)):
            built = needle.build(
                tokenizer, num_tokens=length, depth=depth, haystack=haystack, digits=digits,
                num_needles=count, seed=config.seed + i,
            )  # fmt: skip
            before = built.question_ids if config.aware else ()
            after = built.answer_ids if config.aware else built.question_ids + built.answer_ids
            # The last question token is always run after compression: it predicts the answer.
            context = built.context_ids + before[:-1]
            follows = (*before[-1:], *after)
            start = len(follows) - len(built.answer_ids)
            made.append(Prompt(name, i, depth, context, follows, start, built.answer))
    return made


def load(model: str | None, matmul: str) -> hub.Loaded:
    """Load a model; with matmul="bfloat16" its products with weights are in bfloat16."""
    loaded = hub.load(model)
    if matmul == "bfloat16":
        loaded = dataclasses.replace(loaded, params=lighter(loaded.params))
    return loaded


def lighter(params: dict[str, Any]) -> dict[str, Any]:
    """Matrices in bfloat16, norms and embedding as they are: activations stay float32."""

    def matrix(x):
        return x.astype(jnp.bfloat16) if x.ndim == 2 else x

    layers = [jax.tree.map(matrix, layer) for layer in params["layers"]]
    head = {"head": matrix(params["head"])} if "head" in params else {}
    return {**params, **head, "layers": layers}


def shape_of(rows: Sequence[Prompt], loaded: hub.Loaded) -> PromptShape:
    """The shape that arms are planned for: the longest context."""
    longest = max(len(prompt.context) for prompt in rows)
    return PromptShape(longest, loaded.model.num_kv_heads, loaded.model.head_dim)


def sweep(
    config: Settings,
    run: Run,
    loaded: hub.Loaded,
    rows: Sequence[Prompt],
    arms: Sequence[Arm],
    length: int,
) -> None:
    """All prompts of one length under the full cache and all arms; finished cells are skipped."""
    longest = shape_of(rows, loaded).num_tokens
    cells = [Arm("full", 1.0, registry.make("full"), None), *arms]
    width = -(-max(len(p.follows) for p in rows) // 8) * 8
    total = len(cells) * -(-len(rows) // config.batch)
    with run.progress(total, f"{length:,} tokens") as progress:
        for at in range(0, len(rows), config.batch):
            chunk = rows[at : at + config.batch]
            todo = [arm for arm in cells if not finished(run, arm, chunk, length)]
            for _ in range(len(cells) - len(todo)):
                progress.advance(skipped=True)
            if todo:
                for arm in measure(config, run, loaded, chunk, todo, longest, width, length):
                    progress.advance(f"{arm.label} {arm.target_ratio:.1f}x")
                    bound_programs()


def key(arm: Arm, prompt: Prompt, length: int) -> dict[str, Any]:
    """What identifies a row."""
    return {"length": length, "task": prompt.task, "prompt": prompt.number, **arm.key}


def finished(run: Run, arm: Arm, chunk: Sequence[Prompt], length: int) -> bool:
    """Whether every row of an arm and batch is there."""
    return all(run.finished(key(arm, prompt, length)) is not None for prompt in chunk)


def measure(
    config: Settings,
    run: Run,
    loaded: hub.Loaded,
    chunk: Sequence[Prompt],
    arms: Sequence[Arm],
    longest: int,
    width: int,
    length: int,
) -> Iterator[Arm]:
    """One batch: prefill once, then every arm; a row a prompt and arm."""
    model, params = loaded.model, loaded.params
    filled = list(chunk) + [chunk[-1]] * (config.batch - len(chunk))  # one shape for all batches
    tokens, starts = decode.left_pad([p.context for p in filled])
    missing = longest - tokens.shape[1]
    tokens = jnp.pad(tokens, ((0, 0), (missing, 0)))
    starts = starts + missing
    sums = any(getattr(arm.method, "column_sums", False) for arm in arms)
    prefill = decode.prefill(model, params, tokens, starts, column_sums=sums)

    follows = np.zeros((len(filled), width), np.int32)
    for i, prompt in enumerate(filled):
        follows[i, : len(prompt.follows)] = prompt.follows
    follows = jnp.asarray(follows)
    new = [len(p.follows) for p in filled]
    positions = continuation.continuation_positions(prefill.lengths, new, width)
    answers = jnp.asarray([p.answer_start for p in filled], jnp.int32)
    block = max([arm.method.flush_every or 0 for arm in arms] + [64])  # room to round up to
    slots = -(-(longest + block) // 64) * 64

    def views(method):
        caches = decode.compress(method, prefill.prompts, model, reserve=1)
        return caches, continuation.view(caches, model, slots)

    full_caches, full_views = views(registry.make("full"))
    probe = probed_columns(config, answers, width)
    full = continuation.force(model, params, full_views, follows, positions, probe)
    reference = continuation.reference(full.logits)
    if not run.rows:
        check_no_op(views, (model, params), (follows, positions, probe), full)
    shape = PromptShape(longest, model.num_kv_heads, model.head_dim)
    for arm in arms:
        caches, seen = (full_caches, full_views) if arm.label == "full" else views(arm.method)
        stored = accounting.live_bytes(caches).stored
        check_bytes(arm, stored, shape, len(caches))
        errors = continuation.output_errors(seen, full)
        found = generated(config, loaded, arm, prefill, chunk) if config.generate else {}
        ratios = accounting.compression_ratio(caches, shape, prefill.lengths)
        allocated = accounting.cache_bytes(caches)
        table = {arm_name(arm, length): [accounting.components(cache) for cache in caches]}
        if arm.label == "full":
            logits = full.logits
        elif any(cache.evicts for cache in caches):  # a view would not evict
            logits = continuation.packed(model, params, caches, follows, positions)
        else:
            logits = continuation.force(model, params, seen, follows, positions, probe).logits
        quality = continuation.quality(reference, logits, follows, positions, answers)
        for i, prompt in enumerate(chunk):
            if run.finished(key(arm, prompt, length)) is not None:
                continue
            row = key(arm, prompt, length) | {
                "depth": prompt.depth,
                "aware": config.aware,
                "limit": arm.limit,
                "setting": repr(arm.method),
                "ratio": ratios[i],
                "removed": 1 - 1 / ratios[i],
                "kv_bytes": int(stored[i]),
                "allocated_bytes": allocated.body + allocated.metadata,
                "tail_bytes": allocated.tail,
                "error": errors[i].mean(),
                "error_by_layer": errors[i],
                "error_probed": errors[i][anchorkv_report.probed(len(caches))].mean(),
                "nll": quality.nll[i],
                "kl": quality.kl[i],
                "top5": quality.top5_overlap[i],
                "top1": quality.top1_agreement[i],
                "first_divergence": int(quality.first_divergence[i]),
            }
            if prompt.answer:
                row |= {
                    "exact": quality.exact[i],
                    "token_match": quality.token_match[i],
                    "answer_nll": quality.answer_nll[i],
                    **{name: values[i] for name, values in found.items()},
                }
            run.append(row, kv_bytes=table if i == 0 else None)
        yield arm


def arm_name(arm: Arm, length: int) -> str:
    """Name of an arm in kv_bytes.json."""
    basis = "" if arm.basis == "measured" else f" {arm.basis}"
    return f"{length}/{arm.label}@{arm.target_ratio:.2f}x{basis}"


def check_bytes(arm: Arm, stored: np.ndarray, shape: PromptShape, layers: int) -> None:
    """Fail unless the compression that was asked for is what the arrays hold."""
    if arm.label == "full" or arm.limit is not None or arm.basis != "measured":
        return
    most = shape.full_bytes / arm.target_ratio * layers
    if stored.max() > most + 0.5:
        raise ValueError(
            f"{arm.label} holds {stored.max()} bytes a prompt where {most:.0f} were asked for:"
            " its arrays must stay within the target."
        )


def check_no_op(views, model, inputs, full) -> None:
    """Fail unless an evictor that keeps everything gives the full cache's logits exactly."""
    _, seen = views(registry.make("snapkv").exact())
    forced = continuation.force(*model, seen, *inputs)
    if not bool((forced.logits == full.logits).all()):
        worst = float(jnp.abs(forced.logits - full.logits).max())
        raise ValueError(f"the no-op arm differs from the full cache by {worst}: it must not.")


def probed_columns(config: Settings, answers: jax.Array, width: int) -> jax.Array:
    """Columns whose attention error is measured: around the answer's start, or all of a text."""
    if config.task == "text":
        return jnp.broadcast_to(jnp.arange(width), (len(answers), width))
    return jnp.clip(answers[:, None] - 8 + jnp.arange(16)[None], 0, width - 1)


def generated(config, loaded, arm, prefill, chunk) -> dict[str, list[float]]:
    """Whether a real greedy generation from the packed cache gives the number."""
    model, params, longest = loaded.model, loaded.params, max(len(p.follows) for p in chunk)
    rows = len(prefill.lengths)
    questions = [p.follows[: p.answer_start] for p in chunk]
    questions += [questions[-1]] * (rows - len(questions))
    new = [len(q) for q in questions]
    caches = decode.compress(arm.method, prefill.prompts, model, reserve=2 * longest + 32)
    logits, caches = turns.append(model, params, caches, prefill.lengths, questions)
    limit = max(len(p.follows) - p.answer_start for p in chunk) + 4
    made, _ = decode.generate(
        model, params, caches, logits, jnp.asarray(prefill.lengths + new),
        max_new_tokens=limit, stop_ids=sorted(loaded.tokenizer.stop_ids),
    )  # fmt: skip
    texts = [loaded.tokenizer.decode([t for t in row if t >= 0]) for row in np.asarray(made.tokens)]
    return {"generated_exact": [float(p.answer in t) for p, t in zip(chunk, texts, strict=False)]}
