"""The page for people, in a real browser: text as it is accepted, charts that move, nothing loaded from elsewhere."""

import base64
import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from helpers_browser import Browser, find_browser
from helpers_server import Process

pytest.importorskip("uvicorn")

PAGE = Path(__file__).parents[1] / "hf_specdec" / "serve" / "page.html"
STORY = "Tell me a story about a dog."
browsing = pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed (apt-get install chromium)")


@pytest.fixture(scope="module")
def server():
    config = json.dumps({"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 3})
    with Process.running("--speculative-config", config, "--api-key", "secret", "--max-model-len", "512") as made:
        yield made


@pytest.fixture(scope="module")
def browser():
    made = Browser()
    yield made
    made.close()


def opened(server, key):
    """(status, headers, text) of the page."""
    headers = {} if key is None else {"Authorization": "Basic " + base64.b64encode(f"me:{key}".encode()).decode()}
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + "/", headers=headers), timeout=60) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


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
def test_the_page_fits_a_phone(server, browser):
    browser.resize(360, 640, mobile=True)
    browser.wait("document.documentElement.clientWidth <= 360")
    assert browser.run("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert browser.run("getComputedStyle(document.getElementById('charts')).gridTemplateColumns.split(' ').length") == 2
    browser.resize(1000, 900)
