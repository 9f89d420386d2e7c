// The page of two examinations: the same heads in both, sorted by how far they moved.
const A = data.a,
  B = data.b,
  pairs = data.pairs;
const recordA = (p) => A.records[pairs[p][0]],
  recordB = (p) => B.records[pairs[p][1]];
const layerOf = (p) => A.sites[recordA(p).site].label;
const headLabel = (p) => `${layerOf(p)} · ${recordA(p).head}`;
const rows = A.sites.map((_, s) => range(pairs.length).filter((p) => recordA(p).site === s));
const MEASURES = Object.fromEntries(data.measures.map((x) => [x.name, x]));
const hasZ = data.ranked_by === "z";
let chosen = data.largest.findIndex((x) => x.rank === 0),
  measure = "kind";
if (chosen < 0) chosen = 0;

// [mean, std, min, max, texts] of a measure on one side
const statistic = (record, name) => record.measures[name] || [null, null, null, null, 0];
const spread = (record, name) => {
  const [mean, std, , , count] = statistic(record, name),
    unit = MEASURES[name].unit;
  return `${format(mean, unit)}${count > 1 && known(std) ? ` ± ${format(std, unit)}` : ""}`;
};
const difference = (p, name) => {
  const [x, y] = [statistic(recordA(p), name)[0], statistic(recordB(p), name)[0]];
  return known(x) && known(y) ? y - x : null;
};
const changeOf = (p, name) => (data.changes[name] || [])[p] || [null, null];
const signedZ = (p, name) => {
  const z = changeOf(p, name)[1];
  return known(z) ? Math.sign(difference(p, name)) * z : null;
};
const most = (p) => data.largest[p].measure;
const measured = data.measures.filter((x) => range(pairs.length).some((p) => known(difference(p, x.name))));

// ---- three maps: A, B and the change ----
const kindWords = (p) =>
  (recordA(p).kind === recordB(p).kind ? recordA(p).kind : `${recordA(p).kind} → ${recordB(p).kind}`) +
  (data.largest[p].same_length === false ? "*" : "");
function cellOfMap(side, p, tones) {
  const record = side === "A" ? recordA(p) : recordB(p);
  if (measure === "kind") {
    if (side === "change") {
      const same = recordA(p).kind === recordB(p).kind;
      return { text: same ? "=" : "≠", rgb: same ? null : parse(isDark() ? "#6db5ea" : "#0b5cad"), name: kindWords(p) };
    }
    return { text: kindOf(record.kind).letter, rgb: parse(kindOf(record.kind).colour), name: record.kind };
  }
  const { unit, label } = MEASURES[measure];
  if (side === "change") {
    const change = difference(p, measure),
      z = signedZ(p, measure);
    if (!known(change)) return { text: "–", rgb: null, name: "not known" };
    return {
      text: change > 0 ? "+" : change < 0 ? "−" : "=",
      rgb: diverging(known(z) ? z / tones.limit : change / tones.largest),
      name: `${label} ${change > 0 ? "+" : ""}${format(change, unit)}${known(z) ? `, z = ${Math.abs(z).toFixed(1)}` : ""}`,
    };
  }
  const x = statistic(record, measure)[0];
  return {
    text: known(x) ? (unit === "share" ? (100 * x).toFixed(0) : Math.abs(x) >= 10 ? x.toFixed(0) : x.toFixed(1)) : "–",
    rgb: known(x) ? ramp(tones.place(x)) : null,
    name: `${label} ${spread(record, measure)}, ${meanOf(statistic(record, measure)[4])}`,
  };
}
function buildMaps() {
  const shown = rows.map((row, s) => [row, A.sites[s]]).filter(([row]) => row.length);
  const button = (side, p) => ({
    type: "button",
    class: "head",
    "data-i": p,
    "data-side": side,
    tabindex: -1,
    "aria-pressed": "false",
    onclick: () => choose(p, { show: true }),
  });
  const titles = { A: `A: ${A.model.name}`, B: `B: ${B.model.name}`, change: "Change from A to B" };
  for (const [side, title] of Object.entries(titles)) {
    const table = make("table", { class: "map", "data-side": side }, make("caption", {}, title));
    headMap(table, {
      rows: shown.map(([row]) => row),
      names: shown.map(([, site]) => site),
      cell: (p) => explain(make("button", button(side, p)), (event) => event.currentTarget.getAttribute("aria-label")),
      chosen: () => chosen,
      move: (p) => {
        choose(p, { replace: true });
        table.querySelector('button.head[aria-pressed="true"]').focus();
      },
    });
    byId("maps").append(make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, table));
  }
  if (Math.max(...rows.map((row) => row.length)) > 16) byId("maps").classList.add("broad");
  colourChoices(byId("measure"), [{ name: "kind", label: "kind" }], measured);
  byId("measure").addEventListener("change", (event) => {
    measure = event.target.value;
    paint();
  });
}
function paint() {
  let tones = {};
  if (measure !== "kind") {
    const all = range(pairs.length),
      values = all.flatMap((p) => [statistic(recordA(p), measure)[0], statistic(recordB(p), measure)[0]]);
    tones = {
      ...valueScale(values),
      limit: Math.max(3, ...all.map((p) => Math.abs(signedZ(p, measure) || 0))),
      largest: Math.max(1e-30, ...all.map((p) => Math.abs(difference(p, measure) || 0))),
    };
  }
  for (const button of document.querySelectorAll("button.head")) {
    const p = Number(button.dataset.i),
      { side } = button.dataset,
      { text, rgb, name } = cellOfMap(side, p, tones);
    Object.assign(button.style, rgb ? { background: css(rgb), color: inkOn(rgb) } : { background: "", color: "" });
    button.textContent = text;
    button.setAttribute("aria-label", `${side === "change" ? "Change" : side}, ${headLabel(p)}: ${name}`);
  }
  const legend = byId("legend");
  legend.replaceChildren();
  if (measure === "kind") {
    legend.append(
      make(
        "div",
        { class: "line" },
        ...Object.keys(data.kinds)
          .filter((kind) => range(pairs.length).some((p) => recordA(p).kind === kind || recordB(p).kind === kind))
          .map((kind) =>
            make(
              "span",
              { class: "entry" },
              swatch(kind),
              `${kind}: ${range(pairs.length).filter((p) => recordA(p).kind === kind).length} in A, ${range(pairs.length).filter((p) => recordB(p).kind === kind).length} in B`,
            ),
          ),
      ),
    );
    return;
  }
  const { unit, formula, meaning } = MEASURES[measure];
  const strip = (colour, ticks) =>
    make(
      "div",
      { class: "bar" },
      make("div", { class: "ramp", style: { background: gradient(colour) } }),
      make("div", { class: "ticks" }, ...ticks.map((x) => make("span", {}, x))),
    );
  const z = range(pairs.length).some((p) => known(signedZ(p, measure)));
  legend.append(
    make(
      "div",
      { class: "three" },
      make(
        "div",
        {},
        strip(
          ramp,
          tones.ticks.map(([, x]) => format(x, unit)),
        ),
        make("p", { class: "soft" }, `A and B${tones.byRank ? ", by rank" : ""}`),
      ),
      make("div", {}),
      make(
        "div",
        {},
        strip(
          (t) => diverging(2 * t - 1),
          [-1, -0.5, 0, 0.5, 1].map((t) => (z ? `${(t * tones.limit).toFixed(1)}` : format(t * tones.largest, unit))),
        ),
        make(
          "p",
          { class: "soft" },
          z ? "Change, in standard errors (z): less in B – more in B" : "Change: less in B – more in B",
        ),
      ),
    ),
    make("p", { class: "soft" }, `${formula}: ${meaning}`),
  );
}

// ---- table ----
const counts = (p, name) => {
  const [m, n] = [statistic(recordA(p), name)[4], statistic(recordB(p), name)[4]];
  return m === n ? String(m) : `${m}, ${n}`;
};
const columns = [
  {
    name: "layer",
    label: "layer",
    group: "Head",
    left: true,
    ascending: true,
    value: layerOf,
    number: (p) => recordA(p).site,
    meaning: "The place in the model that computes attention.",
  },
  {
    name: "head",
    label: "head",
    group: "Head",
    ascending: true,
    value: (p) => recordA(p).head,
    meaning: "Number of the head in its layer, from 0.",
  },
  {
    name: "kind",
    label: "kind",
    group: "Head",
    left: true,
    value: kindWords,
    show: (p) =>
      recordA(p).kind === recordB(p).kind
        ? [swatch(recordA(p).kind), kindWords(p)]
        : [swatch(recordA(p).kind), swatch(recordB(p).kind), kindWords(p)],
    meaning: "Kind in A → kind in B; * if they were judged at different lengths, which alone can change a kind.",
  },
  {
    name: "measure",
    label: "measure that moved farthest",
    heading: "moved farthest",
    group: "Largest change",
    left: true,
    value: (p) => MEASURES[most(p)].heading,
    meaning: hasZ ? "The measure with the largest z." : "The measure with the largest relative change.",
  },
  {
    name: "A",
    label: "A",
    group: "Largest change",
    value: (p) => statistic(recordA(p), most(p))[0],
    show: (p) => spread(recordA(p), most(p)),
    meaning: `Mean ± sample standard deviation over the ${WORDS.items} of A.`,
  },
  {
    name: "B",
    label: "B",
    group: "Largest change",
    value: (p) => statistic(recordB(p), most(p))[0],
    show: (p) => spread(recordB(p), most(p)),
    meaning: `Mean ± sample standard deviation over the ${WORDS.items} of B.`,
  },
  {
    name: "texts",
    label: WORDS.items,
    group: "Largest change",
    value: (p) => counts(p, most(p)),
    meaning: `Number of ${WORDS.items} on which it was measured, in A and in B.`,
  },
  {
    name: "change",
    label: "change",
    unit: "share",
    group: "Largest change",
    value: (p) => changeOf(p, most(p))[0],
    meaning: "|A − B| / max(|A|, |B|)",
  },
  ...(hasZ
    ? [
        {
          name: "z",
          label: "z",
          group: "Largest change",
          value: (p) => changeOf(p, most(p))[1],
          meaning:
            "Change of the mean in standard errors, as a deviate of the normal distribution, so that few and many texts can be ranked together.",
        },
      ]
    : []),
  ...measured.map((x) => ({
    name: `change of ${x.name}`,
    label: `change of ${x.label}`,
    heading: `Δ ${x.heading}`,
    unit: x.unit,
    group: "Changes, B − A",
    value: (p) => difference(p, x.name),
    meaning: `B − A of ${x.label} = ${x.formula}: ${x.meaning}`,
  })),
];
let table;
function buildTable() {
  table = headTable({
    table: byId("table"),
    count: pairs.length,
    columns,
    shown: columns.filter((c) => c.group !== "Changes, B − A").map((c) => c.name),
    choose: (p, replace) => choose(p, { replace }),
    changed: (found) => {
      byId("count").textContent =
        found.length === pairs.length ? `${found.length} heads` : `${found.length} of ${pairs.length} heads`;
      const these = new Set(found);
      for (const button of document.querySelectorAll("button.head"))
        button.classList.toggle("faint", !these.has(Number(button.dataset.i)));
    },
  });
  table.sort(hasZ ? "z" : "change", true);
  byId("filter").addEventListener("input", (event) => table.filter(event.target.value));
  byId("csv").addEventListener("click", () =>
    save(`${fileName(data.model.name)}-changes.csv`, csv(table.cells()), "text/csv"),
  );
  columnChooser(byId("columns"), table, columns);
}

// ---- one head ----
const address = (p) => headAddress(layerOf(p), recordA(p).head);
function follow() {
  const found = readAddress(location.hash);
  const here = (p) => layerOf(p) === found.layer || A.sites[recordA(p).site].name === found.layer;
  const p = found ? range(pairs.length).find((q) => here(q) && recordA(q).head === found.head) : undefined;
  if (p === undefined) return false;
  choose(p, { keep: true });
  return true;
}
addEventListener("popstate", follow);
function choose(p, { replace = false, keep = false, show = false } = {}) {
  chosen = p;
  for (const button of document.querySelectorAll("button.head")) {
    const mine = Number(button.dataset.i) === p;
    button.setAttribute("aria-pressed", String(mine));
    button.tabIndex = mine ? 0 : -1;
  }
  table.select(p, true);
  if (!keep) history[replace ? "replaceState" : "pushState"](null, "", address(p));
  drawHead();
  byId("said").textContent = `${headLabel(p)}: ${kindWords(p)}`;
  if (show && innerWidth < 1000) byId("detail").scrollIntoView({ block: "start" });
}
const toolsA = A.excerpt && A.excerpt.sites ? excerptTools(A.excerpt) : null,
  toolsB = B.excerpt && B.excerpt.sites ? excerptTools(B.excerpt) : null;
function drawHead() {
  const a = recordA(chosen),
    b = recordB(chosen),
    reach = (a.profile.length - 1) / 2;
  const near = (record) => record.profile.map((y, x) => [x - reach, y]);
  const both = (points) => [
    { name: "A", points: points(a) },
    { name: "B", points: points(b) },
  ];
  const body = make(
    "tbody",
    {},
    ...measured
      .filter((x) => known(difference(chosen, x.name)))
      .map((x) => [x, ...changeOf(chosen, x.name)])
      .sort((x, y) => (y[2] || 0) - (x[2] || 0) || y[1] - x[1])
      .map(([x, relative, z]) =>
        make(
          "tr",
          {},
          make(
            "th",
            { scope: "row" },
            explain(make("span", { tabindex: 0 }, x.heading), `${x.label} = ${x.formula}: ${x.meaning}`),
          ),
          make("td", {}, spread(a, x.name)),
          make("td", {}, spread(b, x.name)),
          make("td", {}, counts(chosen, x.name)),
          make("td", {}, percent(relative)),
          make("td", {}, known(z) ? z.toFixed(1) : "–"),
        ),
      ),
  );
  // one scale for both, so that equal colours are equal weights
  const top = Math.max(
    ...[
      [toolsA, a],
      [toolsB, b],
    ]
      .filter(([tools]) => tools)
      .map(([tools, r]) => tools.head(r.site, r.head).site.top[r.head]),
  );
  const picture = (tools, record, side) =>
    tools ? panel(`${side}: one ${WORDS.item}`, overview(record.site, record.head, { size: 260, top }, tools)) : null;
  byId("detail").replaceChildren(
    make(
      "div",
      { class: "detail-head" },
      make("h3", { id: "detail-title" }, `${layerOf(chosen)} · head ${a.head}`),
      make("span", { class: "steps" }, make("a", { class: "to-map", href: "#heads" }, "map ↑")),
    ),
    make(
      "p",
      {},
      make("strong", {}, "A "),
      swatch(a.kind),
      `${a.kind}: ${a.description}. Judged on ${texts(a.judged)} of ${lengths(A.sites[a.site])}.`,
    ),
    make(
      "p",
      {},
      make("strong", {}, "B "),
      swatch(b.kind),
      `${b.kind}: ${b.description}. Judged on ${texts(b.judged)} of ${lengths(B.sites[b.site])}.`,
    ),
    make(
      "div",
      { class: "two wide-left" },
      make(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": "All changes of this head" },
        make(
          "table",
          { class: "numbers" },
          make("caption", {}, "All changes of this head"),
          make(
            "thead",
            {},
            make(
              "tr",
              {},
              ...["measure", "A ± std", "B ± std", WORDS.items, "change", "z"].map((x) =>
                make("th", { scope: "col" }, x),
              ),
            ),
          ),
          body,
        ),
      ),
      make(
        "div",
        { class: "two" },
        picture(toolsA, a, "A"),
        picture(toolsB, b, "B"),
        panel(
          "Mean weight by offset",
          chart({
            series: both(near),
            height: 190,
            x: "offset (key − query)",
            y: "weight",
            unit: "share",
            ticks: [-reach, -reach / 2, 0, reach / 2, reach].map((v) => [v, String(v)]),
          }),
        ),
        a.spectrum.length && b.spectrum.length
          ? panel(
              "Singular values of P",
              chart({
                series: both((r) => r.spectrum.map((y, x) => [x + 1, y])),
                log: true,
                height: 190,
                x: "index",
                y: "σ",
              }),
            )
          : null,
      ),
    ),
  );
}
function depth() {
  const curves = data.residuals
    .map((ys, i) => ({ name: i ? "B" : "A", points: ys.map((y, k) => [k, y]) }))
    .filter((s) => s.points.length);
  if (!curves.length) {
    byId("depth-section").hidden = true;
    return;
  }
  byId("residuals").append(
    panel(
      "Relative residual by layer",
      chart({
        series: curves,
        log: Math.min(...data.residuals.flat().filter(known)) < 0.05,
        height: 240,
        x: "layer",
        y: "relative residual",
      }),
      `The part of the hidden state that differs between ${WORDS.units}; ${meanOf(A.inputs.texts)} in A, ${meanOf(B.inputs.texts)} in B.`,
    ),
  );
}
theme(matchMedia("(prefers-color-scheme: dark)").matches);
buildMaps();
buildTable();
depth();
paint();
if (!follow()) choose(chosen, { keep: true });
repaint.push(paint, drawHead);
for (const link of document.querySelectorAll("a.chip"))
  link.addEventListener("click", () => setTimeout(() => byId("heads").scrollIntoView(), 0));
addEventListener("beforeprint", () => {
  if (isDark()) theme(false);
});
