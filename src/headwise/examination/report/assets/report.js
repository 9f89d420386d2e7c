// The rest of the page of one examination, and its start.
// ---- depth ----
function depth() {
  const ablations = data.ablations || {},
    measuredLayers = data.layers.relative_residual || [];
  const curves = ablations.supported
    ? Object.entries(ablations.curves)
    : measuredLayers.length
      ? [["as it is", measuredLayers]]
      : [];
  if (curves.length)
    byId("collapse").append(
      panel(
        "Relative residual by layer",
        chart({
          series: curves.map(([name, ys]) => ({ name, points: ys.map((y, i) => [i, y]) })),
          log: true,
          height: 280,
          x: "layer",
          y: "relative residual",
        }),
      ),
    );
  byId("collapse-note").textContent = ablations.supported
    ? `On one ${WORDS.item}, in float64: ${(ablations.other_blocks || []).length ? `the blocks in ${ablations.blocks}` : "the model"} as it is, and with skip connections or MLPs switched off.`
    : `${curves.length ? `The model as it is, ${meanOf(data.inputs.texts)}. ` : ""}Ablations: not measured. ${ablations.why || ""}`;
  const paths = data.paths || {};
  if (paths.supported) {
    byId("paths").append(
      panel(
        "Contribution by path length",
        chart({
          bars: paths.share.map((y, j) => [j, y]),
          height: 280,
          x: "attention layers on the path",
          y: "share of the output",
          unit: "share",
        }),
      ),
    );
    byId("paths-note").textContent =
      `On one ${WORDS.item}: contribution of paths of each length to the last layer; the shares add up to one (error ${format(paths.sum_error)}). Held at their values on this ${WORDS.item}: ${paths.frozen.join(", ")}.`;
  } else byId("paths-note").textContent = `Path lengths: not measured. ${paths.why || ""}`;
}

// ---- similar heads ----
const similarity = bytesOf(data.similarity); // below the diagonal, row by row
const cosine = (i, j) => {
  if (i === j) return 1;
  const byte = similarity[(Math.max(i, j) * (Math.max(i, j) - 1)) / 2 + Math.min(i, j)];
  return byte === 255 ? null : byte / 250;
};
function similar() {
  const n = records.length;
  if (n < 2 || !similarity.length) {
    byId("similar-section").hidden = true;
    return;
  }
  const ticks = rows
    .map((row, s) => [row[0] + (row.length - 1) / 2, siteLabel(s)])
    .filter((_, s) => s % Math.ceil(rows.length / 16) === 0);
  byId("redundancy").replaceChildren(
    panel(
      "Cosine between the attention of two heads",
      heatMap({
        rows: n,
        columns: n,
        colour: (r, c) => (known(cosine(r, c)) ? ramp(cosine(r, c)) : [128, 128, 128]),
        size: isNarrow() ? 236 : 380,
        left: isNarrow() ? 72 : 92,
        slanted: true,
        x: "head",
        y: "head",
        xTicks: ticks,
        yTicks: ticks,
        bar: { title: "cosine", colour: ramp, ticks: [0, 0.25, 0.5, 0.75, 1].map((t) => [t, String(t)]) },
        point: (r, c) =>
          `${headLabel(r)} and ${headLabel(c)}: ${known(cosine(r, c)) ? cosine(r, c).toFixed(2) : "of different lengths"}`,
        pick: (r) => choose(r),
        title: "Cosine between the attention of every pair of heads",
      }),
      "Heads in the order of the layers. Click to choose the head of the row; the table then shows what is similar to it.",
    ),
  );
  byId("alike-note").textContent =
    `Cosine between the attention matrices of two heads, on sampled query rows, ${meanOf(data.inputs.texts)}.`;
  let most = []; // the eight most similar pairs
  for (let i = 1; i < n; i++)
    for (let j = 0; j < i; j++) {
      const x = cosine(i, j);
      if (known(x) && (most.length < 8 || x > most[most.length - 1][0]))
        most = [...most, [x, j, i]].sort((a, b) => b[0] - a[0]).slice(0, 8);
    }
  byId("alike").replaceChildren(...pairTable("The most similar pairs", most));
}
function drawSimilarTo() {
  const others = range(records.length)
    .filter((j) => j !== chosen)
    .map((j) => [cosine(chosen, j), chosen, j])
    .filter(([x]) => known(x));
  if (similarity.length)
    byId("alike-chosen").replaceChildren(
      ...pairTable(`Most similar to ${headLabel(chosen)}`, others.sort((a, b) => b[0] - a[0]).slice(0, 5)),
    );
}
function pairTable(caption, pairs) {
  const link = (i) =>
    make(
      "button",
      {
        type: "button",
        class: "link",
        onclick: () => {
          choose(i);
          byId("heads").scrollIntoView();
        },
      },
      headLabel(i),
    );
  return [
    make("caption", {}, caption),
    make(
      "thead",
      {},
      make(
        "tr",
        {},
        ...["head", "head", "cosine"].map((x) => make("th", { scope: "col", class: x === "head" ? "left" : null }, x)),
      ),
    ),
    make(
      "tbody",
      {},
      ...pairs.map(([x, i, j]) =>
        make(
          "tr",
          {},
          make("td", { class: "left" }, link(i)),
          make("td", { class: "left" }, link(j)),
          make("td", {}, x.toFixed(2)),
        ),
      ),
    ),
  ];
}

// ---- inputs and versions ----
function provenance() {
  const box = byId("provenance"),
    list = { ...data.inputs, ...data.provenance };
  delete list.command;
  delete list.words;
  box.append(
    make(
      "table",
      { class: "numbers" },
      make(
        "tbody",
        {},
        ...Object.entries(list).map(([key, x]) =>
          make(
            "tr",
            {},
            make("th", { scope: "row" }, key.replaceAll("_", " ")),
            make("td", {}, Array.isArray(x) ? x.join(", ") : String(x)),
          ),
        ),
      ),
    ),
  );
}

// ---- print: the most telling heads ----
function printed() {
  if (!EXCERPT) return;
  byId("print-heads").replaceChildren(
    ...data.telling
      .slice(0, 6)
      .map((i) =>
        make(
          "figure",
          {},
          make("figcaption", {}, make("strong", {}, headName(i)), ` – ${records[i].kind}: ${records[i].description}`),
          overview(records[i].site, records[i].head, { size: 240 }),
        ),
      ),
  );
}
let before = false; // the theme before printing: paper is white
addEventListener("beforeprint", () => {
  before = isDark();
  if (before) theme(false);
  printed();
});
addEventListener("afterprint", () => {
  if (before) theme(true);
});

// ---- all of it ----
theme(matchMedia("(prefers-color-scheme: dark)").matches);
buildMap();
buildTable();
buildTokens();
depth();
similar();
plan();
provenance();
paint();
if (!follow()) choose(chosen, { keep: true });
repaint.push(paint, drawHead, drawTokens, similar);
