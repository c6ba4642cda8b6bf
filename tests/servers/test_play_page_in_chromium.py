"""The page in a real Chromium: play by mouse and keyboard, what is displayed, one session per visitor."""

import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal
from chromium import Browser, Tab, chromium
from faulty_proxy import faulty_proxy
from page_gallery import HOSTILE
from PIL import Image
from serve_process import ServeProcess, eventually, serve

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def gallery() -> Iterator[ServeProcess]:
    with serve(app="page_gallery:app", OPENENV_WEB="1") as server:
        yield server


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """The folder for screenshots; PAGE_PICTURES=docs/images regenerates those of the docs."""
    return Path(os.environ.get("PAGE_PICTURES", tmp_path)).absolute()


def save_screenshot(tab: Tab, path: Path) -> None:
    """Write a small screenshot of the page."""
    tab.press("Escape")
    tab.wait_for("document.getAnimations().length === 0")
    picture = Image.open(io.BytesIO(tab.picture())).convert("RGB").quantize(192, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)
    assert 5_000 < path.stat().st_size < 60_000


@contextmanager
def visit(browser: Browser, address: str, errors: tuple[str, ...] = ()) -> Iterator[Tab]:
    """Open the page in a new tab; only the expected errors may occur."""
    with browser.tab() as tab:
        tab.open(f"http://{address}/")
        yield tab
        left = [one for one in tab.errors if not any(expected in one for expected in errors)]
        assert left == []


def start_episode(tab: Tab, *keys: str) -> None:
    tab.wait_for("document.body.dataset.ready")
    tab.press(*(keys or ("n",)))
    tab.wait_for("document.body.dataset.mode === 'playing' && !document.body.classList.contains('busy')")


def text(tab: Tab, selector: str) -> str:
    return str(tab.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))


def steps(tab: Tab, number: int) -> None:
    """Wait until this many steps were taken."""
    tab.wait_for(
        f"document.querySelectorAll('#steps li').length === {number + 1} && "
        "!document.body.classList.contains('busy')"
    )


def fill(tab: Tab, selector: str, value: str) -> None:
    tab.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
    tab.type(value)


def choose(tab: Tab, value: str) -> None:
    """Select a value in the first list of the form, and submit it."""
    chosen = json.dumps(json.dumps(value))
    tab.evaluate(f"document.querySelector('#form select').value = {chosen}")
    tab.click("#form .do")


def test_blackjack_is_played_by_keyboard_and_mouse(browser: Browser, pictures: Path) -> None:
    with serve("--web", app="blackjack") as server, visit(browser, server.address) as tab:
        tab.wait_for("document.body.dataset.ready")
        fill(tab, "#reset input", "7")
        tab.press("Enter")
        tab.wait_for("!document.querySelector('#actions').hidden")
        assert text(tab, ".lead") == "You hold 9, 10 (19). The dealer shows 10. Hit or stand?"
        tab.press("Escape", "2")
        steps(tab, 1)
        assert "is over" in text(tab, "#notice h2")
        by_keys = text(tab, "#observation")
        tab.click("#reset .do")  # the seed still stands there
        tab.wait_for("!document.querySelector('#actions').hidden")
        tab.click("#form .do:nth-child(2)")
        steps(tab, 1)
        assert text(tab, "#observation") == by_keys
        assert tab.evaluate("document.querySelectorAll('#episodes button').length") == 2
        assert tab.evaluate("document.querySelectorAll('#chart rect').length") == 1
        tab.press("k")  # the step before
        assert text(tab, ".lead") == "You hold 9, 10 (19). The dealer shows 10. Hit or stand?"
        tab.press("Escape", "s")
        tab.wait_for("document.querySelector('#state').open")
        assert "step count" in text(tab, "#state-box")
        tab.press("Escape")
        tab.evaluate("document.querySelector('#state').close()")
        tab.evaluate("document.querySelector('#reset input').value = '18'")
        start_episode(tab)
        for number, key in enumerate("112", 1):
            tab.press(key)
            steps(tab, number)
        assert "You win" in text(tab, ".lead")
        tab.resize(1100, 640)
        save_screenshot(tab, pictures / "page-light.png")
        # A visitor who goes away gives the slot back.
        assert server.get("/capacity")[1]["in_use"] == 1
        tab.open("about:blank")
        eventually(lambda: server.get("/capacity")[1]["in_use"] == 0)


def test_shop_tools_are_called_from_forms(browser: Browser) -> None:
    with serve("--web", app="shop") as server, visit(browser, server.address) as tab:
        start_episode(tab)
        tab.click("#kinds button")
        assert text(tab, "#kinds button") == "get_policy"
        assert text(tab, "#form .do").startswith("identity")
        tab.press("1")
        steps(tab, 1)
        assert text(tab, "#steps li:last-child .what").startswith("get_policy")
        assert "identity" in text(tab, "#observation").lower()
        tab.click("#kinds button:nth-child(4)")  # a form that is not filled in says where
        tab.click("#form .do")
        steps(tab, 2)
        assert "error" in text(tab, "#observation")


def test_tools_are_those_of_the_episode(browser: Browser) -> None:
    tools = "[...document.querySelectorAll('#kinds button')].map((tab) => tab.innerText).join()"
    with serve("--web", app="kits:app") as server, visit(browser, server.address) as tab:
        start_episode(tab)
        assert tab.evaluate(tools) == "cut,drive"
        tab.evaluate("document.querySelector('#reset details').open = true")
        fill(tab, "#reset details textarea, #reset details input", '["drive", "weld"]')
        tab.click("#reset .do")
        tab.wait_for(f"{tools} === 'drive,weld'")


def test_figure_of_the_code_interpreter_is_shown(browser: Browser, pictures: Path) -> None:
    figure = (
        "import matplotlib.pyplot as plt\n"
        "plt.figure(figsize=(4.2, 2.2))\n"
        "plt.plot([1, 4, 2, 5, 3, 6])\n"
        "plt.show()\n"
        "print('six points')"
    )
    with serve("--web", app="code_interpreter") as server, visit(browser, server.address) as tab:
        tab.resize(1100, 760)
        tab.prefer("dark")
        start_episode(tab)
        tab.evaluate("document.querySelector('#form textarea').value = " + json.dumps(figure))
        for attempt in range(1, 6):  # the first import of matplotlib may outlast an execution's time
            tab.evaluate("document.querySelector('#form form').requestSubmit()")
            steps(tab, attempt)
            if "six points" in text(tab, "#observation"):
                break
        tab.wait_for("document.querySelector('#observation img.picture').naturalWidth > 300")
        save_screenshot(tab, pictures / "page-dark.png")


def test_observation_contents_are_shown_and_never_executed(browser: Browser, gallery: ServeProcess) -> None:
    with visit(browser, gallery.address) as tab:
        start_episode(tab)
        choose(tab, "hostile")
        steps(tab, 1)
        assert text(tab, ".lead") == HOSTILE
        assert text(tab, "#observation").count(HOSTILE) == 4
        assert tab.evaluate("document.querySelectorAll('#observation img, #observation script').length") == 0
        choose(tab, "table")
        steps(tab, 2)
        assert tab.evaluate("document.querySelectorAll('#observation tbody tr').length") == 2
        choose(tab, "pixels")
        steps(tab, 3)
        assert tab.evaluate("document.querySelector('#observation canvas').width") == 16
        choose(tab, "picture")
        steps(tab, 4)
        tab.wait_for("document.querySelector('#observation img').naturalWidth === 40")
        assert text(tab, "#total") == "+2"
        choose(tab, "numbers")
        steps(tab, 5)
        assert "200,000 numbers from 0 to 199999" in text(tab, "#observation")
        choose(tab, "fault")
        tab.wait_for("document.querySelector('#form .wrong[role=alert]').innerText")
        assert HOSTILE in text(tab, "#form .wrong[role=alert]")
        tab.evaluate("document.querySelector('#form details').open = true")
        fill(tab, "#form input[type=text]", "1, x")
        choose(tab, "table")
        assert text(tab, "#form .field:has(input[type=text]) .wrong") == "Give a whole number."
        assert tab.evaluate("document.title") == "gallery · play"
        assert not [
            address
            for address in tab.requested_urls
            if gallery.address not in address and "data:" not in address
        ]


def test_declared_picture_is_shown(browser: Browser) -> None:
    with (
        serve(app="picture_world:app", OPENENV_WEB="1") as server,
        visit(browser, server.address) as tab,
    ):
        start_episode(tab)
        tab.wait_for("document.querySelector('#observation img').naturalWidth === 24")
        tab.press("2")
        steps(tab, 1)
        tab.wait_for("document.querySelector('#observation img').naturalHeight === 24")


def test_visitors_have_separate_sessions_and_wait_in_the_queue(
    browser: Browser, gallery: ServeProcess
) -> None:
    with (
        visit(browser, gallery.address) as one,
        visit(browser, gallery.address) as two,
        visit(browser, gallery.address) as three,
    ):
        for tab, seed in ((one, "1"), (two, "2")):
            tab.wait_for("document.body.dataset.ready")
            fill(tab, "#reset input", seed)
            start_episode(tab, "Enter")
        choose(one, "table")
        steps(one, 1)
        assert text(two, ".lead") == "The east hall, seed 2."
        assert two.evaluate("document.querySelectorAll('#steps li').length") == 1
        three.wait_for("document.body.dataset.ready")
        three.press("n")
        three.wait_for("document.body.dataset.mode === 'waiting'")
        assert text(three, "#notice h2") == "You are number 1 of 1 in the queue"
        one.click("#leave")
        three.wait_for("document.body.dataset.mode === 'playing'")


def test_two_people_in_two_browsers_play_at_a_table(browser: Browser) -> None:
    notice = "document.querySelector('#notice h2')?.innerText"
    with (
        serve("--web", app="kuhn") as server,
        chromium() as other,
        visit(browser, server.address) as first,
        visit(other, server.address) as second,
    ):
        for tab, seat in ((first, "first"), (second, "second")):
            tab.wait_for("document.body.dataset.ready")
            fill(tab, "#reset .field:has(label[for]) input[type=text]", "ours")
            tab.evaluate(f"document.querySelector('#reset select').value = '\"{seat}\"'")
            tab.evaluate("document.querySelector('#reset form').requestSubmit()")
            if tab is first:
                first.wait_for(f"{notice} === 'It is not your turn'")
        for tab, waiting in ((first, second), (second, first)):
            waiting.wait_for(f"{notice} === 'It is not your turn'")
            tab.wait_for(f"{notice} === 'It is your turn'")
            assert tab.evaluate("document.title").startswith("● your turn")
            assert not waiting.evaluate("document.title").startswith("●")
            assert waiting.evaluate(
                "(({ inert, hidden }) => inert || hidden)(document.querySelector('#actions'))"
            )
            tab.press("Escape", "2")  # bet
        for tab in (first, second):
            steps(tab, 1)
        shown = [text(tab, ".lead") for tab in (first, second)]
        assert [part in shown[0] for part in ("You are the first", "The other player holds")] == [True, True]
        totals = [text(tab, "#total") for tab in (first, second)]
        assert [total[1:] for total in totals] == ["2", "2"]
        assert totals[0] != totals[1]


def test_token_is_asked_for_and_not_stored(browser: Browser) -> None:
    token = "a-token-of-a-visitor"
    options = ("--web", "--token", token)
    with serve(*options, app="page_gallery:app") as server, visit(browser, server.address, ("401",)) as tab:
        tab.wait_for("document.querySelector('#token').open")
        fill(tab, "#token-input", "a-token-of-nobody")
        tab.press("Enter")
        tab.wait_for("!document.querySelector('#token-wrong').hidden")
        tab.evaluate("document.querySelector('#token-input').value = ''")
        fill(tab, "#token-input", f"\N{ZERO WIDTH SPACE}{token}")
        tab.press("Enter")
        start_episode(tab)
        assert tab.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert not [address for address in tab.requested_urls if token in address]
        choose(tab, "table")
        steps(tab, 1)


def test_broken_connection_is_resumed_and_each_step_taken_once(
    browser: Browser, gallery: ServeProcess
) -> None:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(faulty_proxy(gallery.address)) as proxy,
        visit(browser, f"127.0.0.1:{proxy.port}", ("WebSocket",)) as tab,
    ):
        start_episode(tab)
        choose(tab, "table")
        steps(tab, 1)
        portal.call(proxy.hold)
        choose(tab, "pixels")  # which does not arrive
        portal.call(proxy.cut)
        steps(tab, 2)
        choose(tab, "table")
        steps(tab, 3)
        assert text(tab, "#total") == "+1.5"
        tab.press("Escape", "s")
        tab.wait_for("document.querySelector('#state').open")
        assert tab.evaluate("[...document.querySelectorAll('#state-box dd')].at(-1).innerText") == "3"


def test_idle_session_is_given_back(browser: Browser) -> None:
    with (
        serve("--web", "--idle-timeout", "1", app="page_gallery:app") as server,
        visit(browser, server.address) as tab,
    ):
        tab.wait_for("document.body.dataset.ready")
        for _ in range(2):
            tab.press("n")
            tab.wait_for("document.body.dataset.mode === 'ended'")
            assert "so the session was given back" in text(tab, "#notice")
            eventually(lambda: server.get("/capacity")[1]["in_use"] == 0)
        assert tab.evaluate("document.querySelectorAll('#episodes button').length") == 2


def test_page_adapts_to_colour_scheme_and_narrow_screens(browser: Browser, gallery: ServeProcess) -> None:
    with visit(browser, gallery.address) as tab:
        start_episode(tab)
        paper = "getComputedStyle(document.body).backgroundColor"
        for scheme, colour in (("dark", "rgb(19, 21, 23)"), ("light", "rgb(250, 249, 247)")):
            tab.prefer(scheme)
            tab.wait_for(f"{paper} === '{colour}'")
        tab.press("Escape", "t", "t")  # out of the form; light, dark
        tab.wait_for(f"{paper} === 'rgb(19, 21, 23)'")
        tab.resize(360, 700)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360
