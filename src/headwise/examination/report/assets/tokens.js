// Tokens: a window of the excerpt, where one token attends or what attends to it, in one head and in every head.
let token = null,
  start = { q: 0, k: 0 },
  everyLayer = records.length <= 160;
const windowSize = () => Number(byId("size").value);
function moveWindow(q, k) {
  const half = Math.floor(windowSize() / 2);
  token = q;
  start = { q: q - half, k: k - half };
  drawTokens();
  byId("tokens").scrollIntoView({ block: "start" });
}
const addressToken = () => history.replaceState(null, "", `${address(chosen)}/token.${token}`);
function setToken(at) {
  token = at;
  addressToken();
  drawTokens();
}
function buildTokens() {
  if (!EXCERPT) {
    byId("tokens-section").hidden = true;
    return;
  }
  for (const id of ["from", "size"])
    byId(id).addEventListener("input", () => {
      const q = Number(byId("from").value);
      start = { q, k: q };
      drawTokens();
    });
  if (isNarrow()) byId("size").value = "16";
  byId("direction").addEventListener("change", drawTokens);
  byId("layer-choice").append(...sites.map((_, s) => make("option", { value: s }, siteLabel(s))));
  byId("layer-choice").addEventListener("change", (event) => choose(rows[Number(event.target.value)][0]));
  byId("scope").value = everyLayer ? "all" : "layer";
  byId("scope").addEventListener("change", (event) => {
    everyLayer = event.target.value === "all";
    drawTokens();
  });
  const site = EXCERPT.sites[0],
    cells = site.rows < site.queries || site.columns < site.keys;
  byId("left-out").textContent =
    (EXCERPT.threshold === undefined
      ? `Every weight between two ${WORDS.units} of ${excerptName()} is stored, with 8 bits.`
      : `Stored of ${excerptName()}, with 8 bits: every weight above ${percent(EXCERPT.threshold)}${EXCERPT.linked < site.queries ? ` of the first ${EXCERPT.linked} queries` : ""}; smaller ones are left out and shown by the mean of their cell${cells ? ` (about ${Math.round(site.queries / site.rows)} × ${Math.round(site.keys / site.columns)} ${WORDS.units})` : ""}.`) +
    (data.inputs.kind === "text" || !data.inputs.kind
      ? ' To look at a sentence of your own: headwise examine --excerpt "…".'
      : "");
}
function drawTokens() {
  if (!EXCERPT) return;
  const { site: s, head: h } = records[chosen],
    site = EXCERPT.sites[s],
    size = windowSize(),
    names = ATTENTION.tokenNames(site);
  const limit = Math.max(0, site.queries - size),
    limitKeys = Math.max(0, site.keys - size),
    incoming = byId("direction").value === "in";
  const count = incoming ? site.keys : site.queries; // of tokens to choose from
  if (token === null || token >= count) token = Math.min(count - 1, Math.max(1, Math.floor(Math.min(size, count) / 3)));
  start = { q: clamp(start.q, 0, limit), k: clamp(start.k, 0, limitKeys) };
  byId("from").max = Math.max(limit, limitKeys);
  byId("from").value = start.q;
  byId("from").disabled = limit === 0 && limitKeys === 0;
  const last = (from, length) => Math.min(from + size, length) - 1;
  byId("where").textContent =
    `queries ${start.q}–${last(start.q, site.queries)}, keys ${start.k}–${last(start.k, site.keys)} of ${site.keys}`;
  byId("layer-choice").value = s;
  byId("multiples").replaceChildren(
    ...rows[s].map((i) =>
      make(
        "button",
        {
          type: "button",
          class: "thumb",
          "aria-pressed": String(i === chosen),
          "aria-label": `${headName(i)}: ${records[i].kind}`,
          onclick: () => choose(i),
        },
        make("img", { src: thumbnail(s, records[i].head), alt: "" }),
        make("span", {}, `${records[i].head} `, swatch(records[i].kind)),
      ),
    ),
  );
  // the chosen token on one side, the others with their weights on the other
  const own = incoming ? names.keys : names.queries,
    others = incoming ? names.queries : names.keys,
    from = incoming ? start.q : start.k;
  const of = (i, j) => (incoming ? ATTENTION.received(i, j, token) : ATTENTION.weights(i, j, token));
  const weights = of(s, h),
    title = incoming ? `What attends to ${nameToken(own, token)}` : `Where ${nameToken(own, token)} attends`;
  const exact = (j) => (incoming ? ATTENTION.exact(s, j, weights[j]) : ATTENTION.exact(s, token, weights[j]));
  byId("window").replaceChildren(
    panel(
      `${headLabel(chosen)} between single ${WORDS.units}`,
      windowMap(
        s,
        h,
        start.q,
        start.k,
        size,
        incoming ? null : token,
        (q, k) => setToken(incoming ? k : q),
        incoming ? token : null,
      ),
      `Click a ${incoming ? "column" : "row"} to choose a ${incoming ? "key" : "query"}.`,
    ),
  );
  byId("reading").replaceChildren(
    reading({ site, own, others, weights, from, ownFrom: incoming ? start.k : start.q, title }),
    strongest({ others, weights, exact, incoming }),
  );
  // heads of other sequences (an encoder's, beside a decoder's) have other queries and keys
  const alike = (other) =>
    other.queries === site.queries &&
    other.keys === site.keys &&
    String(other.query_tokens) === String(site.query_tokens) &&
    String(other.key_tokens) === String(site.key_tokens);
  const heads = (everyLayer ? range(records.length).filter((i) => alike(EXCERPT.sites[records[i].site])) : rows[s]).map(
    (i) => ({
      index: i,
      site: records[i].site,
      head: records[i].head,
      label: everyLayer ? siteLabel(records[i].site) : String(records[i].head),
      full: headName(i),
    }),
  );
  const all = `${title}, in every head${everyLayer ? "" : ` of ${siteLabel(s)}`}`;
  byId("every").replaceChildren(
    panel(
      all,
      everyHead({
        rows: heads.map((x) => of(x.site, x.head).slice(from, from + size)),
        axis: incoming ? "query" : "key",
        from,
        heads,
        names: others,
        chosen,
        pick: (i) => choose(i),
        title: all,
      }),
      "A row for each head, in the order of the layers; click one to choose it.",
    ),
  );
}
// The text of the window, shaded by the weights of the chosen token; an image as a grid of patches.
function reading({ site, own, others, weights, from, ownFrom, title }) {
  const self = site.queries === site.keys && !site.query_tokens,
    size = windowSize(),
    peak = Math.max(...weights, 1e-9);
  const grid = others.map((x) => /^(\d+)\s*,\s*(\d+)$/.exec(x)),
    patches = grid.filter(Boolean).length > 3 && grid.filter((x) => !x).length <= 5;
  const shade = (j) => {
    const rgb = ramp(Math.sqrt(weights[j] / peak));
    return { background: css(rgb), color: inkOn(rgb) };
  };
  const words = (names, j) => (names.length ? shortToken(names[j], 24) : String(j));
  const choice = (j) =>
    explain(
      make(
        "button",
        {
          type: "button",
          class: "token",
          "aria-label": nameToken(own, j),
          "aria-pressed": String(j === token),
          onclick: () => setToken(j),
        },
        words(own, j),
      ),
      () => nameToken(own, j),
    );
  const weighed = (j, text) =>
    explain(
      make(
        "button",
        {
          type: "button",
          class: "token",
          "aria-label": `${nameToken(others, j)}: weight ${percent(weights[j])}`,
          style: shade(j),
          ...(self ? { "aria-pressed": String(j === token) } : {}),
          onclick: () => {
            if (self) setToken(j);
          },
        },
        text,
      ),
      () => `${nameToken(others, j)}: ${percent(weights[j])}`,
    );
  const part = (first, length) => range(length).filter((j) => j >= first && j < first + size);
  const box = make("div", { class: "reading" }, make("h3", {}, title));
  if (patches && self) {
    const field = make("div", {
      class: "patches",
      style: { gridTemplateColumns: `repeat(${1 + Math.max(...grid.filter(Boolean).map((x) => Number(x[2])))}, 1fr)` },
    });
    grid.forEach((x, j) => {
      if (x) {
        const cell = weighed(j, "");
        Object.assign(cell.style, { gridRow: Number(x[1]) + 1, gridColumn: Number(x[2]) + 1 });
        field.append(cell);
      }
    });
    box.append(
      make("p", { class: "text" }, ...grid.flatMap((x, j) => (x ? [] : [weighed(j, words(others, j))]))),
      field,
    );
  } else if (self)
    box.append(make("p", { class: "text" }, ...part(from, weights.length).map((j) => weighed(j, words(others, j)))));
  else {
    const incoming = byId("direction").value === "in",
      choices = make("p", { class: "text" }, ...part(ownFrom, incoming ? site.keys : site.queries).map(choice)),
      found = make("p", { class: "text" }, ...part(from, weights.length).map((j) => weighed(j, words(others, j))));
    box.append(
      make("h4", {}, incoming ? "Keys" : "Queries"),
      choices,
      make("h4", {}, incoming ? "Queries" : "Keys"),
      found,
    );
  }
  return box;
}
function strongest({ others, weights, exact, incoming }) {
  const order = range(weights.length)
      .sort((a, b) => weights[b] - weights[a])
      .filter(exact)
      .slice(0, 8),
    sum = order.reduce((x, j) => x + weights[j], 0);
  if (!order.length)
    return make(
      "p",
      { class: "soft" },
      incoming
        ? `No query gives it more than ${percent(EXCERPT.threshold || 0)}.`
        : `No single key gets more than ${percent(EXCERPT.threshold || 0)}: this query spreads its attention.`,
    );
  return make(
    "div",
    {},
    make(
      "h4",
      {},
      incoming ? "Queries that attend to it most" : `Strongest keys: ${percent(Math.min(1, sum))} of the weight`,
    ),
    make(
      "ol",
      { class: "strongest" },
      ...order.map((j) =>
        make(
          "li",
          {},
          make("span", { class: "name" }, nameToken(others, j)),
          make("span", { class: "length", style: { width: `${clamp(100 * weights[j], 1, 100)}%` } }),
          make("span", { class: "figure" }, percent(weights[j])),
        ),
      ),
    ),
  );
}
