"""Opens the pages in Chromium and complains about what a reader would.

python open_pages.py FOLDER: FOLDER is what pages.py wrote. Each page is opened from its
file at the width of a screen and of a phone, light and dark, with the network cut off;
then broken pages are opened, each of which must be complained about.
"""

import json
import sys
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.keys import Keys

CHECKS = (Path(__file__).parent / "checks.js").read_text()
WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")

# (name, what is replaced in the page, by what, a piece of the complaint)
BROKEN = (
    ("script", "</body>", "<script>x()</script></body>", "console"),
    (
        "image",
        'img-src data:">',
        'img-src *"><img alt="" src="http://example.org/a.png">',
        "request",
    ),
    ("wide", "main, header", "main { min-width: 1400px } main, header", "px wide"),
    ("section", '<section id="padding"', '<div id="padding"', "sections"),
    ("chart", 'id="stages" role="img"', 'id="stages"', "without a label"),
    (
        "low",
        'role="img" aria',
        'role="img" style="height: 9px" aria',
        "chart too small",
    ),
    ("clipped", 'text-anchor="end"', 'text-anchor="start"', "text clipped"),
    ("over", "text.note {", "text.note { translate: 0 -42px;", "text over"),
    (
        "cell",
        ".facts th {",
        ".facts td { white-space: nowrap !important } x {",
        "its cell",
    ),
    ("pale", "--muted: #545d68", "--muted: #9aa3ad", "contrast"),
    ("pale box", "--compute: #8592a0", "--compute: #e0e0e0", "of a box"),
    ("table", "<tbody>", "<tbody hidden></tbody><tfoot>", "without a table"),
    ("dark paper", "@media screen and", "@media", "paper"),
    ("keyboard", "<summary", '<summary tabindex="-1"', "keyboard"),
)


def start() -> webdriver.Chrome:
    """Debian's Chromium, without a window or a network."""
    options = Options()
    options.binary_location = "/usr/bin/chromium"
    for flag in (
        "--headless=new",
        "--no-sandbox",  # CI is root, which Chromium's sandbox refuses.
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--host-resolver-rules=MAP * ~NOTFOUND",  # No network.
        "--disable-background-networking",
    ):
        options.add_argument(flag)
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    return webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))


def emulate(driver, scheme: str, media: str = "screen") -> None:
    """What the page is told of the screen, or the paper."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"media": media, "features": [feature]}
    )


def resize(driver, width: int) -> None:
    """The window's width in CSS pixels."""
    size = {
        "width": width,
        "height": 900,
        "deviceScaleFactor": 1,
        "mobile": width < 600,
    }
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def problems(
    driver, path: Path, expected: dict, whole: bool = True, keys: bool = True
) -> list[str]:
    """All complaints about a page, each with the width and scheme that showed it.

    Without `whole`, those of a wide and light screen alone; `keys` tries the keyboard.
    """
    url = path.resolve().as_uri()
    found = []
    driver.get_log("browser"), driver.get_log("performance")
    for width in WIDTHS if whole else WIDTHS[:1]:
        for scheme in SCHEMES if whole else SCHEMES[:1]:
            resize(driver, width)
            emulate(driver, scheme)
            if (width, scheme) == (WIDTHS[0], SCHEMES[0]):
                driver.get(url)
            for opened in (False, True) if whole else (False,):
                driver.execute_script(
                    "for (const d of document.querySelectorAll('details'))"
                    " d.open = arguments[0]",
                    opened,
                )
                found += [
                    f"{width} px, {scheme}: {problem}"
                    for problem in driver.execute_script(
                        CHECKS, expected["sections"], expected["charts"]
                    )
                ]
    found += paper(driver)
    if keys:
        found += keyboard(driver)
    found += [f"console: {entry['message']}" for entry in driver.get_log("browser")]
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked = message["params"]["request"]["url"]
            if asked != url and not asked.startswith("data:"):
                found.append(f"request: {asked}")
    return found


def paper(driver) -> list[str]:
    """Prints on white, whatever the screen is."""
    emulate(driver, "dark", media="print")
    color = driver.execute_script(
        "return getComputedStyle(document.body).backgroundColor"
    )
    emulate(driver, "light")
    return [] if color == "rgb(255, 255, 255)" else [f"paper: printed on {color}"]


def keyboard(driver) -> list[str]:
    """The first Tab offers to skip; every table opens by keys, its focus seen."""
    found = []
    driver.execute_script(
        "for (const d of document.querySelectorAll('details')) d.open = false;"
        "document.activeElement.blur(); window.scrollTo(0, 0)"
    )
    body = driver.find_element("tag name", "body")
    body.send_keys(Keys.TAB)
    if "skip" not in (driver.switch_to.active_element.get_attribute("class") or ""):
        found.append("keyboard: the first Tab is not the skip link")
    expected = driver.execute_script(
        "return document.querySelectorAll('summary').length"
    )
    seen = 0
    for _ in range(3 * expected + 20):
        active = driver.switch_to.active_element
        if active.tag_name == "summary":
            seen += 1
            if active.value_of_css_property("outline-style") == "none":
                found.append("keyboard: the focus of a summary cannot be seen")
            active.send_keys(Keys.ENTER)
        elif active.tag_name == "body" and seen:
            break
        driver.switch_to.active_element.send_keys(Keys.TAB)
    opened = driver.execute_script(
        "return document.querySelectorAll('details[open]').length"
    )
    if not seen == opened == expected:
        found.append(
            f"keyboard: {expected} tables, {seen} reached by Tab, {opened} opened by "
            "Enter"
        )
    return found


def main(folder: str) -> int:
    """Opens all pages; the exit status is 1 if something is wrong with any."""
    began = time.monotonic()
    pages = json.loads((Path(folder) / "pages.json").read_text())
    driver = start()
    failed = 0
    try:
        for name, expected in pages.items():
            found = problems(driver, Path(folder) / f"{name}.html", expected)
            failed += len(found)
            at = f"{time.monotonic() - began:.0f} s"
            print(
                f"{name}: {len(found) or 'no'} complaints, {at}",
                *found[:20],
                sep="\n  ",
            )
        whole = (Path(folder) / "gpus.html").read_text()
        for name, old, new, complaint in BROKEN:
            if old not in whole:
                failed += 1
                print(f"broken page {name!r}: the page has no {old!r} to replace")
                continue
            path = Path(folder) / "broken.html"
            path.write_text(whole.replace(old, new))
            keys = complaint == "keyboard"
            found = problems(driver, path, pages["gpus"], whole=False, keys=keys)
            if not any(complaint in problem for problem in found):
                failed += 1
                print(
                    f"broken page {name!r}: no complaint about {complaint!r}", found[:5]
                )
    finally:
        driver.quit()
    print(f"{time.monotonic() - began:.0f} s in the browser")
    print(
        f"{len(pages) + len(BROKEN) - min(failed, 1)} passed, {min(failed, 1)} failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
