"""What AnchorKV's studies compare: one option changed at a time, at equal measured bytes."""

from collections.abc import Sequence

from experiments import ablation_batch, ablation_recode
from experiments.ablation_batch import Setting
from experiments.arms import solve
from kvjax import registry
from kvjax.accounting import Budget
from kvjax.types import PromptShape

BASE = "anchorkv(bits=(2,))"  # the paper's one residual width, everything else at its defaults
NO_RESIDUALS, NAIVE = "anchorkv, no residuals", "anchorkv, naive 2-bit residuals"


def _option(text: str) -> str:
    return f"anchorkv(bits=(2,), {text})"


RANKING = {
    "utility (floor 1)": BASE,
    "utility (floor 0, paper)": _option("attention_floor=0.0"),
    "residual norm": _option("ranking='norm'"),
    "worst cosine": _option("ranking='cosine'"),
    "attention": _option("ranking='attention'"),
    "random": _option("ranking='random'"),
}
COMPONENTS = {
    "all components": BASE,
    "no random anchors": _option("attention_share=1.0"),
    "quota per head": _option("residual_quota='head'"),
    "no residuals": NO_RESIDUALS,
    "naive 2-bit": NAIVE,
}
WINDOW = {  # turns: the paper's window, which reaches back into the turn before
    "floor 1": _option("window=32"),
    "floor 0 (paper)": _option("window=32, attention_floor=0.0"),
}
TWO = {"one anchor": BASE, "two anchors": _option("anchors_per_token=2")}
SENSITIVITY = {
    "share of keys": {
        "0": _option("key_share=0.0"), "0.25": _option("key_share=0.25"), "0.5 (default)": BASE,
        "0.75": _option("key_share=0.75"), "1": _option("key_share=1.0"),
    },
    "rho (anchors by attention)": {
        "0": _option("attention_share=0.0"), "0.7 (default)": BASE,
        "1": _option("attention_share=1.0"),
    },
    "kernel, tokens": {"1": _option("kernel=1"), "7 (default)": BASE, "15": _option("kernel=15")},
    "window W, tokens": {"default": BASE, "32": _option("window=32")},
    "anchors beside the window": {
        "default": BASE, "24": _option("extra_anchors=24"), "64": _option("extra_anchors=64"),
    },
    "attention floor": {
        "0": _option("attention_floor=0.0"), "0.1": _option("attention_floor=0.1"),
        "1 (default)": BASE, "10": _option("attention_floor=10.0"),
    },
}  # fmt: skip
ONE_SIDE = {"exact keys": ablation_batch.exact_keys, "exact values": ablation_batch.exact_values}


def settings(
    studies: Sequence[str], ratios: Sequence[float], middle: float, shape: PromptShape
) -> list[Setting]:
    """What the chosen studies compare, each setting once.

    Args:
        studies: of "ranking", "components", "split", "two_anchors".
        ratios: full bfloat16 bytes over stored bytes.
        middle: the ratio of the sensitivities.
        shape: of a prompt.
    """
    wanted: list[tuple[str, float]] = []
    if "ranking" in studies:
        wanted += [(label, ratio) for ratio in ratios for label in RANKING.values()]
    if "components" in studies:
        wanted += [(label, ratio) for ratio in ends(ratios) for label in COMPONENTS.values()]
    if "two_anchors" in studies:
        wanted += [(label, ratio) for ratio in ends(ratios) for label in TWO.values()]
    if "split" in studies:
        wanted += [(label, middle) for knob in SENSITIVITY.values() for label in knob.values()]
    made = [setting(label, ratio, shape) for label, ratio in dict.fromkeys(wanted)]
    if "split" in studies:
        base = setting(BASE, middle, shape)
        made += [base._replace(label=f"{BASE}, {n}", remake=r) for n, r in ONE_SIDE.items()]
    return made


def ends(ratios: Sequence[float]) -> list[float]:
    """The smallest and the largest ratio."""
    return sorted({min(ratios), max(ratios)})


def setting(label: str, ratio: float, shape: PromptShape) -> Setting:
    """One label at one ratio, or the nearest that it reaches."""
    if label == NO_RESIDUALS:
        return ablation_recode.all_anchors(NO_RESIDUALS, ratio, shape)
    if label == NAIVE:
        return setting(BASE, ratio, shape)._replace(label=NAIVE, remake=ablation_recode.naive)
    arm = solve(label, registry.make(label), Budget(ratio=ratio), shape)
    return Setting(label, ratio, arm.method, arm.limit)
