// Heads over training steps: a map at one step, lines of one head, and all of it as one picture.
const { heads, steps, measures, values, losses, alarms } = data;
const MEASURES = Object.fromEntries(measures.map((m) => [m.name, m]));
let chosen = 0, now = steps.length - 1, measure = measures[0].name;

const title = (name) => name.replaceAll("_", " ");
const headName = (i) => `${heads[i].label} · head ${heads[i].head}`;
const alarmed = new Set(alarms.map((a) => `${a.place}/${a.index}`));
// the number of a head at a step, or, of a measure that is taken now and then, the last one before; and its step
const at = (name, i, s) => {
  for (let t = s; t >= 0; t--) {
    const x = values[name][t][i];
    if (known(x)) return [x, t];
    if (name !== "effective_rank") break;
  }
  return [null, s];
};
// One scale for all steps, so that a colour means the same at each; where a few numbers are far above the others, one
// that is linear up to the median and logarithmic beyond it.
const scaleOf = (name) => {
  const sorted = values[name].flat().filter(known).sort((a, b) => a - b);
  const low = sorted[0], high = sorted[sorted.length - 1], middle = sorted[Math.floor(sorted.length / 2)];
  const log = middle > 0 && high / middle > 10, f = log ? (x) => Math.asinh(x / middle) : (x) => x, inverse = log ? (y) => middle * Math.sinh(y) : (y) => y;
  const place = (x) => (high > low ? (f(x) - f(low)) / (f(high) - f(low)) : 0.5);
  return { place, log, ticks: [0, 0.25, 0.5, 0.75, 1].map((t) => [t, inverse(f(low) + t * (f(high) - f(low)))]), empty: !sorted.length };
};
const scales = {};
const scaled = (name) => (scales[name] = scales[name] || scaleOf(name));

// ---- map ----
const layers = [...new Set(heads.map((h) => h.layer))].map((layer) => range(heads.length).filter((i) => heads[i].layer === layer));
function buildMap() {
  const widest = Math.max(...layers.map((l) => l.length));
  const top = make("tr", {}, make("td", { class: "corner" }, "head"), ...range(widest).map((h) => make("th", { scope: "col" }, String(h))));
  const body = layers.map((row) => make("tr", {}, make("th", { scope: "row", title: heads[row[0]].layer }, heads[row[0]].label),
    ...row.map((i) => make("td", {}, explain(make("button", { type: "button", class: "head", "data-i": i, onclick: () => choose(i, now, true) }), () => sentence(i))))));
  byId("map").append(make("thead", {}, top), make("tbody", {}, ...body));
  byId("map").addEventListener("keydown", (event) => {
    const l = layers.findIndex((row) => row.includes(chosen)), h = layers[l].indexOf(chosen);
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    const row = layers[clamp(l + move[0], 0, layers.length - 1)];
    choose(row[clamp(h + move[1], 0, row.length - 1)], now, true);
  });
}
function sentence(i) {
  const [x, t] = at(measure, i, now), unit = MEASURES[measure].unit;
  const when = t === now ? "" : ` (of step ${steps[t]})`;
  return `${headName(i)}: ${title(measure)} ${known(x) ? format(x, unit) : "not measured"}${when}${alarmed.has(`${now}/${i}`) ? ", alarm" : ""}`;
}
const short = (x, unit) => {
  const size = Math.abs(x);
  return unit === "share" ? String(Math.round(100 * x)) : size >= 1000 ? `${Math.round(x / 1000)}k` : x.toFixed(size >= 10 ? 0 : 1);
};
function paintMap() {
  const { place, empty } = scaled(measure), unit = MEASURES[measure].unit;
  for (const button of byId("map").querySelectorAll("button")) {
    const i = Number(button.dataset.i), [x] = at(measure, i, now), rgb = known(x) ? ramp(place(x)) : null;
    button.style.background = rgb ? css(rgb) : "transparent";
    button.style.color = rgb ? inkOn(rgb) : "inherit";
    button.textContent = alarmed.has(`${now}/${i}`) ? "!" : known(x) ? short(x, unit) : "–";
    button.setAttribute("aria-label", sentence(i));
    button.setAttribute("aria-pressed", String(i === chosen));
    button.tabIndex = i === chosen ? 0 : -1;
  }
  byId("legend").replaceChildren(...(empty ? [] : [
    make("div", { class: "ramp", style: { background: gradient(ramp) } }),
    make("div", { class: "ticks" }, ...scaled(measure).ticks.map(([, x]) => make("span", {}, format(x, unit)))),
  ]), make("span", { class: "soft" }, `${title(measure)}: ${MEASURES[measure].meaning}${unit === "share" ? "; in per cent on the map" : ""}.${scaled(measure).log ? " Logarithmic colours." : ""}`));
}

// ---- one head ----
function paintDetail() {
  const unit = MEASURES[measure].unit, line = range(steps.length).map((s) => [steps[s], values[measure][s][chosen] ?? null]);
  const [x, t] = at(measure, chosen, now);
  const mine = alarms.filter((a) => a.index === chosen);
  const series = [{ name: headName(chosen), points: line }];
  if (known(x)) series.push({ name: `step ${steps[now]}`, points: [[steps[t], x]] });
  for (const kind of new Set(mine.map((a) => a.kind))) {
    const alarm = mine.find((a) => a.kind === kind), value = at(measure, chosen, alarm.place)[0];
    if (known(value)) series.push({ name: `alarm: ${kind}`, points: [[alarm.step, value]] });
  }
  const rows = measures.map((m) => {
    const [value, when] = at(m.name, chosen, now);
    return make("tr", { title: m.meaning }, make("th", { scope: "row" }, title(m.name) + (when === now || !known(value) ? "" : ` (step ${steps[when]})`)),
      make("td", {}, format(value, m.unit) + (known(value) && m.unit && m.unit !== "share" ? ` ${m.unit}` : "")));
  });
  byId("detail").replaceChildren(make("div", { class: "two" },
    make("div", { class: "stack" },
      panel(`${title(measure)}, ${headName(chosen)}`, chart({ series, log: scaled(measure).log, x: "step", y: title(measure), unit }), scaled(measure).log ? "Logarithmic." : null),
      losses.length ? panel("Loss", chart({ series: [{ name: "loss", points: losses }], x: "step", y: "loss", height: 150 })) : null),
    make("div", {},
      make("h3", {}, headName(chosen)), make("p", { class: "soft" }, `Step ${steps[now]}.`),
      ...mine.map((a) => make("p", {}, make("strong", {}, `Step ${a.step}, ${a.kind}. `), a.message)),
      make("table", { class: "numbers" }, make("tbody", {}, ...rows)))));
}

// ---- everything ----
function paintOverview() {
  const { place, ticks, empty } = scaled(measure), unit = MEASURES[measure].unit;
  if (empty) { byId("overview").replaceChildren(make("p", { class: "soft" }, "Not measured.")); return; }
  const blank = isDark() ? [23, 27, 32] : [255, 255, 255];
  const yTicks = layers.filter((_, k) => k % Math.ceil(layers.length / 24) === 0).map((row) => [row[0], clip(heads[row[0]].label, 12)]);
  const marks = alarms.map((a) => ({ row: a.index, column: a.place, rows: 1, columns: 1 }));
  marks.push({ row: 0, column: now, rows: heads.length, columns: 1 });
  const picture = heatMap({
    rows: heads.length, columns: steps.length, left: 92, wide: 620, tall: clamp(heads.length * 8, 90, 420),
    colour: (i, s) => { const [x] = at(measure, i, s); return known(x) ? ramp(place(x)) : blank; },
    xTicks: evenly(steps.length, 6).map((s) => [s, String(steps[s])]), yTicks, x: "step", y: "heads by layer",
    bar: { ticks: ticks.map(([t, x]) => [t, format(x, unit)]), title: "", colour: ramp },
    point: (i, s) => `${headName(i)}, step ${steps[s]}: ${format(at(measure, i, s)[0], unit)}`,
    pick: (i, s) => choose(i, s, false), marks, title: `${title(measure)} of every head at every measured step`,
  });
  const figure = panel(`${title(measure)} over steps`, picture, data.left_out ? `${data.left_out} measurements without an alarm are left out of this page; history.json has all.` : null);
  figure.style.maxWidth = "none";
  picture.style.minWidth = "640px";  // a narrow screen scrolls
  byId("overview").replaceChildren(figure);
}

function choose(i, s, focus) {
  chosen = i; now = s;
  byId("step").value = s;
  byId("step").setAttribute("aria-valuetext", `step ${steps[s]}`);
  const loss = losses.filter(([step]) => step <= steps[s]).pop();
  byId("step-name").textContent = `${steps[s]}${loss && known(loss[1]) ? `, loss ${format(loss[1])}` : ""}`;
  paintMap(); paintDetail(); paintOverview();
  if (focus) byId("map").querySelector(`button[data-i="${i}"]`).focus();
}

const listed = alarms.slice(0, 24);
byId("alarm-list").append(
  ...(alarms.length ? [make("ul", {}, ...listed.map((a) => make("li", {}, make("button", { type: "button", class: "link", onclick: () => choose(a.index, a.place, false) }, `Step ${a.step}`), ` ${a.kind}: ${a.message}`)))]
    : [make("p", {}, "Scores stayed finite, and no head's logits, entropy or rank changed as if training were about to fail.")]),
  alarms.length > listed.length ? make("p", { class: "soft" }, `and ${alarms.length - listed.length} more, in the picture below and in history.json.`) : "");
byId("measure").append(...measures.map((m) => make("option", { value: m.name }, title(m.name))));
byId("measure").addEventListener("change", (event) => { measure = event.target.value; choose(chosen, now, false); });
byId("step").max = steps.length - 1;
byId("step").addEventListener("input", (event) => choose(chosen, Number(event.target.value), false));
buildMap();
if (alarms.length) { chosen = alarms[0].index; now = alarms[0].place; }
repaint.push(() => choose(chosen, now, false));
theme(matchMedia("(prefers-color-scheme: dark)").matches);
