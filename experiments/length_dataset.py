"""How long does each method make an answer? The training set of a length predictor.

    python -m experiments.length_dataset                       # 600 prompts x (full + 3 methods)
    python -m experiments.length_dataset --prompts FILE        # .jsonl, .csv, ShareGPT's .json
    python -m experiments.length_dataset --resume runs/length_dataset/...

Prompts of about one length are prefilled together; every method compresses that same prefill and
generates greedily to the real end of sequence or to the limit; a prompt that has its answer gives
its place in the batch to the next. A row holds lengths and no text. An answer that the limit cut
off is marked `truncated`: its length is the limit, not a length. The methods have fixed settings
and are not at equal bytes: a row says what each holds at its end.
"""

import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import plots
from experiments.report import Column, interval, markdown, print_line, table
from experiments.runner import Run, bound_programs, main
from kvjax import decode, registry
from kvjax.evaluation import builtin_prompts, prompts, stepwise
from kvjax.evaluation.chat import encode_prompt
from kvjax.types import PromptShape
from models import hub

COLUMNS = 128  # prompts are padded to a multiple of it
HORIZON = 8  # batches of prompts, sorted by length, that all methods answer before the next


@dataclass(frozen=True)
class Config:
    """Lengths of greedy answers under the full cache and three methods."""

    methods: tuple[str, ...] = (
        "kivi(k_bits=2, v_bits=2, group=32, residual_length=32)",
        "h2o(budget=128)",
        "streaming_llm(budget=128, when='step')",
    )
    """methods: name, preset:name, name(option=value); they must go on compressing while decoding,
    or a short prompt leaves them nothing to do; "full" is always there"""
    prompts: str | None = None
    """prompt file (.jsonl, .csv, ShareGPT's .json, or with .gz), or "builtin"; default: the file
    prompts/prompts.jsonl.gz of the folder KVJAX_DATA where there is one, else "builtin" """
    count: int = 600
    """prompts, the same number of each source where there are enough"""
    limit: int = 512
    """most tokens of an answer"""
    max_prompt: int = 256
    """longest prompt, tokens with the chat's frame; longer ones are left out"""
    batch: int = 16
    """prompts that are prefilled and decoded together"""
    model: str | None = None
    """GGUF file, Hugging Face directory, hub id or "tiny"; default SmolLM2-135M-Instruct"""
    seed: int = 42
    """of which prompts are taken"""


TINY = Config(
    model="tiny", methods=("h2o(budget=24)",), prompts="builtin", count=3, limit=12, batch=2,
    max_prompt=700,
)  # fmt: skip
FIELDS = (
    "prompt", "source", "task", "prompt_tokens", "method", "setting", "generated_tokens",
    "truncated", "empty", "kv_bytes", "ratio",
)  # fmt: skip


class Request(NamedTuple):
    """A prompt and its tokens."""

    prompt: prompts.Prompt
    ids: tuple[int, ...]


def run(config: Config, run: Run) -> None:
    """Generate batch by batch, then summarise."""
    arms = {"full": registry.make("full")}
    arms |= {label: registry.make(label) for label in config.methods}
    if min(config.count, config.batch, config.limit) < 1:
        raise ValueError("count, batch and limit must be at least 1.")
    found = read(config.prompts)
    loaded = hub.load(config.model)
    if found is None:
        found = built_in(config, loaded.tokenizer)
    requests, left_out = choose(config, encode(found, loaded.tokenizer))
    if left_out:
        print_line(f"{left_out} prompts are longer than {config.max_prompt} tokens and left out")
    run.watch(scalars)
    generate(run, config, loaded, arms, requests)
    report(run, config, loaded.name, left_out)


def read(path: str | None) -> list[prompts.Prompt] | None:
    """The prompts of a file, or None where the built-in ones are to be made."""
    if path is None:
        folder = os.environ.get("KVJAX_DATA")
        file = Path(folder or "") / "prompts" / "prompts.jsonl.gz"
        return prompts.read(file) if folder and file.is_file() else None
    return None if path == "builtin" else prompts.read(path)


def built_in(config: Config, tokenizer: Any) -> list[prompts.Prompt]:
    """As many as are asked for, of three quarters of the longest prompt.

    Raises:
        ValueError: when that is too short.
    """

    def size(text):
        return len(tokenizer.encode(text))

    try:
        return builtin_prompts.make(config.count, config.max_prompt * 3 // 4, size, config.seed)
    except ValueError as error:
        raise ValueError(
            f"max_prompt={config.max_prompt}, of which built-in prompts take three quarters:"
            f" {error}"
        ) from None


def encode(found: Sequence[prompts.Prompt], tokenizer: Any) -> list[Request]:
    """The prompts as a chat's tokens."""
    return [Request(p, tuple(encode_prompt(tokenizer, tokenizer.chat(p.chat)))) for p in found]


def choose(config: Config, requests: Sequence[Request]) -> tuple[list[Request], int]:
    """`count` prompts, one of each source in turn, in a seeded order; and how many are too long.

    Raises:
        ValueError: where fewer prompts than `count` fit.
    """
    fitting = [request for request in requests if len(request.ids) <= config.max_prompt]
    if len(fitting) < config.count:
        raise ValueError(
            f"count={config.count} must be at most {len(fitting)}, the prompts of at most"
            f" max_prompt={config.max_prompt} tokens."
        )
    by_source = defaultdict(list)
    for request in fitting:
        by_source[request.prompt.source].append(request)
    for source, rows in by_source.items():
        random.Random(f"{config.seed} {source}").shuffle(rows)
    chosen = []
    while len(chosen) < config.count:
        for rows in by_source.values():
            if rows and len(chosen) < config.count:
                chosen.append(rows.pop())
    return chosen, len(requests) - len(fitting)


def in_chunks(requests: Sequence[Request], size: int) -> list[list[Request]]:
    """Chunks of batches, by length within a chunk: a stopped run holds prompts of all lengths."""
    step = size * HORIZON
    return [
        sorted(requests[at : at + step], key=lambda request: len(request.ids))
        for at in range(0, len(requests), step)
    ]


def generate(
    run: Run,
    config: Config,
    loaded: hub.Loaded,
    arms: dict[str, Any],
    requests: Sequence[Request],
) -> None:
    """All prompts under all arms; a finished one is not answered again."""
    sums = any(getattr(method, "column_sums", False) for method in arms.values())
    left = [r for r in requests if any(run.finished(key(a, r)) is None for a in arms)]
    if left:
        print_line(most_time(config, loaded, arms, left, sums))
    with run.progress(len(arms) * len(requests), "lengths") as progress:
        for chunk in in_chunks(requests, config.batch):
            todo = {a: [r for r in chunk if run.finished(key(a, r)) is None] for a in arms}
            for _ in range(sum(len(chunk) - len(rows) for rows in todo.values())):
                progress.advance(skipped=True)
            prefills: dict[tuple, decode.Prefill] = {}

            def prefill(batch: Sequence[Request], prefills: dict = prefills) -> decode.Prefill:
                name = tuple(request.prompt.id for request in batch)
                if name not in prefills:
                    prefills[name] = prefilled(loaded, batch, config.batch, sums)
                return prefills[name]

            for label, rows in todo.items():
                for request, answer in answered(config, loaded, arms[label], rows, prefill):
                    run.append(row(label, arms[label], request, answer, loaded))
                    progress.advance(label)
                bound_programs()
            prompts.write_csv(run.path / "lengths.csv.gz", run.rows, FIELDS)  # so far


def most_time(
    config: Config,
    loaded: hub.Loaded,
    arms: dict[str, Any],
    requests: Sequence[Request],
    sums: bool,
) -> str:
    """What decoding takes at most, from a few timed steps of the longest prompts under each arm."""
    batch = sorted(requests, key=lambda request: len(request.ids))[-config.batch :]
    made = prefilled(loaded, batch, config.batch, sums)
    token = made.logits.argmax(-1).astype(np.int32)
    seconds = []
    for method in arms.values():
        caches = decode.compress(method, made.prompts, loaded.model, reserve=config.limit)
        spent = []
        for step in range(min(4, config.limit)):  # the first compiles
            begin = time.monotonic()
            at = (made.lengths + step).astype(np.int32)
            logits, caches = decode.decode_step(loaded.model, loaded.params, caches, token, at)
            logits.block_until_ready()
            spent.append(time.monotonic() - begin)
        seconds.append(min(spent))
    steps = -(-len(requests) // config.batch) * config.limit
    return (
        f"{len(requests)} prompts x {len(arms)} methods x at most {config.limit} tokens: decoding"
        f" takes {sum(seconds) * steps / 60:.0f} minutes if no answer ends before"
    )


def key(label: str, request: Request) -> dict[str, Any]:
    """What identifies a row."""
    return {"prompt": request.prompt.id, "method": label}


def prefilled(
    loaded: hub.Loaded, batch: Sequence[Request], size: int, sums: bool
) -> decode.Prefill:
    """One prefill for all methods; a short last batch repeats its last prompt."""
    ids = [request.ids for request in batch]
    tokens, starts = decode.left_pad(ids + [ids[-1]] * (size - len(ids)), COLUMNS)
    return decode.prefill(loaded.model, loaded.params, tokens, starts, column_sums=sums)


def answered(
    config: Config,
    loaded: hub.Loaded,
    method: Any,
    requests: Sequence[Request],
    prefill: Callable[[Sequence[Request]], decode.Prefill],
) -> Iterator[tuple[Request, stepwise.Answer]]:
    """Greedy answers of some prompts under one method, as they end."""

    def waves() -> Iterator[stepwise.Wave]:
        for at in range(0, len(requests), config.batch):
            batch = requests[at : at + config.batch]
            made = prefill(batch)
            caches = decode.compress(method, made.prompts, loaded.model, reserve=config.limit)
            yield stepwise.Wave(caches, made.logits, made.lengths, len(batch))

    for number, answer in stepwise.answers(
        loaded.model, loaded.params, waves(), limit=config.limit,
        stop_ids=sorted(loaded.tokenizer.stop_ids), smallest=max(config.batch // 4, 1),
    ):  # fmt: skip
        yield requests[number], answer


def row(
    label: str, method: Any, request: Request, answer: stepwise.Answer, loaded: hub.Loaded
) -> dict[str, Any]:
    """The record of one prompt and method."""
    model, held = loaded.model, len(request.ids) + len(answer.tokens) - 1  # the last is not stored
    full = PromptShape(held, model.num_kv_heads, model.head_dim).full_bytes * len(model.windows)
    return key(label, request) | {
        "source": request.prompt.source,
        "task": request.prompt.task,
        "prompt_tokens": len(request.ids),
        "setting": repr(method),
        "generated_tokens": len(answer.tokens),
        "truncated": not answer.stopped,
        "empty": not loaded.tokenizer.decode(answer.tokens).strip(),
        "kv_bytes": answer.kv_bytes,
        "ratio": full / answer.kv_bytes,
    }


def scalars(row: dict[str, Any]) -> Any:
    """TensorBoard scalars of a row."""
    name = row["method"].split("(")[0]
    yield f"length/generated_tokens/{name}", row["generated_tokens"], row["prompt_tokens"]


def report(run: Run, config: Config, name: str, left_out: int) -> None:
    """lengths.csv.gz, table and summary; the tables compare prompts that every method answered."""
    prompts.write_csv(run.path / "lengths.csv.gz", run.rows, FIELDS)
    answers = Counter(row["prompt"] for row in run.rows)
    rows = [row for row in run.rows if answers[row["prompt"]] == max(answers.values())]
    rows = [row | {"length": None if row["truncated"] else row["generated_tokens"]} for row in rows]
    fields, shares = ("length", "truncated", "empty", "ratio"), ("truncated", "empty")
    bounds = {"length": (0.0, float(config.limit)), "ratio": (0.0, float("inf"))}
    means = plots.group_means(rows, ["method"], fields, shares, bounds)
    per_source = plots.group_means(rows, ["source", "method"], fields, shares, bounds)
    columns = [
        Column("method", "method"),
        Column("n", "n", "d"),
        Column("tokens, ended answers", interval("length", ".0f")),
        Column("truncated %", interval("truncated", ".1f", 100)),
        Column("empty %", interval("empty", ".1f", 100)),
        Column("ratio at the end", interval("ratio", ".2f")),
    ]
    title = f"{name}, greedy, limit {config.limit} tokens"
    table(means, columns, title)
    per = [Column("source", "source"), *columns[:-1]]
    run.write_summary(
        "\n".join(
            [
                markdown(means, columns, title),
                markdown(per_source, per, "By source"),
                f"{len({row['prompt'] for row in rows})} of {config.count} prompts."
                f" {left_out} prompts of more than {config.max_prompt} tokens were left out. A"
                " truncated answer counts as truncated and in no mean length. *Ratio at the end*:"
                " bytes of a full bfloat16 cache of the prompt and the answer over the live bytes"
                " of the cache, tail included. The settings are not at equal bytes: compare a"
                " method with the full cache, not with another method.\n",
            ]
        )
    )


if __name__ == "__main__":
    main(Config, run)
