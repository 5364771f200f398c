"""A headless Chromium, where there is one: Debian's `chromium`, or another that lies on PATH."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.eventually import eventually

_NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60_000  # milliseconds for whatever a page is waited for: machines are shared and slow


def chromium() -> str:
    """Return the path of a Chromium; skip the test where there is none."""
    program = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no Chromium on PATH ({', '.join(_NAMES)}); `apt-get install chromium` has one")
    return program


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    """A running browser (playwright's `Browser`); skip the test where there is none."""
    path = chromium()
    from playwright.sync_api import sync_playwright  # half a second that other tests need not wait for

    with sync_playwright() as playwright:
        # The sandbox needs user namespaces, which containers often lack. The page is our own.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """One page, and everything in it that a correct page never does."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        self.context.set_default_timeout(PATIENCE)
        self.page = self.context.new_page()
        self.mistakes: list[str] = []
        self.page.on("pageerror", lambda error: self.mistakes.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.mistakes.append(dialog.message), dialog.dismiss()))
        self.page.on("console", self._on_console)
        self.page.add_init_script(
            "addEventListener('securitypolicyviolation', (event) => console.error('policy', event.violatedDirective));"
            "window.shifted = 0; new PerformanceObserver((list) => {"
            " for (const one of list.getEntries()) if (!one.hadRecentInput) window.shifted += one.value;"
            "}).observe({ type: 'layout-shift', buffered: true });"
        )

    def _on_console(self, message: Any) -> None:
        # Chromium itself logs every answer that is an error. Whether there are such answers is up to the test.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self.mistakes.append(message.text)

    def until(self, expression: str) -> None:
        """Wait until that JavaScript is true. Playwright's own way needs `eval`, which the page's policy forbids."""
        eventually(lambda: self.page.evaluate(expression), expression)

    def close(self) -> None:
        self.context.close()
