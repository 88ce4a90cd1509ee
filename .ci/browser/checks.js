// What must hold of a page of `python -m jax_ep report`, in the page itself: returns a
// list of complaints. Arguments: the ids of sections and of charts that must be there.
const [sections, charts] = arguments;
const problems = [];
const complain = (what, element) => {
  const text = element ? ` in <${element.tagName.toLowerCase()} id="${element.id}" class="` +
    `${element.getAttribute("class") || ""}">: ${element.textContent.trim().slice(0, 60)}` : "";
  problems.push(what + text);
};
const box = (element) => element.getBoundingClientRect();
const shown = (element) => element.checkVisibility({ visibilityProperty: true }) &&
  box(element).width > 0 && box(element).height > 0;

// Structure.
if (document.querySelectorAll("h1").length !== 1) complain("not exactly one h1");
if (!document.documentElement.lang) complain("no language");
if (!document.title) complain("no title");
const found = [...document.querySelectorAll("main section")].map((s) => s.id);
if (String(found) !== String(sections)) complain(`sections ${found}, expected ${sections}`);
let level = 0;
for (const heading of document.querySelectorAll("h1, h2, h3, h4")) {
  const here = Number(heading.tagName[1]);
  if (here > level + 1) complain(`heading level ${here} after ${level}`, heading);
  level = here;
  if (!shown(heading) || !heading.textContent.trim()) complain("empty heading", heading);
}
for (const link of document.querySelectorAll("a")) {
  const target = link.getAttribute("href");
  if (!target.startsWith("#") || !document.getElementById(target.slice(1)))
    complain(`link to ${target}`, link);
}

// Charts.
const drawn = [...document.querySelectorAll("svg.chart")];
const names = drawn.map((svg) => svg.id);
if (String(names) !== String(charts)) complain(`charts ${names}, expected ${charts}`);
for (const svg of drawn) {
  const own = box(svg);
  if (own.width < 250 || own.height < 40) complain("chart too small", svg);
  if (svg.getAttribute("role") !== "img" || !(svg.ariaLabel || "").includes(". "))
    complain("chart without a label", svg);
  if (![...svg.querySelectorAll("rect, line")].some((mark) => box(mark).width > 0))
    complain("empty chart", svg);
  const rows = svg.closest("figure").querySelectorAll("details tbody tr");
  if (!rows.length) complain("chart without a table", svg);
  const texts = [...svg.querySelectorAll("text")].filter(shown);
  for (const [i, text] of texts.entries()) {
    const a = box(text);
    if (a.left < own.left - 1 || a.right > own.right + 1 || a.top < own.top - 1 ||
        a.bottom > own.bottom + 1) complain("text clipped", text);
    for (const other of texts.slice(i + 1)) {
      const b = box(other);
      // Line boxes may touch; 3 pixels of them are above and below the letters.
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 6 &&
          b.top < a.bottom - 6) complain(`text over "${other.textContent}"`, text);
    }
  }
}

// Nothing wider than the window, nothing cut off.
const width = document.documentElement.clientWidth;
if (document.documentElement.scrollWidth > width)
  complain(`page ${document.documentElement.scrollWidth} px wide in ${width} px`);
for (const element of document.querySelectorAll("body *")) {
  if (element.closest(".scroll table") || element.matches(".skip") || !shown(element)) continue;
  const { left, right } = box(element);
  if (right > width + 1 || left < -1) complain(`outside the window (${left}, ${right})`, element);
  const style = getComputedStyle(element);
  if (element.matches("th, td") && element.scrollWidth > element.clientWidth + 1)
    complain("text runs out of its cell", element);
  if (style.overflowX === "hidden" && element.scrollWidth > element.clientWidth + 1 &&
      !(element instanceof SVGElement)) complain("cut off", element);
}

// Contrast (WCAG 2.2: 4.5 for text, 3 for what a chart consists of).
const channel = (value) => {
  const c = value / 255;
  return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
};
const colour = (css) => {
  const parts = css.match(/[\d.]+/g);
  return css.startsWith("rgb") && (parts.length < 4 || Number(parts[3]) > 0)
    ? parts.slice(0, 3).map(Number) : null;
};
const luminance = ([r, g, b]) =>
  0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const contrast = (a, b) => {
  const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
  return (x + 0.05) / (y + 0.05);
};
const surface = colour(getComputedStyle(document.body).backgroundColor);
const behind = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const found = colour(getComputedStyle(at).backgroundColor);
    if (found) return found;
  }
  return surface;
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !shown(element)) continue;
  const style = getComputedStyle(element);
  const isDrawn = element instanceof SVGElement;
  // Text of a chart that stands on a box has an outline in the colour of the box.
  const outline = isDrawn ? colour(style.stroke) : null;
  const ratio = contrast(colour(isDrawn ? style.fill : style.color), outline || behind(element));
  if (ratio < 4.5) complain(`contrast ${ratio.toFixed(2)} of text`, element);
}
for (const rect of document.querySelectorAll(".chart rect")) {
  // A map's lightest cells are near the paper by design: the figures are in the table.
  if (rect.getAttribute("class").startsWith("fill-heat")) continue;
  const style = getComputedStyle(rect);
  const best = Math.max(...[colour(style.fill), colour(style.stroke)].filter(Boolean)
    .map((c) => contrast(c, surface)));
  if (!(best >= 3)) complain(`contrast ${best.toFixed(2)} of a box`, rect);
}
return [...new Set(problems)];
