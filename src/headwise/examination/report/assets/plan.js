// The plan: the operator chosen for each head, in colours and letters that no kind of head uses, and the trade-off.
const OPERATORS = ["#1b7f79", "#b5651d", "#7a8b00", "#4b6cb7", "#c2185b", "#607d8b", "#00a5bd", "#8d6e63", "#5c6b2f"];
function plan() {
  const found = data.plan;
  if (!found) return;
  byId("plan").hidden = false;
  const all = Object.values(found.sites).flat(),
    kinds = [...new Set(all.map((c) => c.kind))].sort(),
    replaced = kinds.filter((k) => k !== "softmax");
  const codes = {};
  for (const kind of kinds) {
    // the shortest beginning, of two letters or more, that no other operator has
    let length = 2;
    while (length < kind.length && kinds.some((other) => other !== kind && other.startsWith(kind.slice(0, length))))
      length++;
    codes[kind] = kind === "softmax" ? "·" : kind.slice(0, length);
  }
  const colour = (kind) => (kind === "softmax" ? null : OPERATORS[replaced.indexOf(kind) % OPERATORS.length]);
  const paintOperator = (kind) => (colour(kind) ? { background: colour(kind), color: inkOn(parse(colour(kind))) } : {});
  const words = (c) =>
    [
      c.kind.replaceAll("_", " "),
      ...Object.entries(c)
        .filter(([k]) => k !== "kind")
        .map(([k, v]) => `${k} ${v}`),
    ].join(", ");
  const nameOf = (name) => {
    const s = sites.find((x) => x.name === name);
    return s ? s.label : name;
  };
  // a head is [its layer, its number, its operator]
  const heads = Object.entries(found.sites).map(([site, row]) => row.map((c, h) => [nameOf(site), h, c]));
  const badge = (kind, more) =>
    make(
      "span",
      { class: `operator${kind === "softmax" ? " softmax" : ""}`, style: paintOperator(kind), ...more },
      codes[kind],
    );
  headMap(byId("plan-map"), {
    rows: heads,
    names: Object.keys(found.sites).map((name) => ({ name, label: nameOf(name) })),
    cell: ([layer, h, c]) => {
      const text = `${layer} · head ${h}: ${words(c)}`;
      return explain(badge(c.kind, { role: "img", "aria-label": text }), () => text);
    },
  });
  for (const kind of kinds) {
    const name = kind === "softmax" ? "softmax, unchanged" : kind.replaceAll("_", " ");
    const count = all.filter((c) => c.kind === kind).length;
    const words = make("span", {}, make("strong", {}, name), ` ${count}`);
    byId("plan-legend").append(make("div", { class: "entry" }, badge(kind, { "aria-hidden": "true" }), words));
  }
  const drift = (p) => Math.max(0, ...Object.values(p.drift).flatMap((row) => Object.values(row)));
  const tried = Math.max(0, ...found.curve.map((p) => Object.keys(p.drift).length)),
    heldOut = `${tried} ${tried === 1 ? "kind" : "kinds"} of held-out ${WORDS.items}`;
  byId("plan-curve-note").textContent = `Every point is a whole plan, measured on ${heldOut}.`;
  const points = (list) =>
    list
      .filter((p) => drift(p) > 0 && drift(p) < 0.6 && p.cost > 0)
      .sort((a, b) => a.cost - b.cost)
      .map((p) => [Math.log10(p.cost), drift(p)]);
  const series = [{ name: "largest drift", points: points(found.curve) }].filter((s) => s.points.length);
  if (series.length) {
    const xs = series.flatMap((s) => s.points.map((p) => p[0])),
      ticks = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1]
        .map((v) => [Math.log10(v), percent(v)])
        .filter(([v]) => v >= Math.min(...xs) - 0.01 && v <= Math.max(...xs) + 0.01);
    byId("plan-curve").append(
      panel(
        "Drift against cost",
        chart({
          series,
          log: true,
          height: 280,
          x: "attention cost, share of softmax",
          y: "drift",
          ticks,
          name: (v) => percent(10 ** v),
        }),
      ),
    );
  }
  const here = found.curve.find((p) =>
    Object.entries(p.sites).every(([site, row]) =>
      row.every((i, h) => words(found.choices[i]) === words(found.sites[site][h])),
    ),
  );
  byId("plan-note").textContent =
    `Planned for ${found.length} ${WORDS.units} and a drift of at most ${found.tolerance} (${found.measure}).` +
    (here
      ? ` Attention costs ${percent(here.cost)} of softmax; largest drift on ${heldOut} ${format(drift(here))}, bound for a text of another kind ${format(here.bound)}.`
      : " This plan was edited.");
}
