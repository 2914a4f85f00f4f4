"""How far each kernel may be from its specification, relative to the largest entry.

float32 rows: another order of summation. bfloat16 rows: operands rounded once (2^-8) before a
product, and probabilities rounded before they meet the values.
"""

TOLERANCES = {
    "decode": {"float32": 2e-5, "bfloat16": 1e-2},
    "prefill": {"float32": 2e-5, "bfloat16": 1e-2},
}
