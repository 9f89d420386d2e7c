"""Parts of an examination that other commands do not time or count.

    python -m benchmarks.examine_parts importance [--length 256]    cost of `--importance` for all heads of MiniLM
    python -m benchmarks.examine_parts induction [--length 256]     induction heads of SmolLM2-135M, with their scores
    python -m benchmarks.examine_parts page [--loads 5]            size of MiniLM's page, and how fast Chromium opens i

Costs are processor time of all threads relative to the forward pass on the same texts in the same run.  A load is the
time from the start of the navigation to the `load` event, by Chromium's own clock, in a fresh tab without a cache.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch


def importance(length: int, texts: int, rounds: int) -> None:
    from headwise.examination import examine
    from headwise.examination.measure.importance import with_importance
    from headwise.models.inputs import text_input
    from headwise.models.load import load_model
    from headwise.models.run import run_model

    loaded = load_model()
    inputs = text_input(loaded, None, length=length, texts=texts)
    examined = examine(loaded.model, inputs.batches, spectra_every=0)
    forward, measured = [], []
    for _ in range(rounds):
        start = time.process_time()
        with torch.no_grad():
            for batch in inputs.batches:
                run_model(loaded.model, batch)
        middle = time.process_time()
        with_importance(examined, loaded.model, inputs.batches)
        forward.append(middle - start)
        measured.append(time.process_time() - middle)
    heads, one = len(examined.records), statistics.median(forward)
    ratios = sorted(b / a for a, b in zip(forward, measured, strict=True))
    print(
        f"all-MiniLM-L6-v2, {texts} texts of {length} tokens, {rounds} rounds: importance of {heads} heads takes "
        f"{statistics.median(measured):.2f} s of processor time, {statistics.median(ratios):.1f} × the forward pass "
        f"({ratios[0]:.1f} … {ratios[-1]:.1f}; {one:.2f} s); without each head in turn, {heads} × would be needed"
    )


def induction(length: int, texts: int) -> None:
    from headwise.examination import examine
    from headwise.models.inputs import text_input
    from headwise.models.load import load_model

    loaded = load_model("smollm2")
    inputs = text_input(loaded, None, length=length, texts=texts)
    examined = examine(loaded.model, inputs.batches, token_names=inputs.token_names, spectra_every=0)
    found = [record for record in examined.records if record.kind == "induction"]
    print(
        f"SmolLM2-135M, {texts} text(s) of {length} tokens: {len(found)} of {len(examined.records)} heads are induction"
    )
    for record in found:
        print(f"  {record.layer} head {record.head}: induction score {record.measures['induction_score'].mean:.2f}")


def page(length: int, texts: int, loads: int) -> None:
    from selenium import webdriver

    from headwise.examination import examine, report_page
    from headwise.models.inputs import text_input
    from headwise.models.load import load_model

    loaded = load_model()
    inputs = text_input(loaded, None, length=length, texts=texts)
    html = report_page(examine(loaded.model, inputs.batches, token_names=inputs.token_names)).encode()
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,800"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options, webdriver.ChromeService(executable_path=shutil.which("chromedriver")))
    seconds = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "report.html"
        path.write_bytes(html)
        for _ in range(loads):
            driver.switch_to.new_window("tab")
            driver.execute_cdp_cmd("Network.setCacheDisabled", {"cacheDisabled": True})
            driver.get(path.as_uri())
            entry = "return performance.getEntriesByType('navigation')[0].loadEventEnd"
            seconds.append(driver.execute_script(entry) / 1000)
            driver.close()
            driver.switch_to.window(driver.window_handles[0])
    driver.quit()
    each = ", ".join(f"{x:.2f}" for x in seconds)
    print(
        f"all-MiniLM-L6-v2, {texts} texts of {length} tokens: a page of {len(html) / 1e6:.2f} MB opens in "
        f"{statistics.median(seconds):.2f} s ({loads} loads: {each})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["importance", "induction", "page"])
    parser.add_argument("--length", type=int, default=256, help="tokens in each text (default: %(default)s)")
    parser.add_argument("--texts", type=int, help="number of texts (default: 4; of induction 1)")
    parser.add_argument("--loads", type=int, default=5, help="loads of the page (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of importance (default: %(default)s)")
    options = parser.parse_args()
    if options.part == "importance":
        importance(options.length, options.texts or 4, options.rounds)
    elif options.part == "induction":
        induction(options.length, options.texts or 1)
    else:
        page(options.length, options.texts or 4, options.loads)


if __name__ == "__main__":
    main()
