"""Opens every page of the documentation in Chromium and complains about what it sees.

python open_site.py SITE [PICTURES]: SITE is the built folder. Each page is opened from
its file at the width of a screen and of a phone, light and dark, with the network cut
off. With PICTURES, a folder, it leaves a picture of each there.
"""

import base64
import json
import sys
import time
from pathlib import Path

from open_pages import SCHEMES, emulate, resize, start

WIDTHS = (1280, 400)

# Complaints of one page as it is shown now.
CHECKS = """
const problems = [];
const width = document.documentElement.clientWidth;
const page = document.querySelector("article");
if (!page || document.querySelectorAll("article h1").length < 1) problems.push("no h1");
if (document.documentElement.scrollWidth > width)
  problems.push(`${document.documentElement.scrollWidth} px wide in ${width} px`);
for (const image of document.querySelectorAll("article img"))
  if (!image.complete || !image.naturalWidth) problems.push(`no picture ${image.src}`);
for (const svg of document.querySelectorAll("article svg[role=img]")) {
  const own = svg.getBoundingClientRect();
  if (own.width < Math.min(300, width - 60)) problems.push(`picture ${own.width} px`);
  for (const text of svg.querySelectorAll("text")) {
    const box = text.getBoundingClientRect();
    if (box.right > own.right + 1 || box.left < own.left - 1 || box.height < 10)
      problems.push(`picture's text "${text.textContent}"`);
  }
}
const channel = (v) => v <= 10.3 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4;
const luminance = (css) => {
  const [r, g, b] = css.match(/[\\d.]+/g).map(Number);
  return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
};
const paper = luminance(getComputedStyle(document.body).backgroundColor);
for (const element of document.querySelectorAll(
    "article p, article li, article td, article svg[role=img] text:not(.on)")) {
  const style = getComputedStyle(element);
  const css = element instanceof SVGElement ? style.fill : style.color;
  const parts = css.match(/[\\d.]+/g).map(Number);
  const alpha = parts.length > 3 ? parts[3] : 1;
  const ink = alpha * luminance(css) + (1 - alpha) * paper;
  const [x, y] = ink > paper ? [ink, paper] : [paper, ink];
  if ((x + 0.05) / (y + 0.05) < 4.5) {
    problems.push(`pale text "${element.textContent.trim().slice(0, 40)}" ${css}`);
    break;
  }
}
return problems;
"""


def follows(driver, scheme: str) -> bool:
    """Whether the page takes the system's scheme, a moment after it has changed."""
    wanted = dict(light="default", dark="slate")[scheme]
    for _ in range(100):
        if wanted == driver.execute_script(
            "return document.body.getAttribute('data-md-color-scheme')"
        ):
            return True
        time.sleep(0.02)
    return False


def complaints(driver, site: Path, page: Path, pictures: Path | None) -> list[str]:
    """All complaints about a page, each with the width and scheme that showed it."""
    found, url = [], page.resolve().as_uri()
    driver.get_log("browser"), driver.get_log("performance")
    for width in WIDTHS:
        for scheme in SCHEMES:
            resize(driver, width)
            emulate(driver, scheme)
            if (width, scheme) == (WIDTHS[0], SCHEMES[0]):
                driver.get(url)
            if not follows(driver, scheme):
                found.append(f"{width} px: not shown {scheme}")
            found += [
                f"{width} px, {scheme}: {problem}"
                for problem in driver.execute_script(CHECKS)
            ]
            if pictures is not None:
                size = driver.execute_cdp_cmd("Page.getLayoutMetrics", {})
                size = size["cssContentSize"]
                clip = dict(x=0, y=0, width=width, scale=1)
                clip["height"] = min(size["height"], 12000)
                shot = driver.execute_cdp_cmd(
                    "Page.captureScreenshot",
                    {"captureBeyondViewport": True, "clip": clip},
                )
                name = f"{page.relative_to(site).with_suffix('')}-{width}-{scheme}.png"
                path = pictures / name.replace("/", "_")
                path.write_bytes(base64.b64decode(shot["data"]))
    for entry in driver.get_log("browser"):
        # From a file there is no worker for the search.
        if "search" not in entry["message"] and "Worker" not in entry["message"]:
            found.append(f"console: {entry['message']}")
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked = message["params"]["request"]["url"]
            if not asked.startswith(("file:", "data:", "blob:")):
                found.append(f"request: {asked}")
    return found


def main(folder: str, pictures: str | None = None) -> int:
    """Opens all pages; the exit status is 1 if something is wrong with any."""
    site = Path(folder)
    where = Path(pictures) if pictures else None
    if where is not None:
        where.mkdir(parents=True, exist_ok=True)
    driver, failed, opened = start(), 0, 0
    try:
        for page in sorted(site.rglob("*.html")):
            if page.name == "404.html":
                continue
            found = complaints(driver, site, page, where)
            opened += 1
            failed += len(found)
            if found:
                print(page.relative_to(site), *found[:8], sep="\n  ")
    finally:
        driver.quit()
    print(f"{opened} pages opened, {failed} complaints")
    return 1 if failed or not opened else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
