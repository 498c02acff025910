"""The page at / in headless Chromium: what a person does with it, against a running server. Where the embedded model cannot play its
part (it knows no tools), the page is given a canned stream instead of the server's."""
import json
import urllib.request

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from chromium import Tab, browser, needs_chromium  # noqa: F401 (a fixture)
from plumb_server import serve, write_adapter

pytestmark = needs_chromium
ANSWER = "I am a tiny model for tests and examples."


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    adapter = write_adapter(tmp_path_factory.mktemp("adapters") / "noisy", seed=5)
    with serve("--adapter", f"noisy={adapter}") as address:
        yield address


class Page(Tab):
    def __init__(self, browser, address):
        super().__init__(browser, address + "/")
        self.wait(lambda: self.all("#model option"))

    def set(self, name, value):
        field = self.one(f"[name={name}]")
        field.clear()
        field.send_keys(value)

    def send(self, text):
        self.one("#prompt").send_keys(text, Keys.ENTER)

    def ready(self):
        return self.one("#send").is_displayed()

    def ask(self, text):
        """Sends and waits for the end; -> the text of the answer."""
        self.send(text)
        self.wait(self.ready)
        return self.all(".assistant")[-1].find_element(By.CSS_SELECTOR, ":scope > .text").get_attribute("textContent")


@pytest.fixture
def page(browser, address):
    page = Page(browser, address)
    yield page
    assert page.outside(address) == []


def test_an_answer_streams_in(page):
    page.set("temperature", "0")
    page.browser.execute_script("""
      window.lengths = new Set();
      new MutationObserver(() => lengths.add(document.querySelector(".assistant > .text")?.textContent.length ?? 0))
        .observe(document.getElementById("conversation"), {childList: true, characterData: true, subtree: true});""")
    assert page.ask("Who are you?") == ANSWER
    assert page.browser.execute_script("return lengths.size") > 4
    about = page.one(".assistant .about").text
    assert about.startswith("tiny") and "tokens/s" in about and "mean log-probability" in about
    assert page.console() == []


def test_hover_shows_the_log_probabilities_of_the_api(page, address):
    page.set("temperature", "0")
    page.ask("Who are you?")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0, "logprobs": True,
            "top_logprobs": 5}
    request = urllib.request.Request(address + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    tokens = json.load(urllib.request.urlopen(request))["choices"][0]["logprobs"]["content"]
    spans = page.all(".assistant .token")
    assert "".join(s.get_attribute("textContent") for s in spans) == ANSWER
    for at in (0, 3):
        ActionChains(page.browser).move_to_element(spans[at]).perform()
        tooltip = page.one("#tooltip")
        assert tooltip.is_displayed()
        assert f"log-probability {tokens[at]['logprob']:.4f}" in tooltip.text
        rows = tooltip.find_elements(By.CSS_SELECTOR, "tr")
        shown = [row.find_elements(By.CSS_SELECTOR, "td")[2].text for row in rows]
        assert shown == [f"{t['logprob']:.4f}" for t in tokens[at]["top_logprobs"]]
    # The keyboard goes on from there.
    for key, at in ((Keys.ARROW_RIGHT, 4), (Keys.ARROW_LEFT, 3)):
        page.one(".assistant > .text").send_keys(key)
        assert f"log-probability {tokens[at]['logprob']:.4f}" in page.one("#tooltip").text
    assert page.console() == []


def test_stop_keeps_what_is_there_and_frees_the_engine(page):
    page.set("temperature", "100")  # nearly uniform: the answer goes on for a thousand tokens
    page.set("seed", "1")
    # The page itself presses the button: a driver may come too late.
    page.browser.execute_script("""
      new MutationObserver((_, observer) => {
        if (document.querySelectorAll(".assistant .token").length < 5) return;
        observer.disconnect();
        document.getElementById("stop").click();
      }).observe(document.getElementById("conversation"), {childList: true, subtree: true});""")
    page.send("Hello!")
    page.wait(lambda: page.all(".assistant .about"))
    assert "stopped" in page.one(".assistant .about").text
    page.wait(lambda: page.one("#running").text == "0")
    page.set("temperature", "0")
    assert page.ask("Who are you?")  # the conversation goes on
    assert page.console() == []


def test_the_adapter_that_is_chosen_answers(page):
    page.set("temperature", "0")
    page.set("max_tokens", "20")
    base = page.ask("Tell me a story about a fox.")
    page.one("#new").click()
    assert page.all(".turn") == []
    Select(page.one("#model")).select_by_value("noisy")
    assert page.ask("Tell me a story about a fox.") != base
    assert page.one(".assistant .about").text.startswith("noisy")
    assert page.console() == []


def test_text_is_never_html(page):
    page.set("temperature", "0")
    page.set("max_tokens", "5")
    text = "<img src=x onerror=alert(1)><b>bold</b>"
    page.ask(text)
    assert page.one(".user .text").text == text
    assert page.all("#conversation img, #conversation b") == []
    assert page.console() == []


def test_a_refused_request_says_why_and_gives_the_text_back(page):
    page.set("temperature", "-1")
    page.send("Hello!")
    page.wait(lambda: page.one("#problem").is_displayed())
    assert page.one("#problem").text.startswith("temperature: -1")
    assert page.one("#prompt").get_attribute("value") == "Hello!" and page.all(".turn") == []
    page.set("tools", "[")
    page.one("#prompt").send_keys(Keys.ENTER)
    page.wait(lambda: page.one("#problem").text.startswith("Tools: "))


CANNED = [{"role": "assistant", "content": ""}, {"reasoning_content": "Let me "}, {"reasoning_content": "look."}, {"content": "One moment."},
          {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": ""}}]},
          {"tool_calls": [{"index": 0, "function": {"arguments": "{\"word\": \"<i>"}}]},
          {"tool_calls": [{"index": 0, "function": {"arguments": "plumb</i>\"}"}}]}]


def test_thinking_and_calls_are_shown_apart(page):
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in CANNED]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    stream = ": still working\n\n" + "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.browser.execute_script("""
      const server = window.fetch;
      window.bodies = [];
      window.fetch = (path, options) => path !== "v1/chat/completions" ? server(path, options)
        : (bodies.push(JSON.parse(options.body)), Promise.resolve(new Response(arguments_stream)));
      """.replace("arguments_stream", json.dumps(stream)))
    page.set("tools", '[{"name": "lookup", "parameters": {"type": "object"}}]')
    assert page.ask("What is plumb?") == "One moment."
    thinking = page.one(".assistant details")
    assert not thinking.get_property("open")
    thinking.find_element(By.CSS_SELECTOR, "summary").click()
    assert thinking.find_element(By.CSS_SELECTOR, ".text").text == "Let me look."
    call = page.one(".assistant .call")
    assert "lookup" in call.find_element(By.CSS_SELECTOR, ".name").text
    assert call.find_element(By.CSS_SELECTOR, "pre").text == '{\n  "word": "<i>plumb</i>"\n}'
    # Its result goes back with the turn as it was written.
    call.find_element(By.CSS_SELECTOR, "textarea").send_keys("a weight on a line")
    call.find_element(By.CSS_SELECTOR, "button").click()
    page.wait(lambda: len(page.all(".assistant")) == 2 and page.ready())
    first, second = page.browser.execute_script("return bodies")
    assert first["tools"] == [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}]
    assert second["messages"][1:] == [
        {"role": "assistant", "content": "One moment.", "reasoning_content": "Let me look.", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": '{"word": "<i>plumb</i>"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a weight on a line"}]
    assert page.console() == []


def test_every_control_has_a_name(page):
    assert page.unnamed_controls() == []


def test_nothing_is_wider_than_a_narrow_screen(page):
    page.narrow()
    try:
        page.wait(lambda: page.all("#model option"))
        assert not page.one("#settings").is_displayed()
        page.one("#show-settings").click()
        for _ in range(2):
            assert page.width() <= 360
            page.one("#show-settings").click()
    finally:
        page.wide()


def test_a_key_is_asked_for(browser, tmp_path):
    (tmp_path / "keys").write_text("sk-right\n")
    with serve("--api-keys", tmp_path / "keys") as address:
        browser.get(address + "/")
        key = WebDriverWait(browser, 20).until(lambda b: b.find_element(By.ID, "key"))
        WebDriverWait(browser, 20).until(lambda _: key.is_displayed())
        key.send_keys("sk-right", Keys.ENTER)
        WebDriverWait(browser, 20).until(lambda b: b.find_elements(By.CSS_SELECTOR, "#model option"))
