"""The same weights through transformers (extra `peers`), timed on request: a process of its own.

    PYTHON peer_transformers.py MODEL --threads 2

A line of JSON in, {"tokens": [[...], ...], "new_tokens": n}, gives one out: prefill_seconds,
step_seconds (one a step), next_tokens (after the prompt, one a prompt), peak_rss_bytes; or
{"error": message}. `Peer` is the other end; it needs no torch, and this file no jax.
"""

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FIELDS = ("prefill_seconds", "step_seconds", "next_tokens", "peak_rss_bytes")


class Peer:
    """A peer's process; started at once, asked a shape at a time."""

    def __init__(self, model: str, python: str | None, threads: int):
        """Start `python` on this file with a model's path or hub id.

        Raises:
            ValueError: if the interpreter cannot be started.
        """
        python = python or sys.executable
        command = [python, "-P", str(Path(__file__).resolve()), model, "--threads", str(threads)]
        self._errors = tempfile.TemporaryFile("w+")
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        except OSError as error:
            raise ValueError(
                f"peer_python={python!r} cannot be started ({error.strerror}): it must be the"
                " interpreter of an environment with the extra `peers`."
            ) from None

    def ask(self, tokens: Any, new_tokens: int) -> dict[str, Any]:
        """Time one prefill of `tokens` [B, T] and `new_tokens` greedy steps.

        Raises:
            ValueError: if the peer fails or answers something else.
        """
        rows = [[int(t) for t in row] for row in tokens.tolist()]
        try:
            self._process.stdin.write(json.dumps({"tokens": rows, "new_tokens": new_tokens}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            raise ValueError(f"the peer stopped: {self._last_error()}")
        return parse(line, new_tokens)

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return lines[-1] if lines else f"exit status {self._process.returncode}, no message"

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):  # it may have stopped already
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._errors.close()


def parse(line: str, new_tokens: int) -> dict[str, Any]:
    """Read an answer.

    Raises:
        ValueError: for an error that it reports, and for anything but an answer.
    """
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and "error" in answer:
        raise ValueError(f"the peer failed: {answer['error']}")
    if not isinstance(answer, dict) or any(field not in answer for field in FIELDS):
        raise ValueError(f"the peer answered {line[:80]!r}: it must be JSON with {FIELDS}.")
    if len(answer["step_seconds"]) != new_tokens:
        raise ValueError(
            f"the peer timed {len(answer['step_seconds'])} steps: it must be {new_tokens}."
        )
    return answer


def load(source: str, threads: int) -> Any:
    """The model in float32, from a GGUF file, a folder or a hub id."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    path = Path(source)
    if path.suffix == ".gguf":
        source, options = str(path.parent), {"gguf_file": path.name}
    else:
        options = {}
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    return model.eval()


def measure(model: Any, tokens: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
    """Time a prefill and greedy steps with a DynamicCache."""
    import torch
    from transformers import DynamicCache

    seconds = []
    with torch.inference_mode():
        ids, cache = torch.tensor(tokens), DynamicCache()
        for _ in range(1 + new_tokens):
            begin = time.perf_counter()
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            seconds.append(time.perf_counter() - begin)
            if len(seconds) == 1:
                first = ids[:, 0].tolist()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "prefill_seconds": seconds[0],
        "step_seconds": seconds[1:],
        "next_tokens": first,
        "peak_rss_bytes": peak if sys.platform == "darwin" else peak * 1024,
    }


def serve(source: str, threads: int) -> None:
    """Answer every line of standard input; what libraries print goes to standard error."""
    out, sys.stdout = sys.stdout, sys.stderr
    model = None
    for line in sys.stdin:
        try:
            request = json.loads(line)
            model = model or load(source, threads)
            answer = measure(model, request["tokens"], request["new_tokens"])
        except Exception as error:  # whatever a peer raises, the experiment says it in one line
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="GGUF file, Hugging Face directory or hub id")
    parser.add_argument("--threads", type=int, required=True, help="CPU threads")
    arguments = parser.parse_args()
    serve(arguments.model, arguments.threads)
