"""Baseline policies that have learned nothing."""

import random
from typing import Any, Final

from tool_policies import Call, Policy

_GUESSES: Final = ("0", "1", "2", "3", "5", "10")


def blind_guess(task: str, call: Call, source: random.Random) -> float:
    """Submit a small number, or a word of the task, without reading the database."""
    if "number" in task.partition("Answer: ")[2].splitlines()[0]:
        answer = source.choice(_GUESSES)
    else:
        answer = source.choice(task.split())
    return float(call("submit_answer", {"answer": answer}).reward or 0.0)


def random_calls(task: str, call: Call, source: random.Random) -> float:
    """Call random tools, with existing tables and valid queries, until the episode ends."""
    names = [table["name"] for table in call("list_tables", {}).result]
    total = 0.0
    while True:
        table = source.choice(names)
        name, arguments = source.choice(_draw_calls(table, source))
        observation = call(name, arguments)
        total += float(observation.reward or 0.0)
        if observation.done:
            return total


def guess_row_count(task: str, call: Call, source: random.Random) -> float:
    """Submit the row count of a random table."""
    table = source.choice([table["name"] for table in call("list_tables", {}).result])
    rows = call("query", {"sql": f"SELECT count(*) FROM {table}"}).result["rows"]
    return float(call("submit_answer", {"answer": rows[0][0]}).reward or 0.0)


BASELINES: Final[dict[str, Policy]] = {
    "blind guess": blind_guess,
    "random calls": random_calls,
    "count of some table": guess_row_count,
}


def _draw_calls(table: str, source: random.Random) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("list_tables", {}),
        ("describe_table", {"table": table}),
        ("query", {"sql": f"SELECT * FROM {table} LIMIT {source.randint(1, 20)}"}),
        ("submit_answer", {"answer": source.randint(0, 50)}),
    ]
