"""The web page in a real browser, against the real server and the shipped model.

    apt-get install chromium chromium-driver
    python3 -m venv VENV && VENV/bin/pip install selenium
    VENV/bin/python tests/clients/browser.py target/release/aquila [--pictures FOLDER]

Starts servers on free ports, drives the page in headless Chromium as a reader would, and checks
what it shows against what the server was asked: every request of the page is recorded from the
browser's own log of the network. Exit code 0 if all went well. With --pictures, pictures of the
page on a desktop, light and dark, and on a phone are left in a folder.
"""

import argparse
import contextlib
import json
import pathlib
import re
import shutil
import subprocess
import sys
import traceback
import urllib.request

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

# How long anything may take before it counts as hung; no verdict depends on it otherwise.
PATIENCE = 120
DESKTOP, PHONE = (1360, 860), (390, 844)
QUESTION = "Tom has 3 apples and buys 4 more. He gives half of them to Ann. How many are left?"
TREES = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "4",
         "--speculative-eagle-topk", "3", "--speculative-num-draft-tokens", "10"]
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


@contextlib.contextmanager
def serving(binary, *flags):
    command = [binary, "serve", "tiny", "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if found := re.search(r"ready: (http://\S+)/v1 ", line):
                break
        else:
            raise RuntimeError("the server did not start")
        # What it says from now on is not read; it must not wait for a reader.
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield found[1]
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0, "the server ended badly"
        drain.wait(PATIENCE)


class Page:
    """A page that was opened, with what it has asked for."""

    def __init__(self, url, size=DESKTOP, scheme="light"):
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or shutil.which("google-chrome")
        for flag in ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                     "--disable-background-networking", "--disable-component-update"]:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options=options, service=service)
        self.url = url
        self.asked = []
        self.errors = []
        self.bad_urls = []
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1,
                   "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        self.driver.get(f"{url}/")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.read_logs()
        finally:
            self.driver.quit()

    def read_logs(self):
        """Reads what the browser has logged: requests of the page, and errors."""
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] != "Network.requestWillBeSent":
                continue
            request = message["params"]["request"]
            if not request["url"].startswith((f"{self.url}/", "data:")):
                self.bad_urls.append(request["url"])
            if body := request.get("postData"):
                self.asked.append((request["url"].removeprefix(self.url), json.loads(body)))
        self.errors += [entry["message"] for entry in self.driver.get_log("browser")]

    def get(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector):
        return self.get(selector).get_attribute("textContent").strip()

    def wait(self, what, condition):
        WebDriverWait(self.driver, PATIENCE, 0.05).until(lambda _: condition(), what)

    def idle(self):
        """Waits until nothing is being answered."""
        self.wait("an answer", lambda: self.get("#send").is_displayed())

    def ready(self):
        self.wait("the model's name", lambda: self.text("#model") == "tiny")
        return self

    def tab(self, name):
        self.get(f'[data-tab="{name}"]').click()

    def set(self, name, value):
        """Writes into a field of the settings."""
        self.tab("settings")
        field = self.get(f"#{name}")
        field.clear()
        field.send_keys(str(value))

    def send(self, text):
        self.get("#prompt").send_keys(text, Keys.ENTER)

    def last_asked(self):
        self.read_logs()
        return self.asked[-1]

    def answer(self):
        return self.all("article.assistant .text")[-1].get_attribute("textContent")


def post(url, path, body, key=None):
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        return json.load(reply)


def whole(url, path, body):
    """The text of a request of the page, asked for by another client without a stream."""
    left_out = ("stream", "stream_options", "return_draft_trees")
    body = {name: value for name, value in body.items() if name not in left_out}
    answer = post(url, path, body)
    choice = answer["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text, answer["usage"]


@check
def an_answer_says_how_its_tokens_came(page, url):
    page.set("temperature", "0.4")
    page.set("max_tokens", "80")
    page.set("seed", "11")
    page.tab("live")
    page.send(QUESTION)
    page.wait("a footer", lambda: page.all("article.assistant footer"))
    page.idle()
    path, body = page.last_asked()
    assert path == "/v1/chat/completions" and body["stream"] is True
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0.4, 80, 11), body
    text, usage = whole(url, path, body)
    assert page.answer() == text, (page.answer(), text)
    assert f"{usage['completion_tokens']} tokens" in page.text("article.assistant footer")
    shades = {name for token in page.all(".token") for name in token.get_attribute("class").split()}
    assert {"own", "d1", "d2"} <= shades, shades


@check
def the_panel_agrees_with_what_the_server_counts(page, url):
    path, body = page.last_asked()
    _, usage = whole(url, path, body)
    spec = usage["speculative"]
    length = f"accept length {spec['spec_accept_length']:.2f}"
    page.wait("the accept length", lambda: page.text("#accept-length") == length)
    histogram = spec["spec_correct_drafts_histogram"]
    counts = [row.text for row in page.all("#depths small")]
    accepted = [sum(histogram[depth:]) for depth in range(1, len(histogram))]
    assert [int(count.split("/")[0]) for count in counts][: len(accepted)] == accepted, counts
    # The prompt's own token has a column of the strip, too.
    assert len(page.all("#strip [data-round]")) == spec["spec_verify_ct"] + 1


@check
def the_tree_of_a_round_is_drawn_and_follows_the_selected_token(page, _):
    page.wait("a tree", lambda: page.all("#tree .node"))
    for token in page.all(".token.d2")[:3]:
        page.driver.execute_script("arguments[0].click()", token)
        number = token.get_attribute("data-round")
        page.wait("its round", lambda: page.text("#round-name").startswith(f"{number} of"))
        said = re.search(r"(\d+) of (\d+) drafts accepted", page.text("#round-name"))
        accepted, drafts = int(said[1]), int(said[2])
        assert accepted >= 2
        assert len(page.all("#tree .node.accepted")) == accepted
        assert len(page.all("#tree .node.rejected")) == drafts - accepted
        assert len(page.all("#tree .edge")) == len(page.all("#tree .node")) - 1
    before = page.text("#round-name")
    page.get("#earlier").click()
    page.wait("the round before", lambda: page.text("#round-name") != before)


@check
def plain_decoding_is_measured_and_has_the_same_text(page, _):
    page.get("#compare").click()
    page.wait("a verdict", lambda: "×" in page.text("#verdict"))
    assert re.fullmatch(r"\d+\.\d+×, same text", page.text("#verdict")), page.text("#verdict")
    before = len(page.asked)
    page.read_logs()
    path, first = page.asked[before - 1]
    # Trees would be read on one side alone.
    assert first.pop("return_draft_trees")
    runs = page.asked[before:]
    assert runs[0] == (path, {**first, "speculative": False}), runs[0]
    # Where answers are slow, one run is all.
    assert all(run == (path, first) for run in runs[1::2]), runs
    assert all(run == runs[0] for run in runs[::2]), runs
    rates = [float(page.text(f"#{name}-rate").removesuffix(" tok/s")) for name in ["here", "plain"]]

    def drawn():
        """The bars are as long as the rates say, once they have stopped growing."""
        script = "return arguments[0].getBoundingClientRect().width"
        here, plain = (page.driver.execute_script(script, page.get(f"#{name}-bar"))
                       for name in ["here", "plain"])
        return abs(here / plain - rates[0] / rates[1]) < 0.05

    page.wait("bars in proportion", drawn)


@check
def settings_reach_the_server(page, url):
    page.set("max_tokens", "7")
    page.set("top_p", "0.5")
    page.set("top_k", "3")
    page.set("temperature", "1.5")
    page.set("system", "Answer in one word.")
    page.send("And now?")
    page.wait("a second answer", lambda: len(page.all("article.assistant footer")) == 2)
    page.idle()
    path, body = page.last_asked()
    assert (body["top_p"], body["top_k"], body["temperature"]) == (0.5, 3, 1.5), body
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system", "user", "assistant", "user"], roles
    text, usage = whole(url, path, body)
    assert page.answer() == text and usage["completion_tokens"] <= 7
    page.get("#defaults").click()
    page.get("#speculative").click()
    page.send("Once more.")
    page.wait("a third answer", lambda: len(page.all("article.assistant footer")) == 3)
    page.idle()
    path, body = page.last_asked()
    assert body["speculative"] is False and "temperature" not in body and "top_k" not in body
    assert isinstance(body["seed"], int), "an answer can be asked for again"
    page.get("#speculative").click()


@check
def a_bad_setting_is_told_and_the_question_is_kept(page, _):
    page.set("top_p", "1.5")
    page.send("What is wrong?")
    page.wait("a notice", lambda: page.get("#notice").is_displayed())
    assert "top_p" in page.text("#notice"), page.text("#notice")
    assert page.get("#prompt").get_attribute("value") == "What is wrong?"
    page.get("#prompt").clear()
    page.get("#defaults").click()
    # Chromium logs every answer of 4xx; it is expected here.
    page.read_logs()
    page.errors = [error for error in page.errors if "400 (Bad Request)" not in error]


@check
def text_shows_while_it_comes_and_stop_ends_it_here_and_on_the_server(page, url):
    page.get("#clear").click()
    assert not page.all("article")
    page.set("max_tokens", "1900")
    page.set("temperature", "1.2")
    # Nothing else keeps this model from ending early.
    page.driver.execute_script("""
        const request = requestFor;
        requestFor = (...all) => {
            const made = request(...all);
            made.body.ignore_eos = true;
            return made;
        };
    """)
    # Stops as soon as there is text: from here it could be too late for a fast model.
    page.driver.execute_script("""
        const stop = document.getElementById("stop");
        const observer = new MutationObserver(() => {
            if (!document.querySelector(".token")) return;
            observer.disconnect();
            window.shownWhileComing = !stop.hidden;
            stop.click();
        });
        observer.observe(document.getElementById("messages"), { childList: true, subtree: true });
    """)
    page.send("Tell me a long story.")
    page.wait("tokens", lambda: page.all(".token"))
    page.idle()
    assert page.driver.execute_script("return shownWhileComing"), "text shows while it comes"
    page.wait("a footer", lambda: page.all("article.assistant footer"))
    assert "stopped" in page.text("article.assistant footer"), page.text("article.assistant footer")
    assert len(page.all(".token")) < 1900

    def load():
        with urllib.request.urlopen(f"{url}/get_load", timeout=PATIENCE) as reply:
            return json.load(reply)[0]["num_reqs"]

    page.wait("an idle engine", lambda: load() == 0)


@check
def plain_texts_are_continued_where_asked(page, url):
    page.get("#clear").click()
    page.tab("settings")
    page.driver.execute_script("""
        const route = document.getElementById("route");
        route.value = "text";
        route.dispatchEvent(new Event("input", { bubbles: true }));
    """)
    page.set("max_tokens", "20")
    page.send("use std::collections")
    page.wait("an answer", lambda: page.all("article.assistant footer"))
    page.idle()
    path, body = page.last_asked()
    assert path == "/v1/completions" and body["prompt"] == "use std::collections", body


def with_trees(binary):
    with serving(binary, *TREES) as url, Page(url) as page:
        page.ready()
        assert "EAGLE3" in page.text("#algorithm")
        for function in CHECKS:
            function(page, url)
            print(f"ok: {function.__name__}", flush=True)
        page.read_logs()
        assert not page.errors, page.errors
        assert not page.bad_urls, page.bad_urls


def with_a_key(binary):
    with serving(binary, "--api-key", "a-key", "--speculative-algorithm", "NONE") as url, Page(url) as page:
        page.wait("a field for the key", lambda: page.get("#unlock").is_displayed())
        assert "key" in page.text("#notice"), page.text("#notice")
        page.get("#key").send_keys("wrong", Keys.ENTER)
        page.wait("a notice", lambda: page.get("#notice").is_displayed())
        page.get("#key").clear()
        page.get("#key").send_keys("a-key")
        page.get("#use-key").click()
        page.ready()
        page.wait("no more questions", lambda: not page.get("#unlock").is_displayed())
        page.set("max_tokens", "12")
        page.tab("live")
        page.send(QUESTION)
        page.wait("an answer", lambda: page.all("article.assistant footer"))
        # A server that drafts nothing says so.
        page.wait("a note", lambda: "decodes plainly" in page.text("#depths"))
        assert page.all(".token.undrafted") and not page.all(".token.own")
        page.driver.refresh()
        page.ready()
        page.read_logs()
        others = [error for error in page.errors if "401 (Unauthorized)" not in error]
        assert not others and not page.bad_urls, (others, page.bad_urls)
    print("ok: with_a_key", flush=True)


def background(page):
    script = "return getComputedStyle(document.body).backgroundColor"
    return [int(part) for part in re.findall(r"\d+", page.driver.execute_script(script))[:3]]


def looks(binary, pictures):
    """Light and dark, on a desktop and on a phone: nothing is cut off."""
    with serving(binary, *TREES) as url:
        for name, size, scheme in [("light", DESKTOP, "light"), ("dark", DESKTOP, "dark"),
                                   ("phone", PHONE, "light"), ("phone-dark", PHONE, "dark")]:
            with Page(url, size, scheme) as page:
                page.ready()
                assert (sum(background(page)) < 200) == (scheme == "dark"), background(page)
                page.set("temperature", "0.4")
                page.set("seed", "11")
                if size == PHONE:
                    page.tab("chat")
                page.send(QUESTION)
                page.wait("a footer", lambda: page.all("article.assistant footer"))
                for tab in ["chat", "live", "settings"]:
                    if size == DESKTOP and tab == "chat":
                        continue
                    page.tab(tab)
                    if tab == "live":
                        page.wait("a tree", lambda: page.all("#tree .node"))
                    wide = page.driver.execute_script(
                        "return [...document.querySelectorAll('header, #chat, aside, .card, .box')]"
                        ".filter(e => e.offsetParent && e.getBoundingClientRect().right"
                        " > innerWidth + 1).map(e => e.id || e.className)")
                    assert not wide, (name, tab, wide)
                    if pictures:
                        if tab == "live":
                            page.get("#compare").click()
                            page.wait("a verdict", lambda: "×" in page.text("#verdict"))
                        page.driver.save_screenshot(str(pictures / f"{name}-{tab}.png"))
                page.get("#theme").click()
                assert (sum(background(page)) < 200) == (scheme == "light"), background(page)
                page.read_logs()
                assert not page.errors and not page.bad_urls, (page.errors, page.bad_urls)
    print("ok: looks", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--pictures", type=pathlib.Path, help="a folder to leave pictures in")
    arguments = parser.parse_args()
    if arguments.pictures:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
    try:
        with_trees(arguments.binary)
        with_a_key(arguments.binary)
        looks(arguments.binary, arguments.pictures)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
