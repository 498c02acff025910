"""Headless Chromium for the tests of the server's pages."""
import json
import pathlib

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM, DRIVER = pathlib.Path("/usr/bin/chromium"), pathlib.Path("/usr/bin/chromedriver")
needs_chromium = pytest.mark.skipif(not (CHROMIUM.exists() and DRIVER.exists()),
                                    reason="no Chromium: tools/bootstrap.sh tests installs it")


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    yield driver
    driver.quit()


class Tab:
    """A page that is open in the browser."""

    def __init__(self, browser, url):
        self.browser = browser
        browser.get_log("browser")  # what earlier tests left
        browser.get_log("performance")
        browser.get(url)

    def wait(self, condition):
        return WebDriverWait(self.browser, 20, poll_frequency=0.05).until(lambda _: condition())

    def all(self, selector):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def run(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def console(self):
        return [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]

    def outside(self, address):
        """Requests to other servers since the page was opened."""
        messages = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith((address + "/", "data:"))]

    def unnamed_controls(self):
        return self.run("""
          return [...document.querySelectorAll("button, input, select, textarea")]
            .filter(e => !(e.ariaLabel || e.labels?.length || e.textContent.trim())).map(e => e.outerHTML);""")

    def narrow(self):
        """As on a telephone; undone by wide()."""
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                     {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": True})
        self.browser.refresh()

    def wide(self):
        self.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def width(self):
        return self.run("return document.documentElement.scrollWidth")
