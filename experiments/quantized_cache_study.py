"""The one JSON of the paired quantized-cache study, from its rows."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.quantized_cache_published import TUTORIAL
from experiments.record import plain
from experiments.throughput import num_threads
from kvjax.evaluation import admission
from kvjax.evaluation.admission import Gates
from models import hub, tiny

STUDY = "study.json"
WORKLOAD_ID, WORKLOAD_VERSION = "paired-quantized-cache", 1

_DEFINITIONS = {
    "incremental_peak_bytes": (
        "most bytes held while decoding beyond those held before the cache: the device's allocated"
        " peak where it reports one, temporaries included; else live arrays between steps, to which"
        " a step adds its step_scratch_bytes"
    ),
    "saved_bytes": "incremental peak of the full cache minus the arm's, at equal tokens",
    "process_peak_rss_bytes": (
        "resident peak of the whole process while the arm decodes: weights, prompts, programs and"
        " freed memory that the allocator kept are in it, so that it bounds and does not rank"
    ),
    "container_bytes": "allocated arrays of the cache after the last token, spare slots included",
    "packed_bytes": "valid codes alone; scale_bytes: their scales and zeros; exact_bytes: tokens"
    " that are not quantized",
    "nll_difference": "mean NLL minus the full cache's, along one fixed trajectory",
    "onset_context": "least measured context from which on bytes are saved at every longer one",
    "crossover_context": "context at which saved bytes change their sign, linear between"
    " measurements; null where they do not",
    "latency_crossover_context": "context at which the time a token crosses the full cache's",
    "quality_crossover_context": "context at which the NLL difference crosses its gate",
}


class Facts(NamedTuple):
    """What of a run is not in its rows."""

    label: str
    loaded: hub.Loaded
    config: Any
    prompts: dict[int, str]  # SHA-256 of the token ids of each context

    @property
    def gates(self) -> Gates:
        """The gates of the command line."""
        return gates_of(self.config)


def gates_of(config: Any) -> Gates:
    """The gates of the command line."""
    return Gates(config.max_nll_difference, config.min_top5_overlap, config.max_latency_ratio)


def labels(folder: Path, own: Path) -> dict[str, str]:
    """Labels of the other runs in a folder, and the names of those runs; plans take none."""
    found = {}
    for file in sorted(folder.glob(f"*/{STUDY}")):
        if file.parent != own:
            try:
                other = json.loads(file.read_text(encoding="utf-8"))
                if other["evidence_level"] != "planned":
                    found[other["label"]] = file.parent.name
            except (ValueError, KeyError):
                continue
    return found


def by_arm(rows: Sequence[dict], matrix: str) -> dict[tuple[str, int], list[dict]]:
    """Measured rows of a matrix by (method, bits), the full cache aside."""
    arms: dict[tuple[str, int], list[dict]] = {}
    for row in rows:
        if row["matrix"] == matrix and row["method"] != "full" and "saved_bytes" in row:
            arms.setdefault((row["method"], row["bits"]), []).append(row)
    return arms


def transitions(rows: Sequence[dict], gates: Gates) -> list[dict[str, Any]]:
    """Where each arm of the context matrix begins to save, and crosses latency and quality."""
    found = []
    for (method, bits), members in by_arm(rows, "context").items():

        def points(field, members=members):
            return [(row["context"], row[field]) for row in members]

        refused = [r["context"] for r in members if r["decision"] == admission.REFUSED]
        found.append(
            {
                "method": method,
                "bits": bits,
                "onset_context": admission.onset(points("saved_bytes")),
                "crossover_context": admission.crossover(points("saved_bytes")),
                "latency_crossover_context": admission.crossover(points("latency_ratio"), 1.0),
                "quality_crossover_context": admission.crossover(
                    points("nll_difference"), gates.max_nll_difference
                ),
                "first_refused_context": min(refused, default=None),
            }
        )
    return found


def by_context(rows: Sequence[dict]) -> dict[str, dict[str, Any] | None]:
    """The candidate of each context of the context matrix, by its key; None where there is none."""
    found = {}
    for context in sorted({row["context"] for row in rows if row["matrix"] == "context"}):
        here = [r for r in rows if r["matrix"] == "context" and r["context"] == context]
        best = admission.candidate(here)
        names = ("method", "bits", "residual_length", "saved_bytes", "latency_ratio")
        found[str(context)] = None if best is None else {name: best[name] for name in names}
    return found


def evidence_level(name: str, rows: Sequence[dict]) -> str:
    """ "planned" (nothing ran), "smoke" (random weights) or "measured"."""
    ran = [row for row in rows if row["decision"] != admission.PLANNED]
    if all(row.get("failure_stage") == "plan" for row in ran):
        return "planned"
    return "smoke" if name == tiny.NAME else "measured"


def study(facts: Facts, record: dict[str, Any], rows: Sequence[dict]) -> dict[str, Any]:
    """The one JSON: what was run, where, on what, what came out and what was decided."""
    loaded, config = facts.loaded, facts.config
    decision, stage = admission.conclude(rows)
    best = admission.candidate(rows)
    hashes = "".join(facts.prompts[context] for context in sorted(facts.prompts))
    return {
        "workload": {
            "id": WORKLOAD_ID, "version": WORKLOAD_VERSION,
            "settings": plain(dataclasses.asdict(config)),
        },
        "label": facts.label,
        "model": {
            "name": loaded.name, "revision": loaded.revision,
            "layers": len(loaded.model.windows), "kv_heads": loaded.model.num_kv_heads,
            "head_dim": loaded.model.head_dim,
        },
        "framework": record["versions"] | {"code_revision": record["revision"]},
        "hardware": hardware(record),
        "prompt": {
            "source": "prose that every Python ships" if config.folder is None else "text files",
            "seed": config.seed,
            "sha256_by_context": {str(k): v for k, v in sorted(facts.prompts.items())},
            "sha256": hashlib.sha256(hashes.encode()).hexdigest(),
        },
        "evidence_level": evidence_level(loaded.name, rows),
        "evidence": {
            "prompts_a_context": 1, "quality_tokens": config.quality_tokens,
            "repeats": config.repeats,
            "peak_source": " or ".join(
                dict.fromkeys(r["incremental_peak_source"] for r in rows if "saved_bytes" in r)
            ) or None,
            "largest_load_average": max(
                (r["load_average"] for r in rows if r.get("load_average") is not None),
                default=None,
            ),
        },
        "gates": facts.gates._asdict(),
        "decision": decision,
        "failure_stage": stage,
        "failures": [
            {k: row.get(k) for k in ("matrix", "context", "residual_length", "method", "bits",
                                     "failure_stage", "error")}
            for row in rows if row["decision"] == admission.FAILED
        ],
        "candidate": None if best is None else dict(best),
        "candidate_by_context": by_context(rows),
        "transitions": transitions(rows, facts.gates),
        "cells": [dict(row) for row in rows],
        "definitions": _DEFINITIONS,
        "published": TUTORIAL,
    }  # fmt: skip


def hardware(record: dict[str, Any]) -> dict[str, Any]:
    """Devices and CPUs of this machine."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    return {
        "devices": record["devices"],
        "device_memory_bytes": stats.get("bytes_limit"),
        "cpu": _cpu_name(),
        "cpus": record["cpus"],
        "usable_cpus": num_threads(),
        "platform": record["platform"],
    }


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None
