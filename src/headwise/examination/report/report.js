"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") Object.assign(node.style, value);  // the page's policy forbids the attribute
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
};
const format = (x) => {
  if (x === null || x === undefined) return "–";
  const size = Math.abs(x);
  if (size !== 0 && (size < 0.001 || size >= 1e5)) return x.toExponential(1);
  return size >= 100 ? x.toFixed(0) : size >= 10 ? x.toFixed(1) : x.toFixed(3);
};
const texts = (n) => n === 1 ? "1 text" : `${n} texts`;
const meanOf = (n) => n === 1 ? "of one text" : `mean of ${n} texts`;
const tokens = ({ shortest, longest }) => shortest === longest ? `${longest} tokens` : `${shortest} to ${longest} tokens`;

// a letter says the same as the colour
const LETTERS = { "low rank": "R" };
const KINDS = Object.fromEntries(Object.entries(data.kinds).map(([kind, { colour, meaning }]) =>
  [kind, { letter: LETTERS[kind] || kind[0].toUpperCase(), colour, ink: kind === "dense" ? "#fff" : "#000", meaning }]));
// cividis, sampled: even in lightness for colour-blind readers and in print
const RAMP = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
const mix = (a, b, t) => Math.round(a + (b - a) * t);
const parse = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const ramp = (t) => {
  const place = Math.min(Math.max(t, 0), 1) * (RAMP.length - 1);
  const low = Math.floor(place), high = Math.min(low + 1, RAMP.length - 1);
  const [a, b] = [parse(RAMP[low]), parse(RAMP[high])];
  return a.map((x, i) => mix(x, b[i], place - low));
};
const MEASURES = Object.fromEntries([
  { name: "kind", label: "kind", shown: true },
  ...data.measures,
  { name: "stability", label: "stability of the kind over texts", shown: true, formula: "share of texts with this kind", meaning: "1 if the head has the same kind on every text; not known from one text." },
].map((x) => [x.name, x]));
const label = (name) => MEASURES[name].label + (MEASURES[name].unit ? ` (${MEASURES[name].unit})` : "");
const explanation = (name) => `${MEASURES[name].formula}: ${MEASURES[name].meaning}`;

let chosen = 0, measure = "kind";
const value = (record, name) =>
  name === "stability" ? record.stability : record.modes[name] ? record.modes[name].value : record.measures[name] ? record.measures[name].mean : null;
// how a value was made from the texts
const origin = (record, name) => {
  const mode = record.modes[name];
  if (mode) return `on ${mode.count} of ${texts(mode.texts)}`;
  return name === "stability" ? `judged on ${texts(record.judged)}` : meanOf(record.measures[name].texts);
};

// ---- map of heads ----
const sites = data.sites, records = data.records;
const rows = sites.map((_, s) => records.map((r, i) => [r, i]).filter(([r]) => r.site === s).map(([, i]) => i));
const short = (name) => name.replace(/^(model|encoder|transformer|bert|vit)\./, "").replace(/\.?(attention|self_attn|attn|self|SelfAttention)\b/g, "").replace(/\.$/, "") || name;

function buildMap() {
  const table = byId("map");
  const widest = Math.max(...rows.map((r) => r.length));
  const head = make("tr", {}, make("td", {}));
  for (let h = 0; h < widest; h++) head.append(make("th", { scope: "col" }, String(h)));
  table.append(make("thead", {}, head));
  const body = make("tbody");
  rows.forEach((row, s) => {
    const line = make("tr", {}, make("th", { scope: "row", title: sites[s].name }, short(sites[s].name) + (sites[s].kind === "cross" ? " (cross)" : "")));
    for (const i of row) {
      const button = make("button", { type: "button", class: "head", "data-i": i, tabindex: i === chosen ? 0 : -1, "aria-pressed": "false" });
      button.addEventListener("click", () => choose(i, true));
      line.append(make("td", {}, button));
    }
    body.append(line);
  });
  table.append(body);
  table.addEventListener("keydown", onKey);
}

function onKey(event) {
  const s = records[chosen].site, h = rows[s].indexOf(chosen);
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -h], End: [0, rows[s].length - 1 - h] };
  const move = moves[event.key];
  if (!move) return;
  event.preventDefault();
  const next = rows[Math.min(Math.max(s + move[0], 0), rows.length - 1)];
  choose(next[Math.min(Math.max(h + move[1], 0), next.length - 1)], true);
}

function paint() {
  const values = records.map((r) => value(r, measure)).filter((x) => x !== null && x !== undefined);
  const low = Math.min(...values), high = Math.max(...values);
  document.querySelectorAll("button.head").forEach((button) => {
    const record = records[button.dataset.i];
    let text, name;
    if (measure === "kind") {
      const { letter, colour, ink } = KINDS[record.kind];
      button.style.background = colour; button.style.color = ink;
      text = letter; name = record.kind;
    } else {
      const x = value(record, measure);
      if (x === null) { button.style.background = "transparent"; button.style.color = "inherit"; text = "–"; name = `${label(measure)} not known`; }
      else {
        const rgb = ramp(high > low ? (x - low) / (high - low) : 0);
        button.style.background = `rgb(${rgb})`;
        button.style.color = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] > 130 ? "#000" : "#fff";
        text = Math.abs(x) >= 100 ? x.toFixed(0) : Math.abs(x) >= 10 ? x.toFixed(0) : x.toFixed(1).replace(/^0\./, ".");
        name = `${label(measure)} ${format(x)}, ${origin(record, measure)}`;
      }
    }
    button.textContent = text;
    button.setAttribute("aria-label", `${sites[record.site].name}, head ${record.head}: ${name}`);
    button.title = `${sites[record.site].name} · head ${record.head} · ${name}`;
  });
  const legend = byId("legend");
  legend.replaceChildren();
  if (measure === "kind") {
    for (const [kind, { letter, colour, ink, meaning }] of Object.entries(KINDS)) {
      const count = records.filter((r) => r.kind === kind).length;
      if (!count) continue;
      const swatch = make("span", { class: "swatch", style: { background: colour, color: ink } }, letter);
      legend.append(make("span", { title: meaning }, swatch, `${kind} (${count}): ${meaning}`));
    }
  } else {
    legend.append(format(low), make("span", { class: "ramp", style: { background: `linear-gradient(90deg,${RAMP.join(",")})` } }), format(high), make("span", { class: "soft" }, explanation(measure)));
  }
}

// ---- one head ----
function choose(i, focus) {
  chosen = i;
  document.querySelectorAll("button.head").forEach((button) => {
    const mine = Number(button.dataset.i) === i;
    button.setAttribute("aria-pressed", String(mine));
    button.tabIndex = mine ? 0 : -1;
    if (mine && focus) button.focus({ preventScroll: false });
  });
  const record = records[i], site = sites[record.site], detail = byId("detail");
  const counts = Object.entries(record.kind_counts).map(([kind, n]) => `${kind} on ${n}`).join(", ");
  const all = data.inputs.texts, unjudged = record.judged < all ? "; the others have no spectrum to judge it by" : "";
  detail.replaceChildren(
    make("h3", {}, `${site.name} · head ${record.head}`),
    make("p", { class: "verdict" }, make("strong", {}, record.kind), `: ${record.description}.`),
    make("p", { class: "soft" }, `${site.kind}-attention${site.causal ? ", causal" : ""}, key width ${site.key_width}` +
      (site.groups < site.heads ? `, ${site.groups} key heads for ${site.heads} query heads` : "") + "."),
    make("p", { class: "soft" }, `Judged on ${record.judged} of ${texts(all)} of ${tokens(site)}: ${counts}${unjudged}. Numbers of the description: ${meanOf(record.evidence_texts)}.`),
  );
  const excerpt = (data.excerpt.sites || [])[record.site];
  if (excerpt) detail.append(...attentionMap(excerpt, record, i));
  if (record.spectrum.length) {
    detail.append(make("h3", {}, `Singular values of P, ${data.inputs.spectra_exact ? "exact" : "leading ones"}, ${meanOf(data.inputs.spectra_texts)}`), chart({ series: [{ name: "σ", points: record.spectrum.map((y, x) => [x + 1, y]) }], log: true, height: 150, x: "index", y: "σ" }));
  }
  const reach = (record.profile.length - 1) / 2;
  const near = record.profile.map((y, x) => [x - reach, y]).filter(([x]) => Math.abs(x) <= 24);
  detail.append(make("h3", {}, `Mean weight by offset, ${meanOf(all)}`), chart({ bars: near, height: 130, x: "offset (key − query)", y: "weight" }));
  detail.append(numbers(record));
}

function attentionMap(excerpt, record, i) {
  const canvas = make("canvas", { width: excerpt.columns, height: excerpt.rows, role: "img", "aria-label": `Attention of head ${record.head} on an excerpt, queries down, keys across` });
  const bytes = Uint8Array.from(atob(excerpt.maps[record.head]), (c) => c.charCodeAt(0));
  const context = canvas.getContext("2d"), image = context.createImageData(excerpt.columns, excerpt.rows);
  bytes.forEach((byte, at) => image.data.set([...ramp(byte / 255), 255], at * 4));
  context.putImageData(image, 0, 0);
  const tip = make("p", { class: "tip" }, "Queries run down, keys across; brighter cells have more weight. Point at a cell to read its tokens.");
  const words = (from, to) => {
    const list = (data.excerpt.tokens || []).slice(from, to);
    if (!list.length) return to - from > 1 ? `${from}–${to - 1}` : String(from);
    return (list.length > 6 ? [...list.slice(0, 3), "…", ...list.slice(-2)] : list).join(" ");
  };
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect();
    const column = Math.min(excerpt.columns - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * excerpt.columns)));
    const row = Math.min(excerpt.rows - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * excerpt.rows)));
    const edge = (k, cells, length) => Math.round((k * length) / cells);
    const q = [edge(row, excerpt.rows, excerpt.queries), edge(row + 1, excerpt.rows, excerpt.queries)];
    const k = [edge(column, excerpt.columns, excerpt.keys), edge(column + 1, excerpt.columns, excerpt.keys)];
    const weight = (bytes[row * excerpt.columns + column] / 255) ** 2 * excerpt.top[record.head];
    tip.textContent = `“${words(...q)}” attends to “${words(...k)}”: mean weight ${format(weight)} (tokens ${q[0]}–${q[1] - 1} × ${k[0]}–${k[1] - 1})`;
  });
  return [make("h3", {}, `Attention on the first text, ${excerpt.keys} tokens`), canvas, tip];
}

function numbers(record) {
  const table = make("table", { class: "numbers" });
  table.append(make("thead", {}, make("tr", {}, ...["measure", "texts", "mean", "std", "min", "max"].map((x) => make("th", { scope: "col" }, x)))));
  const body = make("tbody");
  const row = (name, ...cells) => body.append(make("tr", {}, make("th", { scope: "row", title: explanation(name) }, label(name)), ...cells));
  const cell = (x, attributes = {}) => make("td", attributes, x);
  for (const [name, x] of Object.entries(record.measures)) {
    // one text has no spread, and of two the range says more than a standard deviation
    const spread = x.texts < 2 ? [null, null, null] : x.texts < 3 ? [null, x.min, x.max] : [x.std, x.min, x.max];
    row(name, cell(String(x.texts)), ...[x.mean, ...spread].map((y) => cell(format(y))));
  }
  for (const [name, x] of Object.entries(record.modes)) {
    row(name, cell(String(x.texts)), cell(`${x.value}${x.texts > 1 ? ` on ${x.count} of ${texts(x.texts)}` : ""}`, { colspan: 4 }));
  }
  table.append(body);
  const note = make("p", { class: "soft" }, "Mean, sample standard deviation (from three texts on), minimum and maximum over the texts on which a number was measured; of a position, the most frequent one.");
  return make("details", {}, make("summary", {}, "All numbers"), note, make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "All numbers" }, table));
}

// ---- small charts, drawn as SVG ----
const LINE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7"], DASH = ["", "6 3", "2 3", "8 3 2 3"];
function chart({ series = [], bars = null, log = false, height = 240, x = "", y = "", ticks = null }) {
  const width = 520, left = 56, bottom = 34, top = 10, right = 12;
  const space = "http://www.w3.org/2000/svg";
  const draw = (tag, attributes, text) => {
    const node = document.createElementNS(space, tag);
    for (const [key, v] of Object.entries(attributes)) node.setAttribute(key, v);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${y} against ${x}` });
  const points = bars || series.flatMap((s) => s.points);
  const ys = points.map((p) => p[1]).filter((v) => v !== null && (!log || v > 0));
  const floor = Math.min(...ys), ceiling = Math.max(...ys);
  const range = log
    ? [Math.log10(floor), Math.log10(ceiling) + 1e-9].map((v, i) => (i ? v + 0.05 : v - 0.05))
    : [Math.min(0, floor), ceiling || 1];
  const xs = points.map((p) => p[0]), first = Math.min(...xs), last = Math.max(...xs);
  const pad = bars ? 0.5 : 0;
  const px = (v) => left + ((v - first + pad) / (last - first + 2 * pad || 1)) * (width - left - right);
  const py = (v) => {
    const t = ((log ? Math.log10(Math.max(v, floor)) : v) - range[0]) / (range[1] - range[0] || 1);
    return height - bottom - t * (height - bottom - top);
  };
  const marks = log
    ? Array.from({ length: 40 }, (_, i) => i - 30).filter((e) => e >= range[0] && e <= range[1]).map((e) => 10 ** e)
    : [0, 0.25, 0.5, 0.75, 1].map((t) => range[0] + t * (range[1] - range[0]));
  const few = marks.length > 7 ? marks.filter((_, i) => i % Math.ceil(marks.length / 6) === 0) : marks.length ? marks : [floor, ceiling];
  for (const mark of few) {
    svg.append(draw("line", { class: "axis", x1: left, x2: width - right, y1: py(mark), y2: py(mark) }));
    svg.append(draw("text", { x: left - 6, y: py(mark) + 4, "text-anchor": "end" }, log ? mark.toExponential(0) : format(mark)));
  }
  const columns = ticks || [first, Math.round((first + last) / 2), last].map((v) => [v, String(v)]);
  for (const [at, text] of columns) svg.append(draw("text", { x: px(at), y: height - bottom + 15, "text-anchor": "middle" }, text));
  svg.append(draw("text", { class: "label", x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, x));
  if (bars) {
    const wide = ((width - left - right) / (last - first + 1)) * 0.8;
    for (const [at, v] of bars) {
      const zero = py(Math.max(0, range[0])), end = py(v);
      const bar = draw("rect", { x: px(at) - wide / 2, y: Math.min(zero, end), width: wide, height: Math.max(0.5, Math.abs(zero - end)), fill: v < 0 ? "#D55E00" : "#0072B2" });
      bar.append(draw("title", {}, `${at}: ${format(v)}`));
      svg.append(bar);
    }
  }
  series.forEach((s, i) => {
    const path = s.points.filter((p) => p[1] !== null).map((p, k) => `${k ? "L" : "M"}${px(p[0])},${py(p[1])}`).join("");
    svg.append(draw("path", { d: path, fill: "none", stroke: LINE[i % 4], "stroke-width": 2, "stroke-dasharray": DASH[i % 4] }));
    for (const p of s.points) {
      const dot = draw("circle", { cx: px(p[0]), cy: py(p[1]), r: 2.5, fill: LINE[i % 4] });
      dot.append(draw("title", {}, `${s.name}, ${p[0]}: ${format(p[1])}`));
      svg.append(dot);
    }
    if (series.length > 1) {
      const at = height - bottom - 12 - (series.length - 1 - i) * 15;
      svg.append(draw("line", { x1: left + 8, x2: left + 34, y1: at - 4, y2: at - 4, stroke: LINE[i % 4], "stroke-width": 2, "stroke-dasharray": DASH[i % 4] }));
      svg.append(draw("text", { class: "label", x: left + 40, y: at }, s.name));
    }
  });
  return svg;
}

function depth() {
  const ablations = data.ablations || {}, box = byId("collapse");
  const measured = data.layers.relative_residual || [];
  const curves = ablations.supported ? Object.entries(ablations.curves) : measured.length ? [["as it is", measured]] : [];
  if (curves.length) {
    box.append(chart({ series: curves.map(([name, ys]) => ({ name, points: ys.map((y, i) => [i, y]) })), log: true, height: 300, x: "layer", y: "relative residual" }));
  }
  byId("collapse-note").textContent = ablations.supported
    ? "On one text, in float64: the model as it is, and with skip connections or MLPs switched off."
    : `${curves.length ? `The model as it is, ${meanOf(data.inputs.texts)}. ` : ""}Ablations: not measured. ${ablations.why || ""}`;
  const paths = data.paths || {};
  if (paths.supported) {
    byId("paths").append(chart({ bars: paths.share.map((y, j) => [j, y]), height: 300, x: "number of attention layers on the path", y: "share of the output" }));
    byId("paths-note").textContent = `On one text: contribution of paths of each length to the last layer; the shares add up to one (error ${format(paths.sum_error)}). Held at their values on this text: ${paths.frozen.join(", ")}.`;
  } else byId("paths-note").textContent = `Path lengths: not measured. ${paths.why || ""}`;
}

function redundancy() {
  const n = records.length, canvas = byId("redundancy"), matrix = data.redundancy;
  canvas.width = n; canvas.height = n;
  const context = canvas.getContext("2d"), image = context.createImageData(n, n), pairs = [];
  matrix.forEach((row, i) => row.forEach((x, j) => {
    image.data.set(x === null ? [128, 128, 128, 255] : [...ramp(x), 255], (i * n + j) * 4);
    if (x !== null && i < j) pairs.push([x, i, j]);
  }));
  context.putImageData(image, 0, 0);
  pairs.sort((a, b) => b[0] - a[0]);
  byId("alike-note").textContent = `Cosine between the attention matrices of two heads, on sampled query rows, ${meanOf(data.inputs.texts)}. The most similar pairs:`;
  const table = byId("alike"), name = (i) => `${short(sites[records[i].site].name)} · ${records[i].head}`;
  table.append(make("thead", {}, make("tr", {}, ...["head", "head", "cosine"].map((x) => make("th", { scope: "col" }, x)))));
  const body = make("tbody");
  for (const [x, i, j] of pairs.slice(0, 8)) body.append(make("tr", {}, make("td", {}, name(i)), make("td", {}, name(j)), make("td", {}, format(x))));
  table.append(body);
}

function provenance() {
  const box = byId("provenance"), list = { ...data.inputs, ...data.provenance };
  if (list.command) { box.append(make("pre", { tabindex: 0 }, list.command)); delete list.command; }
  const table = make("table", { class: "numbers" });
  const body = make("tbody");
  for (const [key, x] of Object.entries(list)) body.append(make("tr", {}, make("th", { scope: "row" }, key.replaceAll("_", " ")), make("td", {}, Array.isArray(x) ? x.join(", ") : String(x))));
  table.append(body);
  box.append(table);
}

// ---- plan: chosen operators and the trade-off ----
const OPERATORS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"];
function plan() {
  const found = data.plan;
  if (!found) return;
  byId("plan").hidden = false;
  const kinds = [...new Set(Object.values(found.sites).flat().map((c) => c.kind))];
  const letter = (kind) => kind[0].toUpperCase();
  const colour = (kind) => kind === "softmax" ? "var(--panel)" : OPERATORS[kinds.filter((k) => k !== "softmax").indexOf(kind) % OPERATORS.length];
  const ink = (kind) => kind === "softmax" ? "var(--ink)" : ["#0072B2"].includes(colour(kind)) ? "#fff" : "#000";
  const words = (c) => [c.kind.replaceAll("_", " "), ...Object.entries(c).filter(([k]) => k !== "kind").map(([k, v]) => `${k} ${v}`)].join(", ");
  const table = byId("plan-map"), widest = Math.max(...Object.values(found.sites).map((r) => r.length));
  table.append(make("thead", {}, make("tr", {}, make("td", {}), ...Array.from({ length: widest }, (_, h) => make("th", { scope: "col" }, String(h))))));
  const body = make("tbody");
  for (const [site, choices] of Object.entries(found.sites)) {
    const line = make("tr", {}, make("th", { scope: "row", title: site }, short(site)));
    choices.forEach((c, h) => line.append(make("td", { class: "chosen", title: `${short(site)}, head ${h}: ${words(c)}`, style: { background: colour(c.kind), color: ink(c.kind) } }, letter(c.kind))));
    body.append(line);
  }
  table.append(body);
  for (const kind of kinds) {
    const count = Object.values(found.sites).flat().filter((c) => c.kind === kind).length;
    byId("plan-legend").append(make("span", {}, make("span", { class: "swatch", style: { background: colour(kind), color: ink(kind) } }, letter(kind)), `${kind.replaceAll("_", " ")} (${count})`));
  }
  const drift = (p) => p.test === null ? p.selection : p.test;
  const counts = (found.provenance || {}).texts || [], heldOut = counts.length === 3 ? `${counts[2]} held-out ${counts[2] === 1 ? "text" : "texts"}` : "held-out texts";
  byId("plan-curve-note").textContent = `Every point is a whole plan, measured on ${heldOut}.`;
  const points = (list) => list.filter((p) => drift(p) > 0 && drift(p) < 0.6 && p.cost > 0).sort((a, b) => a.cost - b.cost).map((p) => [Math.log10(p.cost), drift(p)]);
  const series = [["chosen for each head", found.curve], ["one window", found.baselines.filter((p) => p.name.startsWith("window "))], ["one projection", found.baselines.filter((p) => p.name.startsWith("projected"))]]
    .map(([name, list]) => ({ name, points: points(list) })).filter((s) => s.points.length);
  if (series.length) {
    const xs = series.flatMap((s) => s.points.map((p) => p[0])), ticks = [0.001, 0.01, 0.03, 0.1, 0.3, 1].map((v) => [Math.log10(v), `${100 * v} %`]).filter(([v]) => v >= Math.min(...xs) && v <= Math.max(...xs));
    byId("plan-curve").append(chart({ series, log: true, height: 300, x: "attention cost, share of softmax", y: "drift", ticks }));
  }
  const here = found.curve.find((p) => Object.entries(p.sites).every(([site, row]) => row.every((i, h) => words(found.choices[i]) === words(found.sites[site][h]))));
  byId("plan-note").textContent = `Planned for ${found.length} tokens and a drift of at most ${found.tolerance} (${found.measure}).` + (here ? ` Attention costs ${format(100 * here.cost)} % of softmax; drift on ${heldOut} ${format(drift(here))}.` : " This plan was edited.");
}

function theme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").textContent = dark ? "Light" : "Dark";
  byId("theme").setAttribute("aria-label", dark ? "Use light colours" : "Use dark colours");
}

const measured = Object.values(MEASURES).filter((x) => x.name === "kind" || records.some((r) => value(r, x.name) !== null));
for (const x of [...measured.filter((x) => x.shown), ...measured.filter((x) => !x.shown)]) byId("measure").append(make("option", { value: x.name }, label(x.name)));
byId("measure").addEventListener("change", (event) => { measure = event.target.value; paint(); });
byId("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme !== "dark"));
theme(window.matchMedia("(prefers-color-scheme: dark)").matches);
buildMap(); paint(); choose(0, false); depth(); redundancy(); plan(); provenance();
