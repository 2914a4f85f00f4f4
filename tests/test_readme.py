"""The README's examples run as they stand, one after the other."""

import re
from pathlib import Path

import numpy as np

from kvjax import accounting

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_examples_of_use_run(default_model, capsys):
    section = README.read_text(encoding="utf-8").split("## Use it")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.S)
    assert len(blocks) == 3
    names = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert capsys.readouterr().out.count("\n") >= 2  # bytes, and an answer
    assert names["method"].budget == 24
    for cache in names["caches"]:
        assert (np.asarray(cache.body.lengths) == 24).all()
    stored = accounting.live_bytes(names["caches"])
    assert (accounting.live_bytes(names["caches"], page=16).body >= stored.body).all()
