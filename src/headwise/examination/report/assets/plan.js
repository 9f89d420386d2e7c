// The plan: the operator chosen for each head, in colours and letters that no kind of head uses, and the trade-off.
const OPERATORS = ["#332288", "#88CCEE", "#44AA99", "#882255", "#DDCC77", "#117733", "#CC6677", "#AA4499", "#999933"];
function plan() {
  const found = data.plan;
  if (!found) return;
  byId("plan").hidden = false;
  const all = Object.values(found.sites).flat(), kinds = [...new Set(all.map((c) => c.kind))].sort(), replaced = kinds.filter((k) => k !== "softmax");
  const codes = {};
  for (const kind of kinds) {  // the shortest beginning, of two letters or more, that no other operator has
    let length = 2;
    while (length < kind.length && kinds.some((other) => other !== kind && other.startsWith(kind.slice(0, length)))) length++;
    codes[kind] = kind === "softmax" ? "·" : kind.slice(0, length);
  }
  const colour = (kind) => (kind === "softmax" ? null : OPERATORS[replaced.indexOf(kind) % OPERATORS.length]);
  const paintOperator = (kind) => (colour(kind) ? { background: colour(kind), color: inkOn(parse(colour(kind))) } : {});
  const words = (c) => [c.kind.replaceAll("_", " "), ...Object.entries(c).filter(([k]) => k !== "kind").map(([k, v]) => `${k} ${v}`)].join(", ");
  const nameOf = (name) => { const s = sites.find((x) => x.name === name); return s ? s.label : name; };
  const widest = Math.max(...Object.values(found.sites).map((r) => r.length)), body = make("tbody");
  for (const [site, choices] of Object.entries(found.sites)) body.append(make("tr", {}, make("th", { scope: "row", title: site }, nameOf(site)),
    ...choices.map((c, h) => make("td", {}, explain(make("span", { class: `operator${c.kind === "softmax" ? " softmax" : ""}`, style: paintOperator(c.kind), role: "img", "aria-label": `${nameOf(site)}, head ${h}: ${words(c)}` }, codes[c.kind]), () => `${nameOf(site)} · head ${h}: ${words(c)}`)))));
  byId("plan-map").append(make("thead", {}, make("tr", {}, make("td", {}), ...range(widest).map((h) => make("th", { scope: "col" }, String(h))))), body);
  for (const kind of kinds) byId("plan-legend").append(make("div", { class: "entry" }, make("span", { class: `operator${kind === "softmax" ? " softmax" : ""}`, style: paintOperator(kind), "aria-hidden": "true" }, codes[kind]),
    make("span", {}, make("strong", {}, kind === "softmax" ? "softmax, unchanged" : kind.replaceAll("_", " ")), ` ${all.filter((c) => c.kind === kind).length}`)));
  const drift = (p) => (p.test === null ? p.selection : p.test);
  const counts = (found.provenance || {}).texts || [], heldOut = counts.length === 3 ? `${counts[2]} held-out ${counts[2] === 1 ? WORDS.item : WORDS.items}` : `held-out ${WORDS.items}`;
  byId("plan-curve-note").textContent = `Every point is a whole plan, measured on ${heldOut}.`;
  const points = (list) => list.filter((p) => drift(p) > 0 && drift(p) < 0.6 && p.cost > 0).sort((a, b) => a.cost - b.cost).map((p) => [Math.log10(p.cost), drift(p)]);
  const series = [["chosen for each head", found.curve], ["one window", found.baselines.filter((p) => p.name.startsWith("window "))], ["one projection", found.baselines.filter((p) => p.name.startsWith("projected"))]]
    .map(([name, list]) => ({ name, points: points(list) })).filter((s) => s.points.length);
  if (series.length) {
    const xs = series.flatMap((s) => s.points.map((p) => p[0])), ticks = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1].map((v) => [Math.log10(v), percent(v)]).filter(([v]) => v >= Math.min(...xs) - 0.01 && v <= Math.max(...xs) + 0.01);
    byId("plan-curve").append(panel("Drift against cost", chart({ series, log: true, height: 280, x: "attention cost, share of softmax", y: "drift", ticks, name: (v) => percent(10 ** v) })));
  }
  const here = found.curve.find((p) => Object.entries(p.sites).every(([site, row]) => row.every((i, h) => words(found.choices[i]) === words(found.sites[site][h]))));
  byId("plan-note").textContent = `Planned for ${found.length} ${WORDS.units} and a drift of at most ${found.tolerance} (${found.measure}).` + (here ? ` Attention costs ${percent(here.cost)} of softmax; drift on ${heldOut} ${format(drift(here))}.` : " This plan was edited.");
}
