"""Write tiny.json: logits of transformers in float32 for every tiny checkpoint.

python -m tests.models.golden.generate      (in an environment with the extra `peers`)
"""

import json
import tempfile
from pathlib import Path

import torch
import transformers

from tests.models import tiny

COLUMNS = (0, 5, 23)


def main() -> None:
    """Load each checkpoint with transformers and store the logits at COLUMNS."""
    golden = {"source": f"transformers {transformers.__version__}, torch {torch.__version__}"}
    golden["columns"] = COLUMNS
    with tempfile.TemporaryDirectory() as folder:
        for name, config in tiny.CONFIGS.items():
            path = tiny.write_hf(Path(folder) / name, config, tiny.tensors(config))
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager"
            )
            with torch.no_grad():
                logits = model(torch.tensor(tiny.TOKENS, dtype=torch.long)).logits[0]
            golden[name] = [[round(float(x), 5) for x in logits[c]] for c in COLUMNS]
    Path(__file__).with_name("tiny.json").write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
