"""`@typed`: shapes and dtypes of a public function's arguments are checked as it is traced."""

from beartype import beartype
from jaxtyping import jaxtyped

typed = jaxtyped(typechecker=beartype)
