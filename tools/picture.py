"""`make picture`: the top of a report over made-up numbers -> docs/report.png, by a headless Chromium.

Look at the picture before you commit it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "report.png"
# Until below the timelines of one global batch; the font of another machine may move that by some lines.
SIZE = "1000,1085"
# So many, chosen for those that are rare too, look like all colours of the page in a quarter of the bytes.
COLOURS = 96


def main() -> None:
    """Makes the page and takes its picture.

    Raises:
        SystemExit: this machine has no Chromium.
        subprocess.CalledProcessError: the page or the picture could not be made.
    """
    browser = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    if browser is None:
        sys.exit("error: there is no `chromium`; install it, or name another: `CHROMIUM=...`")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        example = ["-p", "dflop-report", "--example", "sample_page", "--", str(folder)]
        subprocess.run(["cargo", "run", "--release", "--locked", "--quiet", *example], cwd=ROOT, check=True)
        raw = folder / "raw.png"
        ask = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        ask += [
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={SIZE}",
            "--virtual-time-budget=5000",
        ]
        page = (folder / "sample_report.html").as_uri()
        subprocess.run([*ask, f"--screenshot={raw}", page], check=True, capture_output=True)
        picture = (
            Image.open(raw)
            .convert("RGB")
            .quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        )
        picture.save(PICTURE, optimize=True)
    print(f"wrote {PICTURE.relative_to(ROOT)}, {PICTURE.stat().st_size / 1e3:.0f} kB: look at it")


if __name__ == "__main__":
    main()
