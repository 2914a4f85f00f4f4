"""The run of a published tutorial that the paired quantized-cache study is shown beside.

Source: a tutorial's paired run of transformers' QuantizedCache, Qwen2.5-0.5B, HQQ 4-bit, on an RTX
5070 Ti, as its figures are quoted in this study's requirements. Nothing of it was measured here.
"""

from typing import Any

TUTORIAL: dict[str, Any] = {
    "source": (
        "published tutorial, paired run of transformers' QuantizedCache; figures as quoted, not"
        " measured here"
    ),
    "model": "Qwen2.5-0.5B",
    "method": "HQQ 4-bit",
    "device": "RTX 5070 Ti",
    # the peak's change is quoted with its sign; latency is 1 + the quoted increase
    "context": [
        {"context": 512, "peak_change_percent": -18.1},
        {
            "context": 2048, "saved_mib": 17.3, "latency_ratio": 1.285, "nll_difference": 0.375,
            "top5_overlap": 0.70, "decision": "accepted",
        },
        {
            "context": 4096, "saved_mib": 34.5, "nll_difference": 0.973, "top5_overlap": 0.55,
            "decision": "refused",
        },
    ],
    "window": [
        {"residual_length": 16, "latency_ratio": 1.60},
        {"residual_length": 64, "latency_ratio": 1.25},
    ],
}  # fmt: skip
