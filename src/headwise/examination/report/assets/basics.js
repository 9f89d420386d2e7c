"use strict";
// Elements, numbers, colours, the hover text, the theme and downloads: what every page of headwise uses.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const fill = (node, attributes, children) => {
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style")
      Object.assign(node.style, value); // the page's policy forbids the attribute
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((x) => x !== null && x !== undefined));
  return node;
};
const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const range = (n) => Array.from({ length: n }, (_, i) => i);
const known = (x) => x !== null && x !== undefined;

// ---- numbers and words ----
const format = (x, unit = "") => {
  if (!known(x)) return "–";
  if (unit === "share") return percent(x);
  const size = Math.abs(x);
  if (size !== 0 && (size < 0.001 || size >= 1e5)) return x.toExponential(1);
  if (Number.isInteger(x) && size < 1e5) return String(x);
  return size >= 100 ? x.toFixed(0) : size >= 10 ? x.toFixed(1) : size >= 1 ? x.toFixed(2) : x.toFixed(3);
};
const percent = (x) => {
  const p = 100 * x,
    size = Math.abs(p);
  return `${size === 0 ? "0" : size < 0.001 ? p.toExponential(0) : size < 0.1 ? p.toPrecision(1) : size < 10 ? p.toFixed(1) : p.toFixed(0)} %`;
};
const WORDS = { item: "text", items: "texts", unit: "token", units: "tokens", ...(data.words || {}) };
const texts = (n) => (n === 1 ? `1 ${WORDS.item}` : `${n} ${WORDS.items}`);
const meanOf = (n) => (n === 1 ? `of one ${WORDS.item}` : `mean of ${n} ${WORDS.items}`);
const lengths = ({ shortest, longest }) =>
  shortest === longest ? `${longest} ${WORDS.units}` : `${shortest} to ${longest} ${WORDS.units}`;

// ---- colours ----
const parse = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const scale = (stops) => {
  const colours = stops.map(parse);
  return (t) => {
    const place = clamp(t, 0, 1) * (colours.length - 1),
      low = Math.min(Math.floor(place), colours.length - 2);
    return colours[low].map((x, i) => Math.round(x + (colours[low + 1][i] - x) * (place - low)));
  };
};
const isDark = () => document.documentElement.dataset.theme === "dark";
// from the paper to the ink, so that much weight stands out in both themes; even in lightness, one order for all eyes
const LIGHT = scale(["#f4f7fa", "#d3e3f1", "#9fc5e3", "#5f9fd0", "#2a73b3", "#0f4a85", "#0a2a52"]);
const DARK = scale(["#1b2026", "#1c3c5a", "#23608f", "#3b8cc4", "#78b9e2", "#bfdff3", "#fdf6d8"]);
const ramp = (t) => (isDark() ? DARK : LIGHT)(t);
// less – equal – more
const diverging = (t) =>
  scale(
    isDark()
      ? ["#e69f4c", "#8a5a1c", "#262c33", "#1f6091", "#6db5ea"]
      : ["#a4500a", "#e0a067", "#eef0f2", "#7db2da", "#0b5cad"],
  )((t + 1) / 2);
// black or white, whichever has more contrast (WCAG 2)
const luminance = (rgb) =>
  rgb
    .map((x) => x / 255)
    .map((x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
const inkOn = (rgb) => (luminance(rgb) > 0.179 ? "#000" : "#fff");
const css = (rgb) => `rgb(${rgb})`;
const gradient = (colour) =>
  `linear-gradient(90deg,${range(9)
    .map((i) => css(colour(i / 8)))
    .join(",")})`;

// ---- kinds of heads: a letter says the same as the colour ----
const KINDS = data.kinds; // kind -> {colour, letter, ink, meaning}
const kindOf = (name) => KINDS[name] || { letter: "?", colour: "#777777", ink: "#fff", meaning: "" };
const swatch = (kind) =>
  make(
    "span",
    { class: "swatch", style: { background: kindOf(kind).colour, color: kindOf(kind).ink }, "aria-hidden": "true" },
    kindOf(kind).letter,
  );

// A scale for values: linear, or by rank where a linear one would give most heads one colour.
function valueScale(values) {
  const sorted = values.filter(known).sort((a, b) => a - b),
    n = sorted.length;
  const low = sorted[0],
    high = sorted[n - 1],
    linear = (x) => (high > low ? (x - low) / (high - low) : 0.5);
  const bins = range(8).map(() => 0);
  for (const x of sorted) bins[Math.min(7, Math.floor(8 * linear(x)))]++;
  const crowded = n > 4 && high > low && Math.max(...bins) > 0.4 * n;
  const below = (x) => sorted.filter((y) => y < x).length,
    upto = (x) => sorted.filter((y) => y <= x).length;
  const rank = (x) => (n > 1 ? (below(x) + upto(x) - 1) / 2 / (n - 1) : 0.5);
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((t) => [
    t,
    crowded ? sorted[Math.round(t * (n - 1))] : low + t * (high - low),
  ]);
  return { place: crowded ? rank : linear, ticks, byRank: crowded, low, high };
}

// ---- text that appears at what is pointed at or focused, and goes away again ----
const hover = make("div", { id: "hover", role: "tooltip", hidden: "" });
document.body.append(hover);
function showHover(text, x, y) {
  hover.textContent = text;
  hover.hidden = false;
  const box = hover.getBoundingClientRect(),
    edge = 8;
  hover.style.left = `${clamp(x + 12, edge, Math.max(edge, innerWidth - box.width - edge)) + scrollX}px`;
  hover.style.top = `${(y + 18 + box.height > innerHeight ? Math.max(edge, y - box.height - 12) : y + 18) + scrollY}px`;
}
const hideHover = () => {
  hover.hidden = true;
};
addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideHover();
});
addEventListener("scroll", hideHover, { passive: true });
addEventListener("pointerdown", (event) => {
  if (!event.target.closest || !event.target.closest("[data-hover]")) hideHover();
});
function explain(node, text) {
  // text, or a function of the event
  const get = (event) => (typeof text === "function" ? text(event) : text);
  const show = (event) => {
    const found = get(event);
    if (found) showHover(found, event.clientX, event.clientY);
    else hideHover();
  };
  node.setAttribute("data-hover", "");
  for (const name of ["pointerenter", "pointermove", "pointerdown"]) node.addEventListener(name, show);
  node.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "touch") hideHover();
  });
  if (typeof text !== "function") {
    node.addEventListener("focus", () => {
      if (node.matches(":focus-visible")) {
        const box = node.getBoundingClientRect();
        showHover(text, box.left, box.bottom - 12);
      }
    });
    node.addEventListener("blur", hideHover);
  }
  return node;
}

// ---- downloads ----
function save(name, content, type) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
const fileName = (text) =>
  text
    .replace(/[^\p{L}\p{N}._-]+/gu, "-")
    .replace(/^[-.]+|[-.]+$/g, "")
    .slice(0, 80) || "picture";
// A copy of an SVG that looks the same outside this page: the colours and fonts of the style sheet become attributes.
function standalone(svg) {
  const copy = svg.cloneNode(true),
    mine = [svg, ...svg.querySelectorAll("*")],
    theirs = [copy, ...copy.querySelectorAll("*")];
  mine.forEach((node, i) => {
    const style = getComputedStyle(node);
    for (const key of ["fill", "stroke", "font-size", "font-family", "font-weight", "image-rendering"])
      if (node !== svg) theirs[i].setAttribute(key, style.getPropertyValue(key));
    theirs[i].removeAttribute("class");
  });
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  fill(copy, { xmlns: "http://www.w3.org/2000/svg", width, height }, []);
  copy.prepend(
    draw("rect", { width, height, fill: getComputedStyle(document.body).getPropertyValue("--card").trim() }),
  );
  return { text: new XMLSerializer().serializeToString(copy), width, height };
}
function saveSvg(svg, name) {
  save(`${fileName(name)}.svg`, standalone(svg).text, "image/svg+xml");
}
function savePng(svg, name) {
  const { text, width, height } = standalone(svg),
    image = new Image();
  image.onload = () => {
    const canvas = make("canvas", { width: 2 * width, height: 2 * height }),
      context = canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(image, 0, 0, 2 * width, 2 * height);
    canvas.toBlob((blob) => save(`${fileName(name)}.png`, blob, "image/png"));
  };
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
}
// A figure: its title, what it shows, and buttons to keep it.
function panel(title, svg, note) {
  const keep = (word, action) =>
    make(
      "button",
      {
        type: "button",
        class: "keep",
        "aria-label": `Download as ${word}: ${title}`,
        onclick: () => action(svg, title),
      },
      word,
    );
  return make(
    "figure",
    { class: "picture" },
    make(
      "div",
      { class: "picture-head" },
      make("h3", {}, title),
      make("span", { class: "keeps" }, keep("SVG", saveSvg), keep("PNG", savePng)),
    ),
    svg,
    note ? make("figcaption", { class: "soft" }, note) : null,
  );
}
// Cells of a CSV file; a name that a spreadsheet would take for a formula is marked as text.
const csvCell = (x) => {
  if (!known(x)) return "";
  if (typeof x === "number") return String(x);
  const text = /^[=+\-@\t\r]/.test(x) ? `'${x}` : x;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};
const csv = (rows) => rows.map((row) => row.map(csvCell).join(",")).join("\r\n") + "\r\n";

// ---- theme ----
const repaint = []; // functions that draw again what depends on the theme
function theme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").textContent = dark ? "Light" : "Dark";
  byId("theme").setAttribute("aria-label", dark ? "Use light colours" : "Use dark colours");
  for (const again of repaint) again();
}
byId("theme").addEventListener("click", () => theme(!isDark()));
for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const text = button.previousElementSibling.textContent;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      getSelection().selectAllChildren(button.previousElementSibling);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => {
      button.textContent = "Copy";
    }, 1500);
  });
}
