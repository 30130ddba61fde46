"""The web page of a report in a real browser, by keyboard: Chromium through ChromeDriver, where they are installed."""

import json
import os
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
import torch

from sparsebert import SparseMask
from sparsebert.analysis.reporting.page_masks import TILES
from sparsebert.analysis.reporting.web_page import PageMask, write_page
from sparsebert.analysis.saved_runs import SavedMask
from sparsebert.masks.compiled_forms import base_table
from sparsebert.masks.tiles import tile_shares


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("chromedriver") and shutil.which("chromium")), reason="needs Chromium and ChromeDriver"
    ),
]
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
HOSTILE = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"
KEYS = {
    "End": "\ue010", "Home": "\ue011", "ArrowLeft": "\ue012", "ArrowUp": "\ue013", "ArrowRight": "\ue014",
    "ArrowDown": "\ue015", "Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004", "Shift": "\ue008",
}  # fmt: skip


class Browser:
    """A session of the WebDriver protocol."""

    def __init__(self, address, profile):
        self.address = address
        options = {"args": [*FLAGS, f"--user-data-dir={profile}", "--window-size=1200,900"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.session = f"/session/{self.post('/session', {'capabilities': {'alwaysMatch': wanted}})['sessionId']}"

    def post(self, path, content, method="POST"):
        request = urllib.request.Request(
            self.address + path, json.dumps(content).encode(), {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def show(self, path):
        self.post(f"{self.session}/url", {"url": path.as_uri()})

    def run(self, script, *arguments):
        return self.post(f"{self.session}/execute/sync", {"script": script, "args": arguments})

    def wait(self, condition):
        """Until an expression is true, frame by frame."""
        script = (
            "const done = arguments[0];"
            "const look = () => (CONDITION) ? done(true) : requestAnimationFrame(look); look()"
        )
        self.post(f"{self.session}/execute/async", {"script": script.replace("CONDITION", condition), "args": []})

    def press(self, *names):
        """Keys one after the other; `Shift+End` holds Shift."""
        actions = []
        for name in names:
            *held, key = name.split("+")
            downs = [{"type": "keyDown", "value": KEYS[part]} for part in (*held, key)]
            actions += downs + [{"type": "keyUp", "value": down["value"]} for down in reversed(downs)]
        self.post(f"{self.session}/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def choose(self, name, value):
        self.run(
            "const field = document.getElementById(arguments[0]); field.value = arguments[1];"
            "field.dispatchEvent(new Event('change'))", name, value,
        )  # fmt: skip

    def text(self, name):
        return self.run("return document.getElementById(arguments[0]).textContent", name)

    @property
    def focused(self):
        return self.run("return document.activeElement.getAttribute('aria-label') || document.activeElement.id")


@pytest.fixture
def browser(tmp_path):
    variables = os.environ | {"HOME": str(tmp_path)}
    command = ["chromedriver", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as driver:
        try:
            line = next(line for line in driver.stdout if "successfully on port" in line)
            port = line.rsplit(" ", 1)[1].strip().rstrip(".")
            browser = Browser(f"http://127.0.0.1:{port}", tmp_path / "profile")
            yield browser
            assert [entry for entry in browser.post(f"{browser.session}/se/log", {"type": "browser"})] == []
            browser.post(browser.session, {}, "DELETE")
        finally:
            driver.terminate()


@pytest.fixture
def masks():
    """A table and offsets, both with special tokens, as long as a pixel and longer than a thumbnail."""
    table = SparseMask(torch.rand(2, 3, 150, 150) < 0.02, 150, special_tokens="first_last", diagonal=True)
    offsets = SparseMask(torch.rand(2, 3, 150) < 0.1, 150, form="offsets", special_tokens="first")
    return {"table": table, HOSTILE: offsets}


@pytest.fixture
def page(browser, masks, tmp_path):
    path = tmp_path / "report.html"
    entries = [PageMask(name, SavedMask(name, mask, None), HOSTILE, HOSTILE) for name, mask in masks.items()]
    write_page(path, entries, {Path(HOSTILE): {"mlm_loss": 1.0, "sparsity": 0.5, "positions": {}, "seconds": 1.0}})
    browser.show(path)
    browser.wait("document.getElementById('overlap').textContent")
    return browser


def test_by_keyboard(page, masks):
    assert page.run("return window.broken") is None
    page.run("document.getElementById('figure').focus()")
    page.press("Tab")
    assert page.focused.startswith("Layer 0, head 0: removed ")
    page.press("ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight")
    assert page.focused.startswith("Layer 1, head 2: removed ")
    page.press("Home", "ArrowRight", "Enter")
    assert page.run("return document.getElementById('zoom').open")
    assert page.text("zoom-title") == "table: Layer 1, head 1"
    table = masks["table"].to_table()[1, 1]
    for keys, row, column in (
        (("ArrowDown", "ArrowDown", "ArrowRight"), 2, 1),
        (("Shift+ArrowDown", "End"), 18, 149),
        (("Home", "Shift+ArrowRight"), 18, 16),
        (("ArrowRight", "ArrowRight"), 18, 18),
    ):
        page.press(*keys)
        kept = "kept" if table[row, column] else "removed"
        special = " (special token)" if {row, column} & {0, 149} else ""
        assert page.text("zoom-readout") == (
            f"Query {row}, key {column}, offset {abs(row - column)}: {kept}{special}. "
            f"Query {row} keeps {table[row].sum()} of 150 keys."
        )
    assert page.run("return document.getElementById('zoom-readout').getAttribute('aria-live')") == "polite"
    page.press("Escape")
    assert not page.run("return document.getElementById('zoom').open")
    assert page.focused.startswith("Layer 1, head 1: removed ")


@pytest.mark.parametrize("place", [0, 1], ids=["table", "offsets"])
def test_the_browser_sees_the_mask(page, masks, place):
    """Tiles that the page counts itself, and pixels of a picture with one pixel per entry, are those of the mask."""
    mask = list(masks.values())[place]
    page.choose("mask", str(place))
    page.run("document.querySelector('#grid button').click()")
    base = base_table(mask, 150)[0, 0][None]
    for side in TILES:
        page.choose("tiles", str(side))
        number = (-(-150 // side)) ** 2
        live = round(tile_shares(base, side)[0] * number)
        assert f"{live} of {number} tiles of {side} x {side} hold an entry" in page.text("zoom-facts")
    page.choose("tiles", "")
    pixels = page.run(
        "const canvas = document.querySelector('#zoom-picture canvas'); const cell = canvas.width / 150;"
        "const colors = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.width).data;"
        "return Array.from({length: 22500}, (_, place) => colors["
        "4 * (Math.floor((Math.floor(place / 150) + 0.5) * cell) * canvas.width"
        " + Math.floor((place % 150 + 0.5) * cell))])"
    )
    ink, paper = min(pixels), max(pixels)
    assert torch.equal(torch.tensor(pixels).view(150, 150) == ink, mask.to_table()[0, 0])
    assert set(pixels) == {ink, paper}


def test_two_masks_side_by_side(page, masks):
    left, right = (mask.to_table()[0, 0] for mask in masks.values())
    both, either = int((left & right).sum()), int((left | right).sum())
    text = page.text("overlap")
    assert f"{100 * both / either:.1f} %" in text and f"Of {either:,} entries" in text and f"keep {both:,}," in text
    page.choose("right-mask", "0")
    assert "Overlap (Jaccard): 100.0 %" in page.text("overlap")


@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_is_wider_than_the_window(page, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": size}
    page.post(f"{page.session}/goog/cdp/execute", command)
    page.wait(f"innerWidth === {width}")
    page.wait("document.documentElement.scrollWidth <= innerWidth")
    for theme in ("dark", "light"):
        page.choose("theme", theme)
        assert page.run("return getComputedStyle(document.documentElement).colorScheme") == theme
