"""The pictures of the report in docs/images, from out/report.html: `make pictures` (needs chromium and chromedriver).

report.png 1280 wide, report-wide.png 1920, report-dark.png, report-phone.png 390, report-tokens.png, report-print.png
as the browser would print it, and comparison.png of all-MiniLM-L6-v2 and a copy with noise in one layer.
"""

from __future__ import annotations

import base64
import io
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parents[1] / "docs" / "images"


class Browser:
    def __init__(self) -> None:
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars", "--force-prefers-reduced-motion"):
            options.add_argument(argument)
        service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
        self.driver: Any = webdriver.Chrome(options=options, service=service)

    def take(
        self,
        name: str,
        page: Path,
        width: int,
        height: int,
        *,
        at: str = "",
        dark: bool = False,
        media: str = "screen",
        from_element: str | None = None,
    ) -> None:
        """A picture of `height` pixels from the top of the page, or from an element; `at`: #head to open."""
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen", "features": [scheme]})
        self.driver.get("about:blank")
        self.driver.get(page.absolute().as_uri() + at)
        if media == "print":
            self.driver.execute_script("window.dispatchEvent(new Event('beforeprint'))")
            self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        time.sleep(0.5)
        top = 0
        if from_element is not None:
            find = "return document.querySelector(arguments[0]).getBoundingClientRect().top + scrollY"
            top = self.driver.execute_script(find, from_element) - 12
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        shot = self.driver.execute_cdp_cmd(
            "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip}
        )
        save(name, base64.b64decode(shot["data"]))

    def quit(self) -> None:
        self.driver.quit()


def save(name: str, content: bytes) -> None:
    from PIL import Image

    Image.open(io.BytesIO(content)).convert("RGB").save(IMAGES / name, optimize=True)
    print(f"{name}: {(IMAGES / name).stat().st_size / 1000:.0f} kB")


def comparison(directory: Path) -> Path:
    """Six texts of 256 tokens, before and after noise in the queries of layer 4."""
    import torch

    from headwise.examination import examine, write_comparison
    from headwise.models.inputs import text_input
    from headwise.models.load import load_model

    loaded = load_model(None)
    inputs = text_input(loaded, None, length=256, texts=6)

    def examined(name: str) -> Any:
        described = {"inputs": inputs.description, "token_names": inputs.token_names}
        return examine(loaded.model, inputs.batches, name=name, spectra_every=2, **described)

    before = examined("all-MiniLM-L6-v2")
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in loaded.model.named_parameters():
            if "layer.4.attention.self.query" in name:
                weight.add_(0.5 * weight.std() * torch.randn_like(weight))
    return write_comparison(before, examined("with noise in layer 4"), directory)[0]


def main(report: Path) -> None:
    browser = Browser()
    try:
        browser.take("report.png", report, 1280, 1000)
        browser.take("report-wide.png", report, 1920, 1060)
        browser.take("report-dark.png", report, 1280, 1000, dark=True)
        browser.take("report-phone.png", report, 390, 1100, from_element="#heads")
        browser.take("report-tokens.png", report, 1280, 1060, at="#layer.2/head.9/token.20", from_element="#tokens")
        browser.take("report-print.png", report, 720, 1018, media="print")
        with tempfile.TemporaryDirectory() as directory:
            browser.take("comparison.png", comparison(Path(directory)), 1280, 1100)
    finally:
        browser.quit()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
