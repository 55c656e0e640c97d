"""Chromium for the tests that look at pages; skipped where there is none, unless EDGEFL_REQUIRE_CHROMIUM is set."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

#: No sandbox: CI is root in a container. The rest keeps the browser from calling home.
FLAGS = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update"


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; while it is open, its event loop is this thread's."""
    found = shutil.which("chromium")
    if found is None:
        assert not os.environ.get("EDGEFL_REQUIRE_CHROMIUM"), "chromium is not on the PATH"
        pytest.skip("chromium is not on the PATH")
    flags = [*FLAGS.split(), "--disable-sync", "--disable-quic"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=flags)
        yield browser
        browser.close()
