"""What does AnchorKV keep, and what do the alternatives keep in the same bytes?

    python -m experiments.anchorkv_sweep                 # needles, question unknown to the cache
    python -m experiments.anchorkv_sweep --aware         # the cache has seen the question
    python -m experiments.anchorkv_sweep --task text --length 2048   # error on running text

Each prompt is prefilled once; every method compresses that same prefill to the same measured bytes;
question and gold answer are then scored by teacher forcing over what the cache attends to.
"""

import dataclasses
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments import plots
from experiments.arms import Arm, plan
from experiments.report import Column, interval, markdown, print_line, table
from experiments.runner import Run, main
from kvjax import accounting, decode, registry
from kvjax.evaluation import continuation, needle
from kvjax.types import PromptShape
from models import hub

# The prototype's relative error on 2,048 tokens of natural English, layers 0, 4, ..., 29.
PROTOTYPE = {
    ("streaming_llm", 5): 0.295, ("streaming_llm", 10): 0.402, ("streaming_llm", 20): 0.470,
    ("snapkv", 5): 0.194, ("snapkv", 10): 0.295, ("snapkv", 20): 0.384,
    ("anchorkv:paper_short", 5): 0.401, ("anchorkv:paper_short", 10): 0.360,
    ("anchorkv", 5): 0.097, ("anchorkv", 10): 0.123, ("anchorkv", 20): 0.162,
}  # fmt: skip
PROBED = "0 4 9 14 19 24 29"


@dataclass(frozen=True)
class Config:
    """AnchorKV against baselines at equal measured bytes."""

    task: Literal["needle", "text"] = "needle"
    """needle: retrieval of a number; text: attention-output error on running text"""
    model: str | None = None
    """GGUF file, Hugging Face directory, hub id or "tiny"; default SmolLM2-135M-Instruct"""
    lengths: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--length"])] = (1024,)
    """context lengths, tokens"""
    ratios: tuple[float, ...] | None = None
    """full bfloat16 bytes over stored bytes; default 2 4 6 10 16, for text 5 10 20"""
    methods: tuple[str, ...] = (
        "anchorkv", "anchorkv:paper_short", "snapkv", "streaming_llm", "kivi", "random", "knorm",
    )  # fmt: skip
    """methods, as name or name:preset; the full cache is always there"""
    matched: tuple[str, ...] = ("anchorkv",)
    """methods that also run at exactly the bytes of each discrete setting (KIVI's bit widths)"""
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
    quick: bool = False
    """one prompt a format, 4 and 10 times, no random and knorm"""
    folder: str | None = None
    """folder of .txt files for natural text; default: prose that every Python ships"""
    seed: int = 42
    """of needles, haystacks and texts"""


TINY = Config(
    model="tiny", lengths=(1200,), ratios=(3.0, 6.0), methods=("anchorkv", "snapkv", "kivi"),
    needles=("noise_3",), prompts=2, batch=2,
)  # fmt: skip


class Prompt(NamedTuple):
    """A context, what follows it, and where in that the gold answer begins."""

    task: str
    number: int
    depth: float | None
    context: tuple[int, ...]
    follows: tuple[int, ...]
    answer_start: int  # column in `follows`; its length where there is no answer
    answer: str


def prompts(config: Config, tokenizer: Any, length: int) -> list[Prompt]:
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


@dataclasses.dataclass
class Clock:
    """Seconds spent a phase."""

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, phase: str, start: float, *results: Any) -> None:
        """Wait for results and charge the time since start."""
        jax.block_until_ready(results)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def run(config: Config, run: Run) -> None:
    """Sweep, then make tables and plots from the rows."""
    config = settle(config)
    for label in config.methods:
        registry.make(label)  # an unknown method fails before a model is loaded
    loaded = hub.load(config.model)
    run.watch(scalars)
    clock = Clock()
    for length in config.lengths:
        sweep(config, run, loaded, length, clock)
    report(config, run, loaded.name, clock)


def settle(config: Config) -> Config:
    """Fill in what depends on other fields."""
    ratios = config.ratios or ((5, 10, 20) if config.task == "text" else (2, 4, 6, 10, 16))
    if config.quick:
        kept = tuple(m for m in config.methods if m not in ("random", "knorm"))
        ratios = tuple(r for r in (4, 10)) if config.ratios is None else ratios
        config = dataclasses.replace(config, prompts=1, methods=kept, matched=())
    return dataclasses.replace(config, ratios=tuple(float(r) for r in ratios))


def sweep(config: Config, run: Run, loaded: hub.Loaded, length: int, clock: Clock) -> None:
    """All prompts of one length under all arms; finished cells are skipped."""
    rows = prompts(config, loaded.tokenizer, length)
    model = loaded.model
    longest = max(len(p.context) for p in rows)
    shape = PromptShape(longest, model.num_kv_heads, model.head_dim)
    arms = plan(config.methods, config.ratios, config.matched, shape)
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
                for arm in measure(config, run, loaded, chunk, todo, longest, width, clock, length):
                    progress.advance(f"{arm.label} {arm.target_ratio:.1f}x")


def key(arm: Arm, prompt: Prompt, length: int) -> dict[str, Any]:
    """What identifies a row."""
    return {"length": length, "task": prompt.task, "prompt": prompt.number, **arm.key}


def finished(run: Run, arm: Arm, chunk: Sequence[Prompt], length: int) -> bool:
    """Whether every row of an arm and batch is there."""
    return all(run.finished(key(arm, prompt, length)) is not None for prompt in chunk)


def measure(
    config: Config,
    run: Run,
    loaded: hub.Loaded,
    chunk: Sequence[Prompt],
    arms: Sequence[Arm],
    longest: int,
    width: int,
    clock: Clock,
    length: int,
) -> Iterator[Arm]:
    """One batch: prefill once, then every arm; a row a prompt and arm."""
    model, params = loaded.model, loaded.params
    start = time.perf_counter()
    filled = list(chunk) + [chunk[-1]] * (config.batch - len(chunk))  # one shape for all batches
    tokens, starts = decode.left_pad([p.context for p in filled])
    missing = longest - tokens.shape[1]
    tokens = jnp.pad(tokens, ((0, 0), (missing, 0)))
    starts = starts + missing
    prefill = decode.prefill(model, params, tokens, starts)
    clock.add("prefill", start, prefill.prompts)

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

    start = time.perf_counter()
    full_caches, full_views = views(registry.make("full"))
    full = continuation.force(model, params, full_views, follows, positions)
    clock.add("score", start, full)
    if not run.rows:
        check_no_op(views, model, params, follows, positions, full)
    shape = PromptShape(longest, model.num_kv_heads, model.head_dim)
    for arm in arms:
        start = time.perf_counter()
        caches, seen = (full_caches, full_views) if arm.label == "full" else views(arm.method)
        clock.add("compress", start, seen)
        stored = accounting.live_bytes(caches).stored
        check_bytes(arm, stored, shape, len(caches))
        start = time.perf_counter()
        forced = continuation.force(model, params, seen, follows, positions)
        quality = continuation.quality(full.logits, forced.logits, follows, positions, answers)
        errors = continuation.output_errors(seen, full, positions)
        clock.add("score", start, quality)
        found = generated(config, loaded, arm, prefill, chunk) if config.generate else {}
        ratios = accounting.compression_ratio(caches, shape, prefill.lengths)
        allocated = accounting.cache_bytes(caches)
        table = {arm_name(arm, length): [accounting.components(cache) for cache in caches]}
        for i, prompt in enumerate(chunk):
            if run.finished(key(arm, prompt, length)) is not None:
                continue
            row = key(arm, prompt, length) | {
                "depth": prompt.depth,
                "aware": config.aware,
                "limit": arm.limit,
                "ratio": ratios[i],
                "removed": 1 - 1 / ratios[i],
                "kv_bytes": int(stored[i]),
                "allocated_bytes": allocated.body + allocated.metadata,
                "tail_bytes": allocated.tail,
                "error": errors[i].mean(),
                "error_by_layer": errors[i],
                "error_probed": errors[i][probed(len(caches))].mean(),
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


def probed(layers: int) -> list[int]:
    """The layers of the prototype's table, where the model has them."""
    return [layer for layer in (0, 4, 9, 14, 19, 24, 29) if layer < layers]


def arm_name(arm: Arm, length: int) -> str:
    """Name of an arm in kv_bytes.json."""
    return f"{length}/{arm.label}@{arm.target_ratio:.2f}x"


def check_bytes(arm: Arm, stored: np.ndarray, shape: PromptShape, layers: int) -> None:
    """Fail unless the compression that was asked for is what the arrays hold."""
    if arm.label == "full" or arm.limit is not None:
        return
    most = shape.full_bytes / arm.target_ratio * layers
    if stored.max() > most + 0.5:
        raise ValueError(
            f"{arm.label} holds {stored.max()} bytes a prompt where {most:.0f} were asked for:"
            " its arrays must stay within the target."
        )


def check_no_op(views, model, params, follows, positions, full) -> None:
    """Fail unless an evictor that keeps everything gives the full cache's logits exactly."""
    _, seen = views(registry.make("snapkv").exact())
    forced = continuation.force(model, params, seen, follows, positions)
    if not bool((forced.logits == full.logits).all()):
        worst = float(jnp.abs(forced.logits - full.logits).max())
        raise ValueError(f"the no-op arm differs from the full cache by {worst}: it must not.")


def generated(config, loaded, arm, prefill, chunk) -> dict[str, list[float]]:
    """Whether a real greedy generation from the packed cache gives the number."""
    model, params, longest = loaded.model, loaded.params, max(len(p.follows) for p in chunk)
    rows = len(prefill.lengths)
    questions = [p.follows[: p.answer_start] for p in chunk]
    questions += [questions[-1]] * (rows - len(questions))
    width = max(len(q) for q in questions)
    tokens = np.zeros((rows, width), np.int32)
    for i, question in enumerate(questions):
        tokens[i, : len(question)] = question
    new = [len(q) for q in questions]
    positions = continuation.continuation_positions(prefill.lengths, new, width)
    flush = arm.method.flush_every
    caches = decode.compress(arm.method, prefill.prompts, model, reserve=2 * longest + 32)
    hidden, caches = decode.extend(
        model, params, caches, jnp.asarray(tokens), positions, flush_every=flush
    )
    last = jnp.asarray(new) - 1
    logits = decode.head(model, params, hidden[jnp.arange(rows), last])
    limit = max(len(p.follows) - p.answer_start for p in chunk) + 4
    made, _ = decode.generate(
        model, params, caches, logits, jnp.asarray(prefill.lengths + new),
        max_new_tokens=limit, stop_ids=sorted(loaded.tokenizer.stop_ids), flush_every=flush,
    )  # fmt: skip
    texts = [loaded.tokenizer.decode([t for t in row if t >= 0]) for row in np.asarray(made.tokens)]
    return {"generated_exact": [float(p.answer in t) for p, t in zip(chunk, texts, strict=False)]}


def scalars(row: dict[str, Any]) -> Iterator[tuple[str, float, int]]:
    """TensorBoard scalars of a row; the step is the prompt's number."""
    arm = f"{row['method'].replace(':', '_')}_{row['target_ratio']:.1f}x"
    names = {
        "answer/token_match_share": "token_match", "answer/nll_nats": "answer_nll",
        "continuation/kl_nats": "kl", "continuation/nll_nats": "nll",
        "attention/error_share": "error", "memory/kv_bytes": "kv_bytes",
    }  # fmt: skip
    for tag, field in names.items():
        yield f"{tag}/{row['length']}_{row['task']}/{arm}", row.get(field), row["prompt"]


FIELDS = (
    "exact", "generated_exact", "token_match", "answer_nll", "kl", "nll", "top5", "top1", "error",
    "error_probed", "first_divergence", "ratio", "removed", "kv_bytes", "tail_bytes",
)  # fmt: skip


def report(config: Config, run: Run, name: str, clock: Clock) -> None:
    """Tables, plots and summary, from the rows alone."""
    sections, unsolved = [], {}
    for length in config.lengths:
        here = [row for row in run.rows if row["length"] == length]
        if config.task == "needle":
            unsolved[length] = too_hard(here)
            here = [row for row in here if row["task"] not in unsolved[length]]
        if not here:
            sections.append(f"No format is solved by the full cache at {length:,} tokens.\n")
            continue
        means = plots.group_means(here, ["method", "target_ratio"], FIELDS)
        limits = {(r["method"], r["target_ratio"]): r["limit"] for r in here}
        for mean in means:
            mean["limit"] = limits[mean["method"], mean["target_ratio"]]
            mean["prototype"] = PROTOTYPE.get((mean["method"], mean["target_ratio"]))
            step = round(mean["ratio"] * 100)
            for field in ("exact", "kl", "error"):
                if mean.get(field) is not None:
                    run.log(f"sweep/{field}_share/{length}/{mean['method']}".replace(":", "_"),
                            mean[field], step)  # fmt: skip
        count = means[0]["n"]
        how = "question-aware" if config.aware else "question-agnostic"
        what = how if config.task == "needle" else "running text"
        title = f"{name}, {length:,} tokens, {what}, n = {count}"
        table(means, columns_of(config, brief=True), title)
        sections.append(markdown(means, columns_of(config), title))
        draw(run, config, here, means, title, length)
        if config.task == "needle":
            sections.append(by_format(here, length))
        if unsolved.get(length):
            left = ", ".join(f"{t} ({s:.0%})" for t, s in unsolved[length].items())
            sections.append(
                f"Left out, because the full cache itself solves too few of them: {left}.\n"
            )
    sections.append(notes(config))
    run.write_summary("\n".join(sections))
    if clock.seconds:
        spent = ", ".join(f"{phase} {s:.0f} s" for phase, s in clock.seconds.items())
        print_line(f"time: {spent}")


def too_hard(rows: Sequence[dict]) -> dict[str, float]:
    """Formats that the full cache solves in less than 95 % (four needles: 80 %) of the cases."""
    hard = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        scores = [r["exact"] for r in rows if r["task"] == task and r["method"] == "full"]
        least = 0.8 if "multikey" in task else 0.95
        if scores and np.mean(scores) < least:
            hard[task] = float(np.mean(scores))
    return {} if _tiny(rows) else hard


def _tiny(rows: Sequence[dict]) -> bool:
    """Whether the full cache never answers: random weights, where nothing can be compared."""
    return not any(row["exact"] for row in rows if row["method"] == "full")


def columns_of(config: Config, brief: bool = False) -> list[Column]:
    """Columns of the table; `brief` for a terminal."""
    columns = [
        Column("method", "method"),
        Column("asked", lambda r: f"{r['target_ratio']:.1f}x"),
        Column("stored", lambda r: f"{r['ratio']:.2f}x"),
    ]
    if not brief:
        columns.append(Column("removed", "removed", ".1%"))
    columns.append(Column("KV MB", lambda r: r["kv_bytes"] / 1e6, ".2f"))
    if config.task == "needle":
        columns.append(Column("exact %", interval("exact", ".0f", 100)))
        if config.generate:
            columns.append(Column("generated %", interval("generated_exact", ".0f", 100)))
        columns.append(Column("tokens right %", interval("token_match", ".0f", 100)))
        columns.append(Column("answer NLL", interval("answer_nll", ".2f")))
    columns.append(Column("KL", interval("kl", ".3f")))
    if not brief:
        columns += [
            Column("NLL", "nll", ".3f"),
            Column("top-5", "top5", ".2f"),
            Column("diverges at", "first_divergence", ".1f"),
        ]
    columns.append(Column("error", interval("error", ".3f")))
    if config.task == "text":
        columns.append(Column(f"error, layers {PROBED}", interval("error_probed", ".3f")))
        columns.append(Column("prototype", "prototype", ".3f"))
    return [*columns, Column("note", "limit")]


def draw(run: Run, config: Config, rows, means, title: str, length: int) -> None:
    """The plots of one length."""
    if config.task == "needle":
        shown = [m | {e: 100 * m[e] for e in m if e.startswith("token_match")} for m in means]
        run.save_figure(
            f"score_{length}",
            plots.against_bytes(shown, "token_match", title=title, y_limits=(0, 100),
                                y_label="answer tokens right, %"),
        )  # fmt: skip
    run.save_figure(
        f"kl_{length}",
        plots.against_bytes(means, "kl", title=title, y_label="KL to the full cache, nats a token",
                            log_y=True),
    )  # fmt: skip
    run.save_figure(
        f"error_{length}",
        plots.against_bytes(means, "error", title=title, y_label="attention-output error, relative",
                            log_y=True),
    )  # fmt: skip
    layers = []
    for method in dict.fromkeys(r["method"] for r in rows if r["method"].startswith("anchorkv")):
        for ratio in sorted({r["target_ratio"] for r in rows if r["method"] == method}):
            own = [r for r in rows if (r["method"], r["target_ratio"]) == (method, ratio)]
            errors = np.mean([r["error_by_layer"] for r in own], 0)
            if method == "anchorkv" and ratio in config.ratios:
                name = f"anchorkv {ratio:.0f}x"
                layers += [{"method": name, "layer": i, "error": e} for i, e in enumerate(errors)]
    if layers:
        run.save_figure(
            f"anchorkv_layers_{length}",
            plots.by_layer(layers, "error", title=f"AnchorKV, {title}",
                           y_label="attention-output error, relative"),
        )  # fmt: skip


def by_format(rows: Sequence[dict], length: int) -> str:
    """Token match of each format as markdown."""
    means = plots.group_means(rows, ["task", "method", "target_ratio"], ["token_match", "exact"])
    tasks = list(dict.fromkeys(m["task"] for m in means))
    lines = {}
    for m in means:
        line = lines.setdefault((m["method"], m["target_ratio"]), {
            "method": m["method"], "target_ratio": m["target_ratio"]})  # fmt: skip
        line[m["task"]] = f"{100 * m['token_match']:.0f} ({100 * m['exact']:.0f})"
    columns = [Column("method", "method"), Column("asked", "target_ratio", ".1f")]
    columns += [Column(task, task) for task in tasks]
    title = f"Token match (exact) in %, by format, {length:,} tokens"
    return markdown(list(lines.values()), columns, title)


def notes(config: Config) -> str:
    """How to read the table."""
    return (
        "Stored: full bfloat16 bytes over live body and metadata bytes, measured on the arrays."
        " Brackets: 95 % interval over prompts. NLL and KL: nats a token over the whole"
        " continuation, teacher forced. Error: relative root-mean-square error of the attention"
        " output over the prompt, mean of the layers, at the full cache's own queries."
        f" Seed {config.seed}. An evictor that keeps everything reproduced the full cache exactly"
        " (checked on the first batch; the run fails otherwise).\n"
    )


if __name__ == "__main__":
    main(Config, run)
