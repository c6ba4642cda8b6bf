"""Keys that a BlackJack run's report.json must have."""

REPORT_FIELDS = {
    "exact_return",
    "mean_return",
    "ci95",
    "win_rate",
    "push_rate",
    "illegal_rate",
    "optimal_agreement",
    "hands",
    "train_seconds",
    "seed",
    "baselines",
}
