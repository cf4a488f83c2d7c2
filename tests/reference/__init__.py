"""Plain-Python reference of the rules in `docs/semantics.md`: the judge of the JAX engine."""
