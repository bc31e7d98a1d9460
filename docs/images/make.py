"""Make the pictures of README.md from an experiment: `python docs/images/make.py EXP`.

EXP is the one that `bash egs/mini/run.sh` made. Needs Chromium or Chrome (Debian: apt install
chromium) and Pillow, which matplotlib brings.
"""

import argparse
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
WIDTH = (
    900  # of a README on GitHub; pictures have twice as many pixels, for sharp screens
)


def photograph(browser: str, url: str, out: Path, *, size: tuple[int, int]) -> None:
    """Write a picture of a page."""
    with tempfile.TemporaryDirectory() as scratch:
        png = Path(scratch) / "page.png"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += [
            f"--window-size={size[0]},{size[1]}",
            "--force-device-scale-factor=2",
        ]
        options += ["--virtual-time-budget=20000", f"--user-data-dir={scratch}/user"]
        command = [browser, *options, f"--screenshot={png}", url]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        shrink(png, out)


def shrink(png: Path, out: Path) -> None:
    """Copy a picture with a palette, which takes a quarter of the space."""
    Image.open(png).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(
        out, optimize=True
    )


def photograph_tensorboard(browser: str, exp: Path, out: Path) -> None:
    """Start TensorBoard on a free port, and write a picture of its scalars."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = ["-m", "tensorboard.main", "--logdir", exp.name, "--port", str(port)]
    server = subprocess.Popen(
        [sys.executable, *words], cwd=exp.parent, stderr=subprocess.DEVNULL
    )  # the page shows --logdir
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("localhost", port)) == 0:
                    break
            time.sleep(0.5)
        # The tab SCALARS; curves of the tab TIME SERIES need a GPU.
        shown = "accuracy%7Closs%7Ctrain/lr%7Ceer&_smoothingWeight=0"
        url = f"http://localhost:{port}/?darkMode=false#scalars&tagFilter={shown}"
        photograph(browser, url, out, size=(1000, 750))
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    """Write report.png, det.png and tensorboard.png beside this file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("exp", metavar="EXP", type=Path, help="experiment of egs/mini")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), "chromium")
    parser.add_argument(
        "--browser", default=found, help=f"Chromium or Chrome (default: {found})"
    )
    args = parser.parse_args()
    exp = args.exp.resolve()
    page = (exp / "report.html").as_uri()
    photograph(args.browser, page, HERE / "report.png", size=(WIDTH, 1100))
    shrink(exp / "scores/test_trials_det.png", HERE / "det.png")
    photograph_tensorboard(args.browser, exp, HERE / "tensorboard.png")


if __name__ == "__main__":
    main()
