#!/bin/bash
cat > stats.py <<'PY'
def mean(values):
    return sum(values) / len(values)


def median(values):
    ordered, half = sorted(values), len(values) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2
PY
