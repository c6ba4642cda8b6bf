"""The page in a real Chromium: contents, keys, links, and no outside requests."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from chromium import Browser, Tab, chromium

from openenv_core.evaluation.records import EpisodeRecord, turn_record
from rl_bridge.records import read_lines
from rl_bridge.rollouts_page.page import render_page
from tests.rl_bridge.rollouts_page.page_fixtures import conversation, keep, played, turn

pytestmark = pytest.mark.slow

READY = "document.body.dataset.ready"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    with browser.tab() as page:
        yield page
        assert page.errors == []


def written(run: Path) -> str:
    """The address of a file with the page of a run."""
    out = run.parent / f"{run.name}.html"
    out.write_bytes(b"".join(render_page(run, read_lines(run))))
    return out.as_uri()


@pytest.fixture
def file(tmp_path: Path) -> str:
    return written(keep(tmp_path / "seven", [*conversation(), *plain()]))


def plain() -> list[Any]:
    """Another group, of an earlier step: three siblings that say their number."""
    return [
        played(turn("ask", f"answer {n}", fresh=True), group=2, sibling=n, iteration=3, reward=n / 2)
        for n in range(3)
    ]


def show(tab: Tab, address: str, link: str = "") -> None:
    tab.open(address + link)
    tab.wait_for(READY)


def texts(tab: Tab, selector: str) -> list[str]:
    found = f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)"
    return list(tab.evaluate(found))


def where(tab: Tab) -> str:
    return str(tab.evaluate("document.querySelector('#head h2').textContent"))


def link(tab: Tab) -> str:
    return str(tab.evaluate("location.hash"))


def test_conversation_as_it_was(tab: Tab, file: str) -> None:
    show(tab, file)
    assert texts(tab, "#tree") == []
    assert where(tab) == "Step 5, group 4, sibling 0"
    assert texts(tab, ".row .last")[:3] == [
        "There are 17 open orders.",
        "<think>I guess.</think>There are 3.",
        '{"name": "run_que',
    ]
    assert texts(tab, ".said .role") == ["system", "user", "tool"]
    said_to_it = texts(tab, ".said .text")
    assert said_to_it[1:] == ["userHow many orders are open?", "tool[[17]]"]
    # Joined, the tokens are the answers, to the letter.
    answers = texts(tab, ".answer .text")
    first = conversation()[0]
    assert answers == ["".join(turn.pieces) for turn in first.turns]
    assert texts(tab, ".think") == ["<think>I look it up.</think>"]
    assert texts(tab, ".call")[0].startswith('<tool_call>\n{"name": "run_query"')
    assert tab.evaluate("document.querySelector('.call').dataset.tool") == "run_query"
    facts = " ".join(texts(tab, "#head .facts > *"))
    for fact in (
        "completed",
        "reward +1",
        "advantage +1.5",
        "style +0.25",
        "tool calls 1",
        "turns 2",
        "seed 4",
        "version 4",
    ):
        assert fact in facts
    tab.press("x")  # the template as it was written
    contexts = [turn.context for turn in first.turns]
    assert [text.partition("tokens")[2] for text in texts(tab, ".said .text")] == contexts
    show(tab, file, "#group=4&sibling=3")
    tab.wait_for("document.querySelectorAll('.begins').length === 2")
    # Not of one token: no more was asked for.
    assert texts(tab, ".answer footer span").count("cut off by the length limit") == 1
    assert "advantage none: not trained" in " ".join(texts(tab, "#head .facts > *"))


def test_calls_of_an_agent_are_a_tree(tab: Tab, tmp_path: Path) -> None:
    agent = played(
        turn("<|im_start|>user\nGo.<|im_end|>", "I call.", fresh=True),
        turn("<|im_start|>user\nA title?<|im_end|>", "Title", fresh=True, trained=False),
        turn("<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>", "One.", parent=0),
        turn("<|im_start|>user\nSum up.<|im_end|>", "It was one.", fresh=True, parent=0),
    )
    show(tab, written(keep(tmp_path / "agent", [agent])))
    assert texts(tab, "#tree button") == [
        "turn 1 · begins a chat · user · 2 tokens · trained",
        "turn 2 · begins a chat · user · 2 tokens · masked",
        "turn 3 · continues turn 1 · tool · 1 token · trained",
        "turn 4 · continues turn 1 · user · 3 tokens · trained",
    ]
    depths = "[...document.querySelectorAll('#tree button')].map(e => e.style.marginLeft)"
    assert tab.evaluate(depths) == ["0em", "2em", "0em", "2em"]
    tab.evaluate("document.querySelectorAll('#tree button')[3].click()")
    tab.wait_for("document.querySelector('.turn.here')?.id === 'turn-0-3'")


def test_keys_lead_everywhere(tab: Tab, file: str) -> None:
    show(tab, file)
    steps = {"j": "5, group 4, sibling 1", "]": "5, group 4, sibling 2", "k": "5, group 4, sibling 1"}
    for key, expected in {**steps, "End": "3, group 2, sibling 2", "Home": "5, group 4, sibling 0"}.items():
        tab.press(key)
        assert where(tab) == f"Step {expected}"
    tab.press("n")
    assert "turn=2" in link(tab)
    assert texts(tab, ".turn.here h3") == ["turn 2"]
    tab.press("n", "p", "p")
    assert "turn" not in link(tab)


HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script></script><!--{{script}}'


def test_model_output_stays_text(tab: Tab, tmp_path: Path) -> None:
    run = keep(tmp_path / "a<b>&amp;", [played(turn(HOSTILE, HOSTILE, fresh=True), ending="</script><b>")])
    show(tab, written(run))
    assert texts(tab, ".said .text") == [HOSTILE]
    assert texts(tab, ".answer .text") == [HOSTILE]
    assert tab.evaluate("document.querySelectorAll('#reading img, #reading script').length") == 0
    assert texts(tab, "#top h1") == ["a<b>&amp;"]
    tab.press("x", "s")
    assert "rollouts" in tab.evaluate("document.title")


@pytest.mark.soak
def test_written_file_makes_no_requests(tab: Tab, file: str) -> None:
    tab.go_offline()
    show(tab, file)
    tab.press("j", "s", "c", "x", "o", "t")
    assert [urlsplit(address).scheme for address in tab.requested_urls] == ["file"]
    refused = tab.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')")
    assert refused == "refused"
    assert any("Content Security Policy" in error for error in tab.errors)
    tab.errors.clear()


@pytest.mark.soak
@pytest.mark.parametrize("text", [" " * 3_000_000 + "x", '{"arguments": ' * 100_000 + "} " * 500_000 + "x"])
def test_long_model_or_tool_text_does_not_hang_the_page(tab: Tab, tmp_path: Path, text: str) -> None:
    """What takes a time that grows by the square would take hours here."""
    answer = turn("ask", "yes", fresh=True).model_copy(update={"pieces": (text,), "tokens": (1,)})
    answer = answer.model_copy(update={"logprobs": (0.0,), "trained": ((True, 1),), "versions": ((3, 1),)})
    show(tab, written(keep(tmp_path / "run", [played(turn(f"<|im_start|>tool\n{text}", "yes"), answer)])))
    assert len(texts(tab, ".answer .text")[1]) == len(text)


def test_evaluation_shows_text_without_tokens_and_unscored_is_not_zero(tab: Tab, tmp_path: Path) -> None:
    turns = [turn_record("You hold 19.", '{"action": "stand"}', fresh=True)]
    same: dict[str, Any] = {"environment": "blackjack", "seed": 7, "group": 0}
    records = [
        EpisodeRecord(**same, sibling=0, ending="completed", reward=1.0, turns=turns),
        EpisodeRecord(**same, sibling=1, ending="failed_environment", reward=None, reason="it was lost"),
    ]
    folder = keep(tmp_path / "evaluation", [])
    (folder / "rollouts").mkdir(exist_ok=True)
    lines = "".join(f"{record.model_dump_json()}\n" for record in records)
    (folder / "rollouts" / "000001.jsonl").write_text(lines)
    show(tab, written(folder))
    assert texts(tab, "#count") == ["1 of 1 trajectory, 1 more without a reward"]
    assert texts(tab, ".turn .answer .text") == ['{"action": "stand"}']
    (facts,) = texts(tab, "#head .facts")
    assert "reward +1" in facts
    assert "group's mean +1" in facts
    assert "mean p" not in facts
