"""A tool is called as every client's own method is."""

CAUGHT_BY = "declared_tools"
CHANGES = {
    "openenv.yaml": {
        "  network:\n": "  capabilities:\n    declared_tools: [look, reset]\n  network:\n",
    }
}
