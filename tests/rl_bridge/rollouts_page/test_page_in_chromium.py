"""The page in a real Chromium: what it shows, what keys do, where links lead, what it never asks for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from chromium import Browser, Tab, chromium

from rl_bridge.records.writer import read_lines
from rl_bridge.rollouts_page.page import whole_page
from tests.rl_bridge.rollouts_page.page_fixtures import conversation, keep, said, served, told

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
    out.write_bytes(b"".join(whole_page(run, read_lines(run))))
    return out.as_uri()


@pytest.fixture
def file(tmp_path: Path) -> str:
    return written(keep(tmp_path / "seven", [*conversation(group=4, iteration=5), *plain()]))


def plain() -> list[Any]:
    """Another group, of an earlier step: three siblings that say their number."""
    return [
        told(said("ask", f"answer {n}", fresh=True), group=2, sibling=n, iteration=3, reward=n / 2)
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


@pytest.mark.slow
def test_conversation_as_it_was(tab: Tab, file: str) -> None:
    show(tab, file)
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


@pytest.mark.soak
def test_token_tells_how_likely_it_was(tab: Tab, tmp_path: Path) -> None:
    # e^-0.1 is 90.5%, e^-1 36.8%, e^-6 0.25%.
    turn = said("ask", "surely perhaps", fresh=True, logprobs=[-0.1, -1.0, -6.0, 0.0])
    show(tab, written(keep(tmp_path / "run", [told(turn)])))
    classes = tab.evaluate("[...document.querySelectorAll('.tk')].map(e => e.className.trim())")
    assert classes == ["tk p1", "tk p4", "tk p8", "tk p0"]
    tab.hover(".tk:nth-child(2)")
    tip = texts(tab, "#tip > *")
    assert tip[0] == '"ly p"'
    assert tip[1] == "p 36.8%, log p -1.0000"
    assert tip[2].startswith("token 2 of 4, id ")
    assert tip[3] == "trained, sampled by version 3"
    assert texts(tab, "#spoken") == [""]
    tab.press("ArrowRight", "ArrowRight", "ArrowRight")
    assert texts(tab, "#tip > *")[1] == "p 0.25%, log p -6.0000"
    assert texts(tab, "#spoken")[0].startswith('"erha", p 0.25%, log p -6.0000, token 3 of 4')
    assert texts(tab, ".tk.at") == ["erha"]


@pytest.mark.soak
def test_tokens_that_the_loss_did_not_see(tab: Tab, tmp_path: Path) -> None:
    turn = said("ask", "seen unseen", fresh=True).model_copy(
        update={"trained": ((True, 1), (False, 2)), "versions": ((7, 2), (8, 1))}
    )
    show(tab, written(keep(tmp_path / "run", [told(turn), told(said("a", "b", trained=False), sibling=1)])))
    assert texts(tab, ".tk.off") == [" uns", "een"]
    assert "2 masked" in texts(tab, ".answer footer span")
    assert "version 7, then 8" in texts(tab, ".answer footer span")
    tab.press("c")
    assert texts(tab, ".tk.seen") == ["seen"]
    assert texts(tab, ".tk.unseen") == [" uns", "een"]
    tab.press("c")
    assert tab.evaluate("new Set([...document.querySelectorAll('.tk')].map(e => e.className)).size") == 3
    tab.press("]")
    assert texts(tab, ".answer.masked footer")[0].count("the loss does not see them") == 1


@pytest.mark.slow
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


@pytest.mark.soak
def test_siblings_beside_each_other(tab: Tab, file: str) -> None:
    show(tab, file)
    tab.press("s")
    assert "view=siblings" in link(tab)
    heads = texts(tab, ".column > h3")
    assert [head.split("sibling ")[1][0] for head in heads] == ["0", "1", "2", "3"]
    assert "-1unparsable call" in heads[2]
    # What all were shown first stands there once.
    assert texts(tab, ".shared .role") == ["system", "user"]
    assert texts(tab, ".column .turn:nth-of-type(1) .said") == []
    assert texts(tab, ".column:nth-child(1) .said") == ["tool[[17]]"]
    # The first token that differs from the chosen one's: "<thi" and "nk>I" are the same.
    assert texts(tab, ".column:nth-child(2) .parts") == [" gue"]
    assert texts(tab, ".column:nth-child(1) .parts") == []
    tops = tab.evaluate("[...document.querySelectorAll('.column')].map(e => e.getBoundingClientRect().top)")
    assert len(set(tops)) == 1
    tab.click(".column:nth-child(2) > h3")
    assert where(tab) == "Step 5, group 4, sibling 1"
    assert texts(tab, ".column.chosen > h3")[0].startswith("sibling 1")


def rows(tab: Tab) -> list[str]:
    return texts(tab, ".row .where")


@pytest.mark.soak
def test_filters_by_ending_and_reward(tab: Tab, file: str) -> None:
    show(tab, file)
    assert texts(tab, "#endings button") == ["completed 5", "truncated length 1", "unparsable call 1"]
    tab.click("#endings button:nth-child(3)")
    assert rows(tab) == ["step 5 · group 4.2"]
    assert where(tab) == "Step 5, group 4, sibling 2"
    assert texts(tab, "#count") == ["1 of 7 trajectories"]
    tab.click("#clear")
    assert len(rows(tab)) == 7
    tab.click("#histogram button:nth-child(4)")
    assert rows(tab) == ["step 5 · group 4.0", "step 3 · group 2.2"]
    assert "reward=1..1" in link(tab)
    tab.click("#histogram button:nth-child(4)")
    assert len(rows(tab)) == 7
    tab.evaluate(
        "(e => { e.value = 4; e.dispatchEvent(new Event('change')) })(document.querySelector('#step-max'))"
    )
    assert {row.split(" · ")[0] for row in rows(tab)} == {"step 3"}


@pytest.mark.soak
def test_search_finds_across_tokens_and_marks(tab: Tab, file: str) -> None:
    show(tab, file)
    tab.press("/")
    tab.type("OPEN Orders.")
    tab.wait_for("document.querySelectorAll('.row').length === 1")
    assert rows(tab) == ["step 5 · group 4.0"]
    marked = "[...CSS.highlights.get('found')].map(range => range.toString())"
    assert tab.evaluate(marked) == ["open orders."]
    assert tab.evaluate(
        "[...CSS.highlights.get('found')][0].startContainer.parentElement.className"
    ).startswith("tk")
    assert "q=OPEN+Orders." in link(tab)
    tab.press("Escape", "j")
    assert tab.evaluate("document.activeElement.id") == "list"
    tab.press("/")
    tab.type("no such words")
    tab.wait_for("document.querySelector('#rows .empty')")


@pytest.mark.soak
def test_link_brings_back_the_same_view(tab: Tab, file: str) -> None:
    address = "#group=4&sibling=0&turn=2&view=siblings&colour=mask&q=17&reward=0..1&masked=1&ending=completed"
    show(tab, file, address)
    assert where(tab) == "Step 5, group 4, sibling 0"
    assert rows(tab) == []  # none that passes is masked
    assert tab.evaluate("document.querySelector('#masked').checked")
    assert texts(tab, "[role=radio][aria-checked=true]") == ["mask"]
    show(tab, file, "#group=2&sibling=1&view=siblings")
    tab.wait_for("document.querySelector('#head h2').textContent === 'Step 3, group 2, sibling 1'")
    assert len(texts(tab, ".column")) == 3
    show(tab, file, "#group=99&sibling=nonsense&turn=1.5&reward=x..&colour=red&sort=toString")
    tab.wait_for("document.querySelector('#head h2').textContent.startsWith('Step 5')")
    assert texts(tab, "#count") == ["7 of 7 trajectories, group 99 was not kept"]


HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script></script><!--{{script}}'


@pytest.mark.slow
def test_what_a_model_writes_stays_text(tab: Tab, tmp_path: Path) -> None:
    run = keep(tmp_path / "a<b>&amp;", [told(said(HOSTILE, HOSTILE, fresh=True), ending="</script><b>")])
    show(tab, written(run))
    assert texts(tab, ".said .text") == [HOSTILE]
    assert texts(tab, ".answer .text") == [HOSTILE]
    assert tab.evaluate("document.querySelectorAll('#reading img, #reading script').length") == 0
    assert texts(tab, "#top h1") == ["a<b>&amp;"]
    tab.press("x", "s")
    assert "rollouts" in tab.evaluate("document.title")


@pytest.mark.soak
def test_file_asks_nobody(tab: Tab, file: str) -> None:
    tab.go_offline()
    show(tab, file)
    tab.press("j", "s", "c", "x", "o", "t")
    assert [urlsplit(address).scheme for address in tab.asked] == ["file"]
    refused = tab.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')")
    assert refused == "refused"
    assert any("Content Security Policy" in error for error in tab.errors)
    tab.errors.clear()


@pytest.mark.soak
def test_cut_off_and_foreign_lines_are_counted(tab: Tab, tmp_path: Path) -> None:
    run = keep(tmp_path / "run", plain())
    with (run / "rollouts" / "000001.jsonl").open("ab") as file:
        file.write(b'{"iteration": 9, "gro\nnull\n{"turns": 3}\n')
        whole = json.loads(next(read_lines(run)))
        for key, value in (("reward", None), ("ending", 7), ("turns", [None]), ("turns", [{"tokens": []}])):
            file.write(json.dumps({**whole, key: value}).encode() + b"\n")
        broken = {"logprobs": [None], "trained": [[True, 1e9]], "pieces": [], "context": None}
        for key, value in broken.items():
            turn = {**whole["turns"][0], key: value}
            file.write(json.dumps({**whole, "turns": [turn]}).encode() + b"\n")
    show(tab, written(run))
    assert texts(tab, "#count") == ["3 of 3 trajectories, 11 lines could not be read"]


@pytest.mark.soak
@pytest.mark.parametrize("text", [" " * 3_000_000 + "x", '{"arguments": ' * 100_000 + "} " * 500_000 + "x"])
def test_what_a_model_or_a_tool_writes_does_not_hang_the_page(tab: Tab, tmp_path: Path, text: str) -> None:
    """What takes a time that grows by the square would take hours here."""
    answer = said("ask", "yes", fresh=True).model_copy(update={"pieces": (text,), "tokens": (1,)})
    answer = answer.model_copy(update={"logprobs": (0.0,), "trained": ((True, 1),), "versions": ((3, 1),)})
    show(tab, written(keep(tmp_path / "run", [told(said(f"<|im_start|>tool\n{text}", "yes"), answer)])))
    assert len(texts(tab, ".answer .text")[1]) == len(text)


@pytest.mark.slow
def test_served_page_takes_new_rollouts_in(tab: Tab, tmp_path: Path) -> None:
    run = keep(tmp_path / "run", plain())
    with served(run) as url:
        show(tab, url, "#group=2&sibling=1")
        assert texts(tab, "#count") == ["3 of 3 trajectories"]
        assert tab.evaluate("document.querySelector('#fresh').hidden")
        keep(run, conversation())
        tab.wait_for("!document.querySelector('#fresh').hidden")
        tab.press("r")
        tab.wait_for("document.querySelector('#count').textContent === '7 of 7 trajectories'")
        assert where(tab) == "Step 3, group 2, sibling 1"
        assert {urlsplit(address).netloc for address in tab.asked} == {urlsplit(url).netloc}


@pytest.mark.soak
def test_trajectory_of_many_tokens_is_filled_as_it_comes_into_sight(tab: Tab, tmp_path: Path) -> None:
    long = [said(f"turn {n} ", "word " * 2500, fresh=n == 0) for n in range(12)]
    show(tab, written(keep(tmp_path / "run", [told(*long)])))
    tokens = "document.querySelectorAll('.tk').length"
    assert tab.evaluate(tokens) < 12 * 3125
    assert tab.evaluate("document.querySelectorAll('.turn').length") == 12
    for place in range(12):
        tab.press("n")
        turn = min(place + 1, 11)
        tab.wait_for(f"document.querySelectorAll('#turn-0-{turn} .tk').length === 3125")
    assert tab.evaluate(tokens) == 12 * 3125
