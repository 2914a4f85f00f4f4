"""What does AnchorKV keep, and what do the alternatives keep in the same bytes?

    python -m experiments.anchorkv_sweep                 # needles, question unknown to the cache
    python -m experiments.anchorkv_sweep --aware         # the cache has seen the question
    python -m experiments.anchorkv_sweep --task text --length 2048   # error on running text

Each prompt is prefilled once; every method compresses that same prefill to the same measured bytes;
question and gold answer are then scored by teacher forcing over what the cache attends to.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from experiments import anchorkv_report, equal_bytes
from experiments.arms import plan
from experiments.runner import Run, main
from kvjax import registry
from models import hub


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
    matmul: Literal["bfloat16", "float32"] = "bfloat16"
    """products with weights; float32 is exact, and as fast on a CPU without AVX512-BF16 or AMX"""
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


def run(config: Config, run: Run) -> None:
    """Sweep, then make tables and plots from the rows."""
    config = settle(config)
    for label in config.methods:
        registry.make(label)  # an unknown method fails before a model is loaded
    loaded = hub.load(config.model)
    if config.matmul == "bfloat16":
        loaded = dataclasses.replace(loaded, params=equal_bytes.lighter(loaded.params))
    run.watch(anchorkv_report.scalars)
    for length in config.lengths:
        rows = equal_bytes.prompts(config, loaded.tokenizer, length)
        shape = equal_bytes.shape_of(rows, loaded)
        layers = len(loaded.model.windows)
        arms = plan(config.methods, config.ratios, config.matched, shape, layers)
        equal_bytes.sweep(config, run, loaded, rows, arms, length)
    anchorkv_report.report(config, run, loaded.name)


def settle(config: Config) -> Config:
    """Fill in what depends on other fields."""
    ratios = config.ratios or ((5, 10, 20) if config.task == "text" else (2, 4, 6, 10, 16))
    if config.quick:
        kept = tuple(m for m in config.methods if m not in ("random", "knorm"))
        ratios = tuple(r for r in (4, 10)) if config.ratios is None else ratios
        config = dataclasses.replace(config, prompts=1, methods=kept, matched=())
    return dataclasses.replace(config, ratios=tuple(float(r) for r in ratios))


if __name__ == "__main__":
    main(Config, run)
