"""The report as one picture, where a Chromium is found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
WIDTH = 1040
TALLEST = 16_000  # pixels: beyond it browsers draw nothing
_SECONDS = 60
# In a copy of the page alone: the report itself has no scripts.
_HEIGHT = "<script>document.title = 'height ' + document.documentElement.scrollHeight</script>"


def browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def headless(found: str, page: Path | str, *options: str, width: int = WIDTH, height: int = 1000) -> str:
    """What `found` prints when it has loaded `page`, a file or a URL, in a profile of its own."""
    with tempfile.TemporaryDirectory() as profile:
        # Its sandbox does not start for root, as in a container; the page is our own.
        root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        command = [found, "--headless", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}", *root]
        command += [
            f"--window-size={width},{height}",
            *options,
            page.resolve().as_uri() if isinstance(page, Path) else page,
        ]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=_SECONDS, check=True)
    return done.stdout


def png(html_path: Path, png_path: Path) -> str | None:
    """Draw the page at `html_path` into `png_path`; else a sentence that says why not."""
    found = browser()
    if found is None:
        return f"No picture: none of {', '.join(BROWSERS)} is on the path."
    png_path.unlink(missing_ok=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "page.html"
            text = html_path.read_text("utf-8")
            copy.write_text(text.replace("</body>", f"{_HEIGHT}</body>"), "utf-8")
            height = re.search(r"<title>height (\d+)</title>", headless(found, copy, "--dump-dom"))
        tall = min(int(height[1]), TALLEST) if height else 4000
        headless(found, html_path, f"--screenshot={png_path.resolve()}", height=tall)
    except (OSError, subprocess.SubprocessError) as error:
        return f"No picture: {Path(found).name} failed ({type(error).__name__})."
    return None if png_path.is_file() else f"No picture: {Path(found).name} wrote none."
