"""What tests side by side tell of themselves."""

import side_by_side


def test_what_a_worker_tells_keeps_its_shape() -> None:
    told = {
        "longrepr": ("a file", 7, "Skipped: half of a character: \ud83d"),
        "sections": [("out", "\udc00")],
    }
    assert side_by_side.printable(told) == {
        "longrepr": ("a file", 7, "Skipped: half of a character: \\ud83d"),
        "sections": [("out", "\\udc00")],
    }
