"""Pure functions: advantages, ratios, surrogates, KL, entropy, aggregation. No state, no I/O."""
