// Heads: their measures, the map, the table, and one head in detail.
const sites = data.sites,
  records = data.records;
const rows = sites.map((_, s) =>
  records
    .map((r, i) => [r, i])
    .filter(([r]) => r.site === s)
    .map(([, i]) => i),
);
const siteLabel = (s) => sites[s].label;
const byLength = data.by_length && (data.by_length.lengths || []).length ? data.by_length : null;
const headLabel = (i) => `${siteLabel(records[i].site)} · ${records[i].head}`;
const headName = (i) => `${siteLabel(records[i].site)} · head ${records[i].head}`;
let chosen = data.telling[0] || 0,
  measure = "kind";

// ---- measures ----
const stability = {
  name: "stability",
  label: "stability of the kind",
  group: "Kind",
  unit: "share",
  formula: `share of ${WORDS.items} with this kind`,
  meaning: `1 if the head has the same kind on every ${WORDS.item}; not known from one.`,
};
const MEASURES = Object.fromEntries([...data.measures, stability].map((x) => [x.name, x]));
const unitLabel = (name) => MEASURES[name].label + (MEASURES[name].unit ? ` (${MEASURES[name].unit})` : "");
const explanation = (name) => `${MEASURES[name].formula}: ${MEASURES[name].meaning}`;
const STATISTICS = { mean: 0, std: 1, min: 2, max: 3, texts: 4 }; // as stored
const value = (record, name) => {
  if (name === "stability") return record.stability;
  return record.modes[name]
    ? record.modes[name].value
    : record.measures[name]
      ? record.measures[name][STATISTICS.mean]
      : null;
};
// how a value was made from the texts
const origin = (record, name) => {
  const mode = record.modes[name];
  if (mode) return `on ${mode.count} of ${texts(mode.texts)}`;
  return name === "stability" ? `judged on ${texts(record.judged)}` : meanOf(record.measures[name][STATISTICS.texts]);
};
const measured = Object.values(MEASURES).filter((x) => records.some((r) => known(value(r, x.name))));

// ---- addresses of heads ----
const address = (i) => headAddress(siteLabel(records[i].site), records[i].head);
function findAddress(hash) {
  const found = readAddress(hash);
  const s = found ? sites.findIndex((x) => x.label === found.layer || x.name === found.layer) : -1;
  const i = s < 0 ? undefined : rows[s].find((j) => records[j].head === found.head);
  return i === undefined ? null : { head: i, token: found.token };
}

// ---- map of heads ----
function buildMap() {
  const button = (i) => ({
    type: "button",
    class: "head",
    "data-i": i,
    tabindex: i === chosen ? 0 : -1,
    "aria-pressed": "false",
    onclick: () => choose(i, { show: true }),
  });
  const also = (i) => (measure === "kind" && traitsOf(i).length ? ` (also ${traitsOf(i).join(", ")})` : "");
  const said = (i) =>
    (showsKinds() ? kindShown(i) + also(i) : cellText(i)) + (measure === "kind" ? ` – ${records[i].description}` : "");
  headMap(byId("map"), {
    rows,
    names: sites.map(({ name, label, kind }) => ({ name, label: label + (kind === "cross" ? " (cross)" : "") })),
    cell: (i) => explain(make("button", button(i)), () => `${headName(i)}: ${said(i)}`),
    chosen: () => chosen,
    move: (i) => choose(i, { focus: true, replace: true }),
  });
  if (Math.max(...rows.map((row) => row.length)) > 16) document.querySelector(".explorer").classList.add("broad");
  const lengths = byLength ? byLength.lengths : [];
  const atLengths = lengths.map((n, k) => ({ name: `kind ${k}`, label: `kind at ${n} ${WORDS.units}` }));
  colourChoices(byId("measure"), [{ name: "kind", label: "kind" }, ...atLengths], measured);
  byId("measure").addEventListener("change", (event) => {
    measure = event.target.value;
    paint();
  });
}
const showsKinds = () => !MEASURES[measure];
const kindShown = (i) => (measure === "kind" ? records[i].kind : byLength.kinds[Number(measure.slice(5))][i]);
// other kinds that fit the head too: the first of them colours a corner of its cell
const traitsOf = (i) => records[i].traits || [];
const alsoOf = (i) => (measure === "kind" ? traitsOf(i).filter((x) => KINDS[x]) : []);
const cornered = (colour, also) =>
  also ? `linear-gradient(225deg, ${kindOf(also).colour} 22%, transparent 23%), ${colour}` : colour;
const cellText = (i) => {
  const x = value(records[i], measure);
  return known(x)
    ? `${MEASURES[measure].label} ${format(x, MEASURES[measure].unit)}, ${origin(records[i], measure)}`
    : `${MEASURES[measure].label} not known`;
};
const tiny = (x, unit) => {
  if (unit === "share")
    return Math.abs(x) < 0.0995 && x !== 0
      ? (100 * x).toFixed(Math.abs(x) < 0.01 ? 1 : 0).replace(/^0\./, ".")
      : (100 * x).toFixed(0);
  return Math.abs(x) >= 1e4
    ? x.toExponential(0).replace("e+", "e")
    : Math.abs(x) >= 10
      ? x.toFixed(0)
      : x.toFixed(1).replace(/^(-?)0\./, "$1.");
};
function paint() {
  const values = showsKinds() ? [] : records.map((r) => value(r, measure)),
    tones = valueScale(values);
  for (const button of document.querySelectorAll("button.head")) {
    const i = Number(button.dataset.i),
      record = records[i],
      x = values[i];
    let text, name;
    if (showsKinds()) {
      name = kindShown(i);
      const { letter, colour, ink } = kindOf(name),
        also = alsoOf(i)[0];
      Object.assign(button.style, { background: cornered(colour, also), color: ink });
      text = letter;
      if (measure === "kind" && traitsOf(i).length) name += `, also ${traitsOf(i).join(", ")}`;
    } else {
      name = cellText(i);
      const rgb = known(x) ? ramp(tones.place(x)) : null;
      Object.assign(
        button.style,
        rgb ? { background: css(rgb), color: inkOn(rgb) } : { background: "transparent", color: "inherit" },
      );
      text = known(x) ? tiny(x, MEASURES[measure].unit) : "–";
    }
    button.textContent = text;
    button.setAttribute("aria-label", `${sites[record.site].name}, head ${record.head}: ${name}`);
  }
  const legend = byId("legend");
  legend.replaceChildren();
  if (showsKinds()) {
    for (const [kind, { meaning }] of Object.entries(KINDS)) {
      const count = records.filter((_, i) => kindShown(i) === kind).length;
      if (count)
        legend.append(
          make(
            "div",
            { class: "entry" },
            swatch(kind),
            make("span", {}, make("strong", {}, kind), ` ${count}`, make("span", { class: "soft" }, ` – ${meaning}`)),
          ),
        );
    }
    if (records.some((_, i) => alsoOf(i).length))
      legend.append(
        make("p", { class: "soft" }, "A corner in the colour of another kind: that kind fits the head too."),
      );
    if (byLength) {
      const others = byLength.kinds.map((kinds) => records.filter((r, i) => kinds[i] !== r.kind).length);
      const differ = byLength.lengths.map((n, k) => [n, others[k]]).filter(([, count]) => count);
      const words = differ.map(
        ([n, count]) => `at ${n} ${WORDS.units} ${count} ${count === 1 ? "has" : "have"} another`,
      );
      const text = differ.length
        ? `Kinds depend on the length: ${words.join(", ")}.`
        : `Kinds are the same at ${byLength.lengths.join(", ")} ${WORDS.units}.`;
      legend.append(make("p", { class: "soft" }, text));
    }
    return;
  }
  const { unit } = MEASURES[measure];
  legend.append(
    make(
      "div",
      { class: "bar" },
      make("div", { class: "ramp", style: { background: gradient(ramp) } }),
      make("div", { class: "ticks" }, ...tones.ticks.map(([, x]) => make("span", {}, format(x, unit)))),
    ),
    make(
      "p",
      { class: "soft" },
      `${unitLabel(measure)}${tones.byRank ? "; colours by rank, so that heads can be told apart: least, lower quartile, median, upper quartile and largest value" : ""}. ${explanation(measure)}`,
    ),
  );
}

// ---- table of heads ----
const kindCell = (i) => [swatch(records[i].kind), records[i].kind];
const traits = {
  name: "traits",
  label: "also",
  group: "Kind",
  left: true,
  value: (i) => traitsOf(i).join(", "),
  show: (i) => traitsOf(i).map((x) => make("span", { class: "trait" }, x)),
  meaning: `What else holds of the head, beside its kind, on most ${WORDS.items}.`,
};
const columns = [
  {
    name: "layer",
    label: "layer",
    group: "Head",
    left: true,
    ascending: true,
    value: (i) => siteLabel(records[i].site),
    number: (i) => records[i].site,
    meaning: "The place in the model that computes attention, in the order of computation.",
  },
  {
    name: "head",
    label: "head",
    group: "Head",
    ascending: true,
    value: (i) => records[i].head,
    meaning: "Number of the head in its layer, from 0.",
  },
  {
    name: "kind",
    label: "kind",
    group: "Kind",
    left: true,
    value: (i) => records[i].kind,
    show: kindCell,
    meaning: `The first rule that fits the head on most ${WORDS.items}.`,
  },
  {
    name: "description",
    label: "in words",
    group: "Kind",
    left: true,
    value: (i) => records[i].description,
    meaning: "The kind in one sentence.",
  },
  ...measured.map((x) => ({
    name: x.name,
    label: x.label,
    heading: x.heading,
    unit: x.unit,
    group: x.group,
    value: (i) => value(records[i], x.name),
    meaning: `${x.label} = ${x.formula}: ${x.meaning}`,
  })),
  ...(records.some((_, i) => traitsOf(i).length) ? [traits] : []),
];
let table;
function buildTable() {
  table = headTable({
    table: byId("table"),
    count: records.length,
    columns,
    shown: ["layer", "head", "kind", ...data.columns, "traits"],
    choose: (i, replace) => choose(i, { replace }),
    changed: (found) => {
      byId("count").textContent =
        found.length === records.length ? `${found.length} heads` : `${found.length} of ${records.length} heads`;
      const these = new Set(found);
      for (const button of document.querySelectorAll("button.head"))
        button.classList.toggle("faint", !these.has(Number(button.dataset.i)));
    },
  });
  table.render();
  byId("filter").addEventListener("input", (event) => table.filter(event.target.value));
  byId("csv").addEventListener("click", () =>
    save(`${fileName(data.model.name)}-heads.csv`, csv(table.cells()), "text/csv"),
  );
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
  byId("said").textContent = `${headName(i)}: ${records[i].kind}, ${records[i].description}`;
  // on a narrow screen the head is below the map: bring it into view
  if (show && byId("detail").getBoundingClientRect().top > innerHeight - 160)
    byId("detail").scrollIntoView({ block: "start" });
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
  const record = records[chosen],
    site = sites[record.site],
    all = data.inputs.texts;
  const counts = Object.entries(record.kind_counts)
    .map(([kind, n]) => `${kind} on ${n}`)
    .join(", ");
  const unjudged = record.judged < all ? "; the others have no spectrum to judge it by" : "";
  const step = (by) => choose((chosen + by + records.length) % records.length, { replace: true });
  const words = make(
    "div",
    { class: "words" },
    make(
      "p",
      { class: "verdict" },
      swatch(record.kind),
      make("strong", {}, record.kind),
      ...(record.traits || []).map((x) => make("span", { class: "trait" }, x)),
      `: ${record.description}.`,
    ),
    make(
      "p",
      { class: "soft" },
      `Judged on ${record.judged} of ${texts(all)} of ${lengths(site)}: ${counts}${unjudged}. Numbers of the sentence: ${meanOf(record.evidence_texts)}.`,
    ),
    make(
      "p",
      { class: "soft" },
      `${sites[record.site].name}: ${site.kind}-attention${site.causal ? ", causal" : ""}, key width ${site.key_width}${site.groups < site.heads ? `, ${site.groups} key heads for ${site.heads} query heads` : ""}.`,
    ),
    kindsByLength(),
    ranks(record),
  );
  const detail = byId("detail"),
    open = detail.querySelector("details[open]") !== null,
    pictures = [];
  if (EXCERPT) {
    const found = EXCERPT.sites[record.site];
    pictures.push(
      panel(
        `Attention of ${headLabel(chosen)} on ${excerptName()}, ${found.keys} ${WORDS.units}`,
        overview(record.site, record.head, {
          size: 300,
          pick: (r, c) => moveWindow(edge(r, found.rows, found.queries), edge(c, found.columns, found.keys)),
        }),
        found.rows < found.queries || found.columns < found.keys
          ? `A cell is the mean of about ${Math.round(found.queries / found.rows)} × ${Math.round(found.keys / found.columns)} ${WORDS.units}; single ${WORDS.units} are below. Click to look there.`
          : "Click to look closer below.",
      ),
    );
  }
  const reach = (record.profile.length - 1) / 2,
    near = record.profile.map((y, x) => [x - reach, y]);
  pictures.push(
    make(
      "div",
      { class: "stack" },
      panel(
        `Mean weight by offset, ${meanOf(all)}`,
        chart({
          bars: near,
          height: 170,
          x: "offset (key − query)",
          y: "weight",
          unit: "share",
          ticks: [-reach, -reach / 2, 0, reach / 2, reach].map((v) => [v, String(v)]),
        }),
      ),
      record.spectrum.length
        ? panel(
            `Singular values of P, ${data.inputs.spectra_exact ? "exact" : "approximate"}, ${meanOf(data.inputs.spectra_texts)}`,
            chart({
              series: [{ points: record.spectrum.map((y, x) => [x + 1, y]) }],
              log: true,
              height: 170,
              x: "index",
              y: "σ",
            }),
          )
        : make("p", { class: "soft" }, "Singular values were not measured."),
    ),
  );
  detail.replaceChildren(
    make(
      "div",
      { class: "detail-head" },
      make("h3", { id: "detail-title" }, headName(chosen)),
      make(
        "span",
        { class: "steps" },
        make("button", { type: "button", onclick: () => step(-1), "aria-label": "Previous head" }, "‹"),
        make("button", { type: "button", onclick: () => step(1), "aria-label": "Next head" }, "›"),
        make(
          "a",
          {
            class: "to-map",
            href: "#heads",
            onclick: (event) => {
              event.preventDefault();
              byId("heads").scrollIntoView();
            },
          },
          "map ↑",
        ),
      ),
    ),
    make("div", { class: "columns" }, words, ...pictures),
    numbers(record),
  );
  detail.querySelector("details").open = open;
}
const excerptName = () => (EXCERPT.own ? `your ${WORDS.item}` : `the first ${WORDS.item}`);
function kindsByLength() {
  const found = byLength;
  if (!byLength) return null;
  return make(
    "table",
    { class: "lengths" },
    make("caption", {}, "Kind by length"),
    make(
      "tbody",
      {},
      ...found.lengths.map((n, k) =>
        make(
          "tr",
          {},
          make("th", { scope: "row" }, `${n} ${WORDS.units}`),
          make("td", {}, swatch(found.kinds[k][chosen]), found.kinds[k][chosen]),
        ),
      ),
    ),
  );
}
// where the head stands among all heads, for the measures of the table
function ranks(record) {
  const list = make("div", { class: "ranks" });
  for (const name of data.columns.filter((x) => known(value(record, x)))) {
    const values = records.map((r) => value(r, name)).filter(known),
      low = Math.min(...values),
      high = Math.max(...values),
      unit = MEASURES[name].unit;
    const place = (x) => 4 + 152 * (high > low ? (x - low) / (high - low) : 0.5);
    const strip = draw(
      "svg",
      { viewBox: "0 0 160 16", class: "strip", "aria-hidden": "true" },
      ...values.map((x) => draw("line", { x1: place(x), x2: place(x), y1: 4, y2: 12 })),
      draw("circle", { cx: place(value(record, name)), cy: 8, r: 5 }),
    );
    list.append(
      explain(
        make(
          "div",
          { class: "rank" },
          make("span", {}, MEASURES[name].heading),
          strip,
          make(
            "span",
            { class: "figure" },
            format(value(record, name), unit) + (unit && unit !== "share" ? ` ${unit}` : ""),
          ),
        ),
        () =>
          `${explanation(name)} Here ${format(value(record, name), unit)}, ${origin(record, name)}; all heads: ${format(low, unit)} to ${format(high, unit)}.`,
      ),
    );
  }
  return list;
}
function numbers(record) {
  const body = make("tbody"),
    cell = (x, attributes = {}) => make("td", attributes, x);
  const row = (name, ...cells) =>
    body.append(
      make(
        "tr",
        {},
        make("th", { scope: "row" }, explain(make("span", { tabindex: 0 }, unitLabel(name)), explanation(name))),
        ...cells,
      ),
    );
  for (const [name, x] of Object.entries(record.measures)) {
    const [mean, std, min, max, count] = x,
      unit = MEASURES[name].unit;
    // one text has no spread, and of two the range says more than a standard deviation
    const spread = count < 2 ? [null, null, null] : count < 3 ? [null, min, max] : [std, min, max];
    row(name, cell(String(count)), ...[mean, ...spread].map((y) => cell(format(y, unit))));
  }
  for (const [name, x] of Object.entries(record.modes))
    row(
      name,
      cell(String(x.texts)),
      cell(`${x.value}${x.texts > 1 ? ` on ${x.count} of ${texts(x.texts)}` : ""}`, { colspan: 4 }),
    );
  return make(
    "details",
    { class: "all-numbers" },
    make("summary", {}, "All numbers of this head"),
    make(
      "p",
      { class: "soft" },
      `Mean, sample standard deviation (from three ${WORDS.items} on), minimum and maximum over the ${WORDS.items} on which a number was measured; of a position, the most frequent one.`,
    ),
    make(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "All numbers" },
      make(
        "table",
        { class: "numbers" },
        make(
          "thead",
          {},
          make(
            "tr",
            {},
            ...["measure", WORDS.items, "mean", "std", "min", "max"].map((x) => make("th", { scope: "col" }, x)),
          ),
        ),
        body,
      ),
    ),
  );
}
