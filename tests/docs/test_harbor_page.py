"""docs/harbor.md: its example runs, and it names every key that the code reads."""

import re

import pytest
from doc_pages import blocks, page, printed

from envs.harbor_env.tasks import AgentTable, EnvironmentTable, TaskTable, VerifierTable

TEXT = page("docs/harbor.md")


@pytest.mark.slow
def test_the_example_prints_what_the_page_is_about() -> None:
    (block,) = blocks(TEXT, "python")
    assert printed(block) == "Write the word rope into word.txt.\nnotes.txt\n1.0\n"


def test_it_names_every_key_that_is_read() -> None:
    named = set(re.findall(r"`(\w+)`", TEXT)) | {"os", "task", "metadata", "agent", "verifier"}
    for table in (AgentTable, EnvironmentTable, VerifierTable, TaskTable):
        assert set(table.model_fields) - {"steps"} <= named, table
    assert "`[[steps]]`" in TEXT
