"""What a dry run of the paired quantized-cache study says of a cell: from shapes, nothing runs."""

from typing import Any

from experiments.quantized_cache_decode import Cell, expected_flushes
from experiments.quantized_cache_measure import UNFIT
from experiments.quantized_cache_memory import predicted_bytes
from kvjax import registry
from kvjax.evaluation import admission
from models import hub


def planned_row(cell: Cell, loaded: hub.Loaded, dtype: str) -> dict[str, Any]:
    """Predicted container bytes and flushes of a cell; a setting that does not fit is a failure."""
    row = cell.key | {"label": cell.label, "group": cell.group}
    try:
        method = registry.make(cell.label)
        container, full = predicted_bytes(
            method, loaded.model, cell.context, cell.new_tokens, dtype
        )
    except UNFIT as error:
        failed = {"decision": admission.FAILED, "failure_stage": "plan"}
        return row | failed | {"error": " ".join(str(error).split())}
    flushes = 0
    if cell.residual_length is not None:
        whole = getattr(method, "requantize_all", False)
        flushes = expected_flushes(cell.context, cell.new_tokens, cell.residual_length, whole)
    return row | {
        "decision": admission.PLANNED,
        "failure_stage": None,
        "predicted_container_bytes": container,
        "predicted_saved_bytes": full - container,
        "expected_flushes": flushes,
    }
