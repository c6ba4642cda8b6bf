"""A key of the manifest is misspelt, and what it promises is not promised."""

CAUGHT_BY = "manifest_valid"
CHANGES = {"openenv.yaml": {"    range: [0.0, 1.0]": "    rnage: [0.0, 1.0]"}}
ALSO_SKIPPED = {
    "manifest_app",
    "example_actions",
    "reward_in_range",
    "network_policy_holds",
}
