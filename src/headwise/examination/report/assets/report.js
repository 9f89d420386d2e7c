// The page of one examination: advice, map, table, one head, its tokens, depth, similar heads, plan.
const sites = data.sites, records = data.records;
const rows = sites.map((_, s) => records.map((r, i) => [r, i]).filter(([r]) => r.site === s).map(([, i]) => i));
const siteLabel = (s) => sites[s].label;
const headLabel = (i) => `${siteLabel(records[i].site)} · ${records[i].head}`;
const headName = (i) => `${siteLabel(records[i].site)} · head ${records[i].head}`;
let chosen = data.telling[0] || 0, measure = "kind";

// ---- measures ----
const stability = { name: "stability", label: "stability of the kind", group: "Kind", unit: "share", formula: `share of ${WORDS.items} with this kind`, meaning: `1 if the head has the same kind on every ${WORDS.item}; not known from one.` };
const MEASURES = Object.fromEntries([...data.measures, stability].map((x) => [x.name, x]));
const unitLabel = (name) => MEASURES[name].label + (MEASURES[name].unit ? ` (${MEASURES[name].unit})` : "");
const explanation = (name) => `${MEASURES[name].formula}: ${MEASURES[name].meaning}`;
const STATISTICS = { mean: 0, std: 1, min: 2, max: 3, texts: 4 };  // as stored
const value = (record, name) => {
  if (name === "stability") return record.stability;
  return record.modes[name] ? record.modes[name].value : record.measures[name] ? record.measures[name][STATISTICS.mean] : null;
};
// how a value was made from the texts
const origin = (record, name) => {
  const mode = record.modes[name];
  if (mode) return `on ${mode.count} of ${texts(mode.texts)}`;
  return name === "stability" ? `judged on ${texts(record.judged)}` : meanOf(record.measures[name][STATISTICS.texts]);
};
const measured = Object.values(MEASURES).filter((x) => records.some((r) => known(value(r, x.name))));

// ---- addresses of heads ----
const address = (i) => `#${encodeURIComponent(siteLabel(records[i].site))}/head.${records[i].head}`;
function findAddress(hash) {
  const parts = /^#(.+)\/head\.(\d+)(?:\/token\.(\d+))?$/.exec(hash);
  if (!parts) return null;
  let name = parts[1];
  try { name = decodeURIComponent(name); } catch { /* as it stands */ }
  const s = sites.findIndex((x) => x.label === name || x.name === name);
  const i = s < 0 ? undefined : rows[s].find((j) => records[j].head === Number(parts[2]));
  return i === undefined ? null : { head: i, token: parts[3] === undefined ? null : Number(parts[3]) };
}

// ---- map of heads ----
function mapTable(table, cell) {
  const widest = Math.max(...rows.map((r) => r.length));
  table.append(make("thead", {}, make("tr", {}, make("td", {}, make("span", { class: "corner" }, "head →")), ...range(widest).map((h) => make("th", { scope: "col" }, String(h))))));
  table.append(make("tbody", {}, ...rows.map((row, s) => make("tr", {},
    make("th", { scope: "row", title: sites[s].name }, siteLabel(s) + (sites[s].kind === "cross" ? " (cross)" : "")), ...row.map(cell)))));
}
function buildMap() {
  const table = byId("map");
  mapTable(table, (i) => make("td", {}, explain(make("button", { type: "button", class: "head", "data-i": i, tabindex: i === chosen ? 0 : -1, "aria-pressed": "false", onclick: () => choose(i, { show: true }) }),
    () => (measure === "kind" ? `${headName(i)}: ${records[i].kind} – ${records[i].description}` : `${headName(i)}: ${cellText(i)}`))));
  table.addEventListener("keydown", (event) => {
    const s = records[chosen].site, h = rows[s].indexOf(chosen);
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -h], End: [0, rows[s].length - 1 - h] }[event.key];
    if (!move) return;
    event.preventDefault();
    const next = rows[clamp(s + move[0], 0, rows.length - 1)];
    choose(next[clamp(h + move[1], 0, next.length - 1)], { focus: true, replace: true });
  });
  const select = byId("measure"), groups = new Map([["Kind", [{ name: "kind", label: "kind" }]]]);
  for (const x of measured) groups.set(x.group, [...(groups.get(x.group) || []), x]);
  for (const [group, list] of groups) select.append(make("optgroup", { label: group }, ...list.map((x) => make("option", { value: x.name }, x.name === "kind" ? "kind" : unitLabel(x.name)))));
  select.addEventListener("change", () => { measure = select.value; paint(); });
}
const cellText = (i) => {
  const x = value(records[i], measure);
  return known(x) ? `${MEASURES[measure].label} ${format(x, MEASURES[measure].unit)}, ${origin(records[i], measure)}` : `${MEASURES[measure].label} not known`;
};
const tiny = (x, unit) => {
  if (unit === "share") return Math.abs(x) < 0.0995 && x !== 0 ? (100 * x).toFixed(Math.abs(x) < 0.01 ? 1 : 0).replace(/^0\./, ".") : (100 * x).toFixed(0);
  return Math.abs(x) >= 1e4 ? x.toExponential(0).replace("e+", "e") : Math.abs(x) >= 10 ? x.toFixed(0) : x.toFixed(1).replace(/^(-?)0\./, "$1.");
};
function paint() {
  const values = measure === "kind" ? [] : records.map((r) => value(r, measure)), tones = valueScale(values);
  for (const button of document.querySelectorAll("button.head")) {
    const i = Number(button.dataset.i), record = records[i], x = values[i];
    let text, name = record.kind;
    if (measure === "kind") {
      const { letter, colour, ink } = kindOf(record.kind);
      Object.assign(button.style, { background: colour, color: ink });
      text = letter;
    } else {
      name = cellText(i);
      const rgb = known(x) ? ramp(tones.place(x)) : null;
      Object.assign(button.style, rgb ? { background: css(rgb), color: inkOn(rgb) } : { background: "transparent", color: "inherit" });
      text = known(x) ? tiny(x, MEASURES[measure].unit) : "–";
    }
    button.textContent = text;
    button.setAttribute("aria-label", `${sites[record.site].name}, head ${record.head}: ${name}`);
  }
  const legend = byId("legend");
  legend.replaceChildren();
  if (measure === "kind") {
    for (const [kind, { meaning }] of Object.entries(KINDS)) {
      const count = records.filter((r) => r.kind === kind).length;
      if (count) legend.append(make("div", { class: "entry" }, swatch(kind), make("span", {}, make("strong", {}, kind), ` ${count}`, make("span", { class: "soft" }, ` – ${meaning}`))));
    }
    return;
  }
  const { unit } = MEASURES[measure];
  legend.append(
    make("div", { class: "bar" }, make("div", { class: "ramp", style: { background: gradient(ramp) } }),
      make("div", { class: "ticks" }, ...tones.ticks.map(([, x]) => make("span", {}, format(x, unit))))),
    make("p", { class: "soft" }, `${unitLabel(measure)}${tones.byRank ? "; colours by rank, so that heads can be told apart: least, lower quartile, median, upper quartile and largest value" : ""}. ${explanation(measure)}`));
}

// ---- table of heads ----
const kindCell = (i) => [swatch(records[i].kind), records[i].kind, ...(records[i].traits || []).map((x) => make("span", { class: "trait" }, x))];
const columns = [
  { name: "layer", label: "layer", group: "Head", left: true, ascending: true, value: (i) => siteLabel(records[i].site), number: (i) => records[i].site, meaning: "The place in the model that computes attention, in the order of computation." },
  { name: "head", label: "head", group: "Head", ascending: true, value: (i) => records[i].head, meaning: "Number of the head in its layer, from 0." },
  { name: "kind", label: "kind", group: "Kind", left: true, value: (i) => [records[i].kind, ...(records[i].traits || [])].join(" + "), show: kindCell, meaning: `The first rule that fits the head on most ${WORDS.items}, and what else holds of it.` },
  { name: "description", label: "in words", group: "Kind", left: true, value: (i) => records[i].description, meaning: "The kind in one sentence." },
  ...measured.map((x) => ({ name: x.name, label: x.label, heading: x.heading, unit: x.unit, group: x.group, value: (i) => value(records[i], x.name), meaning: `${x.label} = ${x.formula}: ${x.meaning}` })),
];
let table;
function buildTable() {
  table = headTable({
    table: byId("table"), count: records.length, columns, shown: ["layer", "head", "kind", ...data.columns],
    choose: (i, replace) => choose(i, { replace }),
    changed: (found) => {
      byId("count").textContent = found.length === records.length ? `${found.length} heads` : `${found.length} of ${records.length} heads`;
      const these = new Set(found);
      for (const button of document.querySelectorAll("button.head")) button.classList.toggle("faint", !these.has(Number(button.dataset.i)));
    },
  });
  table.render();
  byId("filter").addEventListener("input", (event) => table.filter(event.target.value));
  byId("csv").addEventListener("click", () => save(`${fileName(data.model.name)}-heads.csv`, csv(table.cells()), "text/csv"));
  columnChooser(byId("columns"), table, columns);
}

// ---- one head ----
function choose(i, { focus = false, replace = false, show = false, keep = false } = {}) {
  chosen = i;
  for (const button of document.querySelectorAll("button.head")) {
    const mine = Number(button.dataset.i) === i;
    button.setAttribute("aria-pressed", String(mine));
    button.tabIndex = mine ? 0 : -1;
    if (mine && focus) button.focus();
  }
  table.select(i, true);
  if (!keep) history[replace ? "replaceState" : "pushState"](null, "", address(i));
  drawHead();
  drawTokens();
  drawSimilarTo();
  // on a narrow screen the head is below the map: bring it into view
  if (show && byId("detail").getBoundingClientRect().top > innerHeight - 160) byId("detail").scrollIntoView({ block: "start" });
}
addEventListener("popstate", () => follow());
function follow() {
  const found = findAddress(location.hash);
  if (!found) return false;
  if (known(found.token)) token = found.token;
  choose(found.head, { keep: true });
  return true;
}
for (const link of document.querySelectorAll("a.chip")) {
  link.addEventListener("click", (event) => {
    const found = findAddress(link.getAttribute("href"));
    if (!found) return;
    event.preventDefault();
    choose(found.head);
    byId("heads").scrollIntoView({ block: "start" });
  });
}

function drawHead() {
  const record = records[chosen], site = sites[record.site], all = data.inputs.texts;
  const counts = Object.entries(record.kind_counts).map(([kind, n]) => `${kind} on ${n}`).join(", ");
  const unjudged = record.judged < all ? "; the others have no spectrum to judge it by" : "";
  const step = (by) => choose((chosen + by + records.length) % records.length, { replace: true });
  const words = make("div", { class: "words" },
    make("p", { class: "verdict" }, swatch(record.kind), make("strong", {}, record.kind), ...(record.traits || []).map((x) => make("span", { class: "trait" }, x)), `: ${record.description}.`),
    make("p", { class: "soft" }, `Judged on ${record.judged} of ${texts(all)} of ${lengths(site)}: ${counts}${unjudged}. Numbers of the sentence: ${meanOf(record.evidence_texts)}.`),
    make("p", { class: "soft" }, `${sites[record.site].name}: ${site.kind}-attention${site.causal ? ", causal" : ""}, key width ${site.key_width}${site.groups < site.heads ? `, ${site.groups} key heads for ${site.heads} query heads` : ""}.`),
    kindsByLength(), ranks(record));
  const detail = byId("detail"), open = detail.querySelector("details[open]") !== null, pictures = [];
  if (EXCERPT) {
    const found = EXCERPT.sites[record.site];
    pictures.push(panel(`Attention of ${headLabel(chosen)} on ${excerptName()}, ${found.keys} ${WORDS.units}`,
      overview(record.site, record.head, { size: 300, pick: (r, c) => moveWindow(edge(r, found.rows, found.queries), edge(c, found.columns, found.keys)) }),
      found.rows < found.queries || found.columns < found.keys ? `A cell is the mean of about ${Math.round(found.queries / found.rows)} × ${Math.round(found.keys / found.columns)} ${WORDS.units}; single ${WORDS.units} are below. Click to look there.` : "Click to look closer below."));
  }
  const reach = (record.profile.length - 1) / 2, near = record.profile.map((y, x) => [x - reach, y]).filter(([x]) => Math.abs(x) <= 24);
  pictures.push(make("div", { class: "stack" },
    panel(`Mean weight by offset, ${meanOf(all)}`, chart({ bars: near, height: 170, x: "offset (key − query)", y: "weight", unit: "share", ticks: [-24, -12, 0, 12, 24].map((v) => [v, String(v)]) })),
    record.spectrum.length ? panel(`Singular values of P, ${data.inputs.spectra_exact ? "exact" : "approximate"}, ${meanOf(data.inputs.spectra_texts)}`,
      chart({ series: [{ points: record.spectrum.map((y, x) => [x + 1, y]) }], log: true, height: 170, x: "index", y: "σ" })) : make("p", { class: "soft" }, "Singular values were not measured.")));
  detail.replaceChildren(
    make("div", { class: "detail-head" }, make("h3", { id: "detail-title" }, headName(chosen)),
      make("span", { class: "steps" }, make("button", { type: "button", onclick: () => step(-1), "aria-label": "Previous head" }, "‹"), make("button", { type: "button", onclick: () => step(1), "aria-label": "Next head" }, "›"),
        make("a", { class: "to-map", href: "#heads", onclick: (event) => { event.preventDefault(); byId("heads").scrollIntoView(); } }, "map ↑"))),
    make("div", { class: "columns" }, words, ...pictures), numbers(record));
  detail.querySelector("details").open = open;
}
const excerptName = () => (EXCERPT.own ? `your ${WORDS.item}` : `the first ${WORDS.item}`);
function kindsByLength() {
  const found = data.by_length;
  if (!found || !(found.lengths || []).length) return null;
  return make("table", { class: "lengths" }, make("caption", {}, "Kind by length"),
    make("tbody", {}, ...found.lengths.map((n, k) => make("tr", {}, make("th", { scope: "row" }, `${n} ${WORDS.units}`), make("td", {}, swatch(found.kinds[k][chosen]), found.kinds[k][chosen])))));
}
// where the head stands among all heads, for the measures of the table
function ranks(record) {
  const list = make("div", { class: "ranks" });
  for (const name of data.columns.filter((x) => known(value(record, x)))) {
    const values = records.map((r) => value(r, name)).filter(known), low = Math.min(...values), high = Math.max(...values), unit = MEASURES[name].unit;
    const place = (x) => 4 + 152 * (high > low ? (x - low) / (high - low) : 0.5);
    const strip = draw("svg", { viewBox: "0 0 160 16", class: "strip", "aria-hidden": "true" }, ...values.map((x) => draw("line", { x1: place(x), x2: place(x), y1: 4, y2: 12 })), draw("circle", { cx: place(value(record, name)), cy: 8, r: 5 }));
    list.append(explain(make("div", { class: "rank" }, make("span", {}, MEASURES[name].heading), strip, make("span", { class: "figure" }, format(value(record, name), unit) + (unit && unit !== "share" ? ` ${unit}` : ""))),
      () => `${explanation(name)} Here ${format(value(record, name), unit)}, ${origin(record, name)}; all heads: ${format(low, unit)} to ${format(high, unit)}.`));
  }
  return list;
}
function numbers(record) {
  const body = make("tbody"), cell = (x, attributes = {}) => make("td", attributes, x);
  const row = (name, ...cells) => body.append(make("tr", {}, make("th", { scope: "row" }, explain(make("span", { tabindex: 0 }, unitLabel(name)), explanation(name))), ...cells));
  for (const [name, x] of Object.entries(record.measures)) {
    const [mean, std, min, max, count] = x, unit = MEASURES[name].unit;
    // one text has no spread, and of two the range says more than a standard deviation
    const spread = count < 2 ? [null, null, null] : count < 3 ? [null, min, max] : [std, min, max];
    row(name, cell(String(count)), ...[mean, ...spread].map((y) => cell(format(y, unit))));
  }
  for (const [name, x] of Object.entries(record.modes)) row(name, cell(String(x.texts)), cell(`${x.value}${x.texts > 1 ? ` on ${x.count} of ${texts(x.texts)}` : ""}`, { colspan: 4 }));
  return make("details", { class: "all-numbers" }, make("summary", {}, "All numbers of this head"),
    make("p", { class: "soft" }, `Mean, sample standard deviation (from three ${WORDS.items} on), minimum and maximum over the ${WORDS.items} on which a number was measured; of a position, the most frequent one.`),
    make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "All numbers" }, make("table", { class: "numbers" }, make("thead", {}, make("tr", {}, ...["measure", WORDS.items, "mean", "std", "min", "max"].map((x) => make("th", { scope: "col" }, x)))), body)));
}

// ---- tokens ----
let token = null, start = { q: 0, k: 0 }, everyLayer = records.length <= 160;
const windowSize = () => Number(byId("size").value);
function moveWindow(q, k) {
  const half = Math.floor(windowSize() / 2);
  token = q;
  start = { q: q - half, k: k - half };
  drawTokens();
  byId("tokens").scrollIntoView({ block: "start" });
}
const addressToken = () => history.replaceState(null, "", `${address(chosen)}/token.${token}`);
function setToken(at) { token = at; addressToken(); drawTokens(); }
function buildTokens() {
  if (!EXCERPT) { byId("tokens-section").hidden = true; return; }
  for (const id of ["from", "size"]) byId(id).addEventListener("input", () => {
    const q = Number(byId("from").value);
    start = { q, k: q };
    drawTokens();
  });
  if (isNarrow()) byId("size").value = "16";
  byId("layer-choice").append(...sites.map((_, s) => make("option", { value: s }, siteLabel(s))));
  byId("layer-choice").addEventListener("change", (event) => choose(rows[Number(event.target.value)][0]));
  byId("scope").value = everyLayer ? "all" : "layer";
  byId("scope").addEventListener("change", (event) => { everyLayer = event.target.value === "all"; drawTokens(); });
  const site = EXCERPT.sites[0], cells = site.rows < site.queries || site.columns < site.keys;
  byId("left-out").textContent = (EXCERPT.threshold === undefined
    ? `Every weight between two ${WORDS.units} of ${excerptName()} is stored, with 8 bits.`
    : `Stored of ${excerptName()}, with 8 bits: every weight above ${percent(EXCERPT.threshold)}${EXCERPT.linked < site.queries ? ` of the first ${EXCERPT.linked} queries` : ""}; smaller ones are left out and shown by the mean of their cell${cells ? ` (about ${Math.round(site.queries / site.rows)} × ${Math.round(site.keys / site.columns)} ${WORDS.units})` : ""}.`)
    + (data.inputs.kind === "text" || !data.inputs.kind ? " To look at a sentence of your own: headwise examine --excerpt \"…\"." : "");
}
function drawTokens() {
  if (!EXCERPT) return;
  const { site: s, head: h } = records[chosen], site = EXCERPT.sites[s], size = windowSize(), names = ATTENTION.tokenNames(site);
  const limit = Math.max(0, site.queries - size), limitKeys = Math.max(0, site.keys - size);
  if (token === null || token >= site.queries) token = Math.min(site.queries - 1, Math.max(1, Math.floor(Math.min(size, site.queries) / 3)));
  start = { q: clamp(start.q, 0, limit), k: clamp(start.k, 0, limitKeys) };
  byId("from").max = Math.max(limit, limitKeys);
  byId("from").value = start.q;
  byId("from").disabled = limit === 0 && limitKeys === 0;
  const last = (from, length) => Math.min(from + size, length) - 1;
  byId("where").textContent = `queries ${start.q}–${last(start.q, site.queries)}, keys ${start.k}–${last(start.k, site.keys)} of ${site.keys}`;
  byId("layer-choice").value = s;
  byId("multiples").replaceChildren(...rows[s].map((i) => make("button", { type: "button", class: "thumb", "aria-pressed": String(i === chosen), "aria-label": `${headName(i)}: ${records[i].kind}`, onclick: () => choose(i) },
    make("img", { src: thumbnail(s, records[i].head), alt: "" }), make("span", {}, `${records[i].head} `, swatch(records[i].kind)))));
  const weights = ATTENTION.weights(s, h, token), peak = Math.max(...weights);
  byId("window").replaceChildren(panel(`${headLabel(chosen)} between single ${WORDS.units}`, windowMap(s, h, start.q, start.k, size, token, (q) => setToken(q)), `Choose a query in the picture or in the ${names.queries.length ? "text" : "grid"}.`));
  byId("reading").replaceChildren(reading(site, names, weights, peak), strongest(s, names, weights));
  const heads = (everyLayer ? range(records.length) : rows[s]).map((i) => ({ index: i, site: records[i].site, head: records[i].head, label: everyLayer ? siteLabel(records[i].site) : String(records[i].head), full: headName(i) }));
  byId("every").replaceChildren(panel(`Where ${nameToken(names.queries, token)} attends, in every head${everyLayer ? "" : ` of ${siteLabel(s)}`}`,
    everyHead(token, start.k, size, heads, names.keys, chosen, (i) => choose(i)), "A row for each head, in the order of the layers; click one to choose it."));
}
// The text of the window, shaded by what the chosen token attends to; images as a grid of patches.
function reading(site, names, weights, peak) {
  const self = site.queries === site.keys && !site.query_tokens, size = windowSize();
  const grid = names.keys.map((x) => /^(\d+)\s*,\s*(\d+)$/.exec(x)), patches = grid.filter(Boolean).length > 3 && grid.filter((x) => !x).length <= 5;
  const shade = (j) => { const rgb = ramp(Math.sqrt(weights[j] / peak)); return { background: css(rgb), color: inkOn(rgb) }; };
  const button = (names, j, options = {}) => explain(make("button", { type: "button", class: "token", "aria-label": `${nameToken(names, j)}${options.query ? ", query" : `: weight ${percent(weights[j])}`}`, ...(options.query ? { "aria-pressed": String(j === token) } : { style: shade(j) }), ...(self ? { "aria-pressed": String(j === token) } : {}), onclick: () => { if (self || options.query) setToken(j); } },
    options.text === undefined ? (names.length ? shortToken(names[j], 24) : String(j)) : options.text), () => (options.query ? nameToken(names, j) : `${nameToken(names, token, j)} → ${nameToken(names, j)}: ${percent(weights[j])}`));
  const part = (from, length) => range(length).filter((j) => j >= from && j < from + size);
  const box = make("div", { class: "reading" });
  const head = make("h3", {}, `Where ${nameToken(names.queries, token)} attends`);
  if (patches) {
    const across = 1 + Math.max(...grid.filter(Boolean).map((x) => Number(x[2])));
    const field = make("div", { class: "patches", style: { gridTemplateColumns: `repeat(${across}, 1fr)` } });
    grid.forEach((x, j) => { if (x) { const cell = button(names.keys, j, { text: "" }); Object.assign(cell.style, { gridRow: Number(x[1]) + 1, gridColumn: Number(x[2]) + 1 }); field.append(cell); } });
    box.append(head, make("p", { class: "text" }, ...grid.flatMap((x, j) => (x ? [] : [button(names.keys, j)]))), field);
  } else if (self) box.append(head, make("p", { class: "text" }, ...part(start.k, site.keys).map((j) => button(names.keys, j))));
  else box.append(head, make("h4", {}, "Queries"), make("p", { class: "text" }, ...part(start.q, site.queries).map((j) => button(names.queries, j, { query: true }))), make("h4", {}, "Keys"), make("p", { class: "text" }, ...part(start.k, site.keys).map((j) => button(names.keys, j))));
  return box;
}
function strongest(s, names, weights) {
  const order = range(weights.length).sort((a, b) => weights[b] - weights[a]).filter((j) => ATTENTION.exact(s, token, weights[j])).slice(0, 8), sum = order.reduce((x, j) => x + weights[j], 0);
  if (!order.length) return make("p", { class: "soft" }, `No single key gets more than ${percent(EXCERPT.threshold || 0)}: this query spreads its attention.`);
  return make("div", {}, make("h4", {}, `Strongest keys: ${percent(Math.min(1, sum))} of the weight`), make("ol", { class: "strongest" }, ...order.map((j) => make("li", {}, make("span", { class: "name" }, nameToken(names.keys, j)), make("span", { class: "length", style: { width: `${clamp(100 * weights[j], 1, 100)}%` } }), make("span", { class: "figure" }, percent(weights[j]))))));
}

// ---- depth ----
function depth() {
  const ablations = data.ablations || {}, measuredLayers = data.layers.relative_residual || [];
  const curves = ablations.supported ? Object.entries(ablations.curves) : measuredLayers.length ? [["as it is", measuredLayers]] : [];
  if (curves.length) byId("collapse").append(panel("Relative residual by layer", chart({ series: curves.map(([name, ys]) => ({ name, points: ys.map((y, i) => [i, y]) })), log: true, height: 280, x: "layer", y: "relative residual" })));
  byId("collapse-note").textContent = ablations.supported
    ? `On one ${WORDS.item}, in float64: the model as it is, and with skip connections or MLPs switched off.`
    : `${curves.length ? `The model as it is, ${meanOf(data.inputs.texts)}. ` : ""}Ablations: not measured. ${ablations.why || ""}`;
  const paths = data.paths || {};
  if (paths.supported) {
    byId("paths").append(panel("Contribution by path length", chart({ bars: paths.share.map((y, j) => [j, y]), height: 280, x: "attention layers on the path", y: "share of the output", unit: "share" })));
    byId("paths-note").textContent = `On one ${WORDS.item}: contribution of paths of each length to the last layer; the shares add up to one (error ${format(paths.sum_error)}). Held at their values on this ${WORDS.item}: ${paths.frozen.join(", ")}.`;
  } else byId("paths-note").textContent = `Path lengths: not measured. ${paths.why || ""}`;
}

// ---- similar heads ----
const pairName = ([x, i, j]) => `${headLabel(i)} and ${headLabel(j)}: ${x.toFixed(2)}`;
function similar() {
  const matrix = data.redundancy, n = records.length;
  if (!matrix.length) { byId("similar-section").hidden = true; return; }
  const ticks = rows.map((row, s) => [row[0] + (row.length - 1) / 2, siteLabel(s)]).filter((_, s) => s % Math.ceil(rows.length / 16) === 0);
  byId("redundancy").replaceChildren(panel("Cosine between the attention of two heads", heatMap({
    rows: n, columns: n, colour: (r, c) => (known(matrix[r][c]) ? ramp(clamp(matrix[r][c], 0, 1)) : [128, 128, 128]), size: isNarrow() ? 236 : 380, left: isNarrow() ? 72 : 92, slanted: true, x: "head", y: "head",
    xTicks: ticks, yTicks: ticks, bar: { title: "cosine", colour: ramp, ticks: [0, 0.25, 0.5, 0.75, 1].map((t) => [t, String(t)]) },
    point: (r, c) => (known(matrix[r][c]) ? pairName([matrix[r][c], r, c]) : `${headLabel(r)} and ${headLabel(c)}: of different lengths`), pick: (r) => choose(r), title: "Cosine between the attention of every pair of heads",
  }), "Heads in the order of the layers. Click to choose the head of the row; the table then shows what is similar to it."));
  byId("alike-note").textContent = `Cosine between the attention matrices of two heads, on sampled query rows, ${meanOf(data.inputs.texts)}.`;
  const pairs = matrix.flatMap((row, i) => row.slice(0, i).map((x, j) => [x, j, i])).filter(([x]) => known(x)).sort((a, b) => b[0] - a[0]);
  byId("alike").replaceChildren(...pairTable("The most similar pairs", pairs.slice(0, 8)));
}
function drawSimilarTo() {
  const row = data.redundancy[chosen];
  if (row) byId("alike-chosen").replaceChildren(...pairTable(`Most similar to ${headLabel(chosen)}`, row.map((x, j) => [x, chosen, j]).filter(([x, , j]) => known(x) && j !== chosen).sort((a, b) => b[0] - a[0]).slice(0, 5)));
}
function pairTable(caption, pairs) {
  const link = (i) => make("button", { type: "button", class: "link", onclick: () => { choose(i); byId("heads").scrollIntoView(); } }, headLabel(i));
  return [make("caption", {}, caption), make("thead", {}, make("tr", {}, ...["head", "head", "cosine"].map((x) => make("th", { scope: "col", class: x === "head" ? "left" : null }, x)))),
    make("tbody", {}, ...pairs.map(([x, i, j]) => make("tr", {}, make("td", { class: "left" }, link(i)), make("td", { class: "left" }, link(j)), make("td", {}, x.toFixed(2)))))];
}

// ---- inputs and versions ----
function provenance() {
  const box = byId("provenance"), list = { ...data.inputs, ...data.provenance };
  delete list.command;
  delete list.words;
  box.append(make("table", { class: "numbers" }, make("tbody", {}, ...Object.entries(list).map(([key, x]) => make("tr", {}, make("th", { scope: "row" }, key.replaceAll("_", " ")), make("td", {}, Array.isArray(x) ? x.join(", ") : String(x)))))));
}

// ---- print: the most telling heads ----
function printed() {
  if (!EXCERPT) return;
  byId("print-heads").replaceChildren(...data.telling.slice(0, 6).map((i) => make("figure", {}, make("figcaption", {}, make("strong", {}, headName(i)), ` – ${records[i].kind}: ${records[i].description}`), overview(records[i].site, records[i].head, { size: 240 }))));
}
let before = false;  // the theme before printing: paper is white
addEventListener("beforeprint", () => { before = isDark(); if (before) theme(false); printed(); });
addEventListener("afterprint", () => { if (before) theme(true); });

// ---- all of it ----
theme(matchMedia("(prefers-color-scheme: dark)").matches);
buildMap(); buildTable(); buildTokens(); depth(); similar(); plan(); provenance(); paint();
if (!follow()) choose(chosen, { keep: true });
repaint.push(paint, drawHead, drawTokens, similar);
