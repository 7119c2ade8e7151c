"""Opens a page in a real browser and reads what it shows and logs, in light and dark mode.

Chromium is controlled over a pipe with its DevTools protocol, so that only the browser must be
installed: ``apt-get install chromium-headless-shell`` (or chromium). ::

    with Browser() as browser:
        page = browser.open(file, width=1300, dark=True)
        assert page.overflow() == []
        page.screenshot(folder / "dark.png")
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import machine
import pytest

if TYPE_CHECKING:
    from typing_extensions import Self

NAMES: Final = (
    "chromium-headless-shell",
    "chrome-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
)
REQUIRED: Final = "DDPSAFE_REQUIRE_BROWSER"
"""Where it is set, a missing browser fails a test instead of skipping it."""

_LIMIT_S: Final = machine.hang_limit(60)

_OVERFLOW: Final = """
[...document.querySelectorAll('body *')].filter(each => {
  const box = each.getBoundingClientRect();
  if (!box.width || box.right <= document.documentElement.clientWidth + 1) return false;
  for (let at = each; at; at = at.parentElement) {
    const how = getComputedStyle(at);
    if (/auto|scroll|hidden/.test(how.overflowX) || how.position === 'fixed') return false;
    if (how.clip !== 'auto' || how.display === 'none' || how.visibility === 'hidden') return false;
  }
  return true;
}).map(each => each.tagName + ': ' + each.textContent.trim().slice(0, 60))
"""
"""Elements that reach beyond the right edge and are not in a scrollable box."""

_CONTRAST: Final = """
(() => {
  const parse = text => {
    const found = text.match(/[0-9.]+/g);
    return found && (found.length < 4 || +found[3] > 0.5) ? found.slice(0, 3).map(Number) : null;
  };
  const light = rgb => rgb.map(v => v / 255).map(
    v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4
  ).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const poor = [];
  for (const each of document.querySelectorAll('body *')) {
    const own = [...each.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !each.getClientRects().length || each.closest('svg')) continue;
    let at = each, back = null;
    while (at && !(back = parse(getComputedStyle(at).backgroundColor))) at = at.parentElement;
    const root = matchMedia('(prefers-color-scheme: dark)').matches ? [18, 18, 18] : [255, 255, 255];
    const [a, b] = [light(parse(getComputedStyle(each).color)), light(back || root)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 3) poor.push(ratio.toFixed(1) + ': ' + each.textContent.trim().slice(0, 60));
  }
  return poor;
})()
"""
"""Texts with less contrast than 3 : 1 to their background (WCAG's bound for large text)."""


def require_browser() -> str:
    """Return the command of a Chromium; without one, skip the test, or fail it where one is required."""
    found = next((found for name in NAMES if (found := shutil.which(name))), None)
    if found is None:
        reason = "needs a browser: apt-get install chromium-headless-shell"
        if os.environ.get(REQUIRED):
            pytest.fail(f"{reason} ({REQUIRED} is set)")
        pytest.skip(reason)
    return found


class Page:
    """One open page."""

    def __init__(self, browser: Browser, session: str, url: str) -> None:
        self.browser, self.session, self.url = browser, session, url

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page, as plain data."""
        told = self.browser.call(
            "Runtime.evaluate",
            {"expression": script, "returnByValue": True, "awaitPromise": True},
            session=self.session,
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def text(self) -> str:
        """Return the visible text."""
        return str(self.evaluate("document.body.innerText"))

    def overflow(self) -> list[str]:
        """Return the elements that are cut off at the right edge."""
        return list(self.evaluate(_OVERFLOW))

    def poor_contrast(self) -> list[str]:
        """Return texts that are hard to read on their background."""
        return list(self.evaluate(_CONTRAST))

    def complaints(self) -> list[str]:
        """Return what the browser logged about the page: errors, blocked and missing files."""
        return [
            text
            for event in self.browser.events
            if event.get("sessionId") == self.session
            for text in _complaint(event)
        ]

    def screenshot(self, to: Path) -> Path:
        """Save a picture of the whole page."""
        told = self.browser.call(
            "Page.captureScreenshot",
            {"format": "png", "captureBeyondViewport": True},
            session=self.session,
        )
        to.write_bytes(base64.b64decode(told["data"]))
        return to


def _complaint(event: Mapping[str, Any]) -> list[str]:
    told = event["params"]
    if event["method"] == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
        return [f"{told['entry']['text']} {told['entry'].get('url', '')}".strip()]
    if event["method"] == "Runtime.exceptionThrown":
        return [str(told["exceptionDetails"].get("text", ""))]
    if event["method"] == "Network.loadingFailed":
        return [str(told["errorText"])]
    return []


class Browser:
    """A headless browser for the duration of a ``with`` block."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._number = 0
        self._rest = b""

    def __enter__(self) -> Self:
        """Start the browser; skip the test if none is installed."""
        command = require_browser()
        self._folder = tempfile.mkdtemp(prefix="browser-")
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        arguments = [
            "--headless",
            "--no-sandbox",  # not available as root, and the pages are ddpsafe's own
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._folder}",
        ]
        # The browser reads commands from descriptor 3 and writes answers to 4.
        script = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, command, *arguments],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        return self

    def __exit__(self, *_: object) -> None:
        """End the browser with all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_LIMIT_S)
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, page: Path | str, *, width: int = 1300, dark: bool = False) -> Page:
        """Open a file or a URL in a window of that many pixels; return the page when it has loaded."""
        url = page.resolve().as_uri() if isinstance(page, Path) else page
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session=session)
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", size, session=session)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", {"features": [scheme]}, session=session)
        told = self.call("Page.navigate", {"url": url}, session=session)
        assert "errorText" not in told, f"{url}: {told['errorText']}"
        self._wait_for("Page.loadEventFired", session)
        return Page(self, session, url)

    def call(
        self, method: str, given: Mapping[str, Any] | None = None, *, session: str | None = None
    ) -> dict[str, Any]:
        """Send a command to the browser; return its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": dict(given or {})}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        limit_s = time.monotonic() + _LIMIT_S
        while True:
            answer = self._receive(limit_s)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _wait_for(self, method: str, session: str) -> None:
        limit_s = time.monotonic() + _LIMIT_S
        while not any(
            each["method"] == method and each.get("sessionId") == session for each in self.events
        ):
            self._receive(limit_s)

    def _receive(self, limit_s: float) -> dict[str, Any]:
        """Return the next message of the browser, and record it if it is an event."""
        while b"\0" not in self._rest:
            left_s = limit_s - time.monotonic()
            ready, _, _ = select.select([self._from], [], [], max(0.0, left_s))
            assert ready, f"the browser said nothing within {_LIMIT_S:g} s"
            received = os.read(self._from, 1 << 20)
            assert received, f"the browser has ended ({self._process.poll()})"
            self._rest += received
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message
