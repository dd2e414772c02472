"""The page for people, in a real browser: text as it is accepted, charts that move, nothing loaded from elsewhere."""

import base64
import json
import re

import pytest
from helpers_browser import Browser, find_browser
from helpers_server import in_thread
from paths import ROOT

pytest.importorskip("uvicorn")

PAGE = ROOT / "hf_specdec" / "serve" / "http" / "page.html"
STORY = "Tell me a story about a dog."
browsing = pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed (apt-get install chromium)")


@pytest.fixture(scope="module")
def server():
    config = {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 3}
    with in_thread(config, api_keys=["secret"]) as made:
        yield made


@pytest.fixture(scope="module")
def browser():
    made = Browser()
    yield made
    made.close()


def opened(server, key):
    """(status, headers, text) of the page."""
    headers = {} if key is None else {"Authorization": "Basic " + base64.b64encode(f"me:{key}".encode()).decode()}
    return server.ask("/", headers=headers)


def test_the_page_loads_nothing_from_elsewhere():
    text = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"(src|href|action)=[\"'](?!data:)", text) and "@import" not in text
    assert "innerHTML" not in text  # what a model writes is never markup
    assert 'name="viewport"' in text and len(text) < 30_000


def test_the_page_asks_for_the_key(server):
    status, headers, _ = opened(server, None)
    assert status == 401 and headers["WWW-Authenticate"].startswith("Basic")
    assert opened(server, "wrong")[0] == 401
    status, headers, text = opened(server, "secret")
    assert status == 200 and text == PAGE.read_text(encoding="utf-8")
    assert "default-src 'none'" in headers["Content-Security-Policy"]


@browsing
def test_chat_in_a_browser(server, browser):
    browser.call("Page.navigate", url=server.url.replace("//", "//me:secret@") + "/")
    browser.wait("typeof send === 'function' && document.getElementById('model').textContent === 'tiny'")
    browser.run("document.getElementById('tokens').value = 120; document.getElementById('temperature').value = 0")
    ask = "document.getElementById('text').value = {}; document.querySelector('form').requestSubmit()"
    browser.run(ask.format(json.dumps(STORY)))
    browser.wait("document.querySelector('#log > .quiet') !== null && running === null")
    said = "document.querySelector('.said.assistant').textContent"
    _, _, answer = server.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": STORY}], "max_tokens": 120, "temperature": 0},
        {"Authorization": "Bearer secret"},
    )
    assert browser.run(said) == answer["choices"][0]["message"]["content"]
    tinted = browser.run("[...document.querySelectorAll('.said.assistant .accepted')].map((each) => each.textContent)")
    found = answer["metrics"]["speculative_decoding"]
    assert 0 < len(tinted) <= found["num_spec_steps"] and "τ" in browser.run(
        "document.querySelector('#log > .quiet').textContent"
    )
    drawn = "document.querySelector('#{} polyline').getAttribute('points')"
    browser.wait(drawn.format("rate"))
    browser.wait("charts.tau.values.some((value) => value > 1) && charts.rate.values.some((value) => value > 0)")
    browser.run(ask.format(json.dumps("And then?")))  # the conversation goes on
    browser.wait("messages.length === 4")

    browser.run("document.getElementById('clear').click(); document.getElementById('mode').value = 'complete'")
    browser.run(ask.format(json.dumps("<b>Once</b> upon a time")))
    browser.wait("document.querySelector('#log > .quiet') !== null && running === null")
    assert (
        browser.run(said).startswith("<b>Once</b> upon a time")
        and browser.run("document.querySelectorAll('b').length") == 4
    )
    browser.run("document.querySelector('form').noValidate = true; document.getElementById('temperature').value = -1")
    browser.run(ask.format('"x"'))
    browser.wait("document.querySelector('.error') !== null")
    assert "temperature" in browser.run("document.querySelector('.error').textContent")
    browser.problems = [each for each in browser.problems if "status of 400" not in str(each)]
    assert not browser.problems


@browsing
def test_what_is_shown_is_what_the_next_question_has(server, browser):
    """Stop keeps the turn that is shown, or gives the text back if nothing came; Clear forgets all, also a turn that still runs."""
    browser.call("Page.navigate", url=server.url.replace("//", "//me:secret@") + "/?again")
    browser.wait("typeof send === 'function' && document.getElementById('model').textContent === 'tiny'")
    sent = "window.sent = []; const real = fetch; "
    sent += "fetch = (url, how) => { if (how) sent.push(JSON.parse(how.body)); return real(url, how); }"
    browser.run(
        sent + "; document.getElementById('tokens').value = 400; document.getElementById('temperature').value = 0"
    )
    ask = "document.getElementById('text').value = {}; document.querySelector('form').requestSubmit()"
    last, button = "sent[sent.length - 1].messages", "document.getElementById('send')"
    assert "tokens per step" in browser.run("document.getElementById('tau').textContent")
    assert "Shift" in browser.run("document.getElementById('text').placeholder")
    browser.wait("document.querySelector('#tau b').textContent === '–'")  # nothing runs
    colors = browser.run(
        "['#text', '#tokens', '.row label'].map((each) => getComputedStyle(document.querySelector(each)).color)"
    )
    assert colors[0] == colors[1] != colors[2]
    quiet = browser.run(f"getComputedStyle({button}).backgroundColor")

    browser.run(ask.format(json.dumps(STORY)))
    browser.wait("document.querySelector('.said.assistant').textContent.length > 20")
    assert browser.run(f"{button}.textContent") == "Stop"
    assert browser.run(f"getComputedStyle({button}).backgroundColor") != quiet
    browser.run(f"{button}.click()")
    browser.wait("running === null")
    said = (
        browser.run("document.querySelector('.said.assistant').firstChild.parentNode.innerText")
        .removesuffix("Stopped.")
        .strip()
    )
    browser.run(ask.format(json.dumps("And then?")))
    first, second, third = browser.run(last)
    assert (first["content"], third["content"]) == (STORY, "And then?") and second["content"].strip() == said

    browser.run("document.getElementById('clear').click()")
    browser.wait("running === null")
    assert browser.run("document.getElementById('log').textContent") == ""
    browser.run(ask.format(json.dumps("Who?")))
    assert [each["content"] for each in browser.run(last)] == ["Who?"]
    browser.run(f"{button}.click()")  # before the first token, or after it
    browser.wait("running === null")
    shown = browser.run("document.querySelectorAll('.said').length")
    assert (shown, browser.run("document.getElementById('text').value")) in ((0, "Who?"), (2, ""))


@browsing
def test_the_page_fits_a_phone(server, browser):
    browser.resize(360, 640, mobile=True)
    browser.wait("document.documentElement.clientWidth <= 360")
    assert browser.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert browser.run("getComputedStyle(document.getElementById('charts')).gridTemplateColumns.split(' ').length") == 2
    browser.resize(1000, 900)
