// Pictures, all drawn as SVG: heat maps with axes and a colour bar, and small charts.
const label = (text, x, y, more = {}) => draw("text", { x, y, ...more }, text);
const clip = (text, length) => ([...text].length > length ? [...text].slice(0, length - 1).join("") + "…" : text);

// Pixels as an image for an SVG: colour(row, column) is [r, g, b].
function bitmap(rows, columns, colour) {
  const canvas = make("canvas", { width: columns, height: rows }),
    context = canvas.getContext("2d"),
    image = context.createImageData(columns, rows);
  for (let r = 0, at = 0; r < rows; r++)
    for (let c = 0; c < columns; c++, at += 4) {
      const [red, green, blue] = colour(r, c);
      image.data[at] = red;
      image.data[at + 1] = green;
      image.data[at + 2] = blue;
      image.data[at + 3] = 255;
    }
  context.putImageData(image, 0, 0);
  return canvas.toDataURL();
}

// Five numbers under (or beside) a strip of their colours.  ticks: [[place from 0 to 1, text]]
function colourBar(svg, { x, y, height, ticks, title, colour }) {
  const steps = 32;
  for (const i of range(steps))
    svg.append(
      draw("rect", {
        x,
        y: y + height * (1 - (i + 1) / steps),
        width: 10,
        height: height / steps + 0.5,
        fill: css(colour((i + 0.5) / steps)),
      }),
    );
  svg.append(draw("rect", { class: "frame", x, y, width: 10, height, fill: "none" }));
  for (const [t, text] of ticks) svg.append(label(text, x + 14, y + height * (1 - t) + 4));
  svg.append(label(title, x, y - 8, { class: "label" }));
}

/* A matrix as a picture.  rows, columns: number of cells; colour(r, c); xTicks, yTicks: [[cell, text]]; x, y: titles of the axes;
   bar: see colourBar; point(r, c): text for a cell; pick(r, c): on a click; marks: [{row, column, rows, columns}] frames;
   size: of the longer side with square cells, or wide and tall. */
function heatMap({
  rows,
  columns,
  colour,
  xTicks = [],
  yTicks = [],
  x = "",
  y = "",
  bar = null,
  point = null,
  pick = null,
  marks = [],
  size = 320,
  wide = null,
  tall = null,
  slanted = false,
  left = 52,
  title = "",
}) {
  const top = slanted ? 74 : 30,
    aside = slanted ? 34 : 14,
    right = bar ? aside + 56 : 10,
    bottom = 8;
  const cell = size / Math.max(rows, columns),
    width = wide || cell * columns,
    height = tall || cell * rows,
    cw = width / columns,
    ch = height / rows;
  const svg = draw("svg", {
    viewBox: `0 0 ${Math.ceil(left + width + right)} ${Math.ceil(top + height + bottom)}`,
    role: "img",
    "aria-label": title || `${y} against ${x}`,
    class: "heat",
  });
  svg.append(
    draw("image", {
      class: "pixels",
      x: left,
      y: top,
      width,
      height,
      preserveAspectRatio: "none",
      href: bitmap(rows, columns, colour),
    }),
  );
  for (const [at, text] of xTicks)
    svg.append(
      slanted
        ? label(text, 0, 0, { transform: `translate(${left + (at + 0.5) * cw + 3},${top - 5}) rotate(-60)` })
        : label(text, left + (at + 0.5) * cw, top - 5, { "text-anchor": "middle" }),
    );
  for (const [at, text] of yTicks)
    svg.append(label(text, left - 5, top + (at + 0.5) * ch + 3.5, { "text-anchor": "end" }));
  svg.append(label(x, left + width / 2, 11, { "text-anchor": "middle", class: "label" }));
  svg.append(
    label(y, 0, 0, {
      "text-anchor": "middle",
      class: "label",
      transform: `translate(11,${top + height / 2}) rotate(-90)`,
    }),
  );
  for (const m of marks)
    svg.append(
      draw("rect", {
        class: "mark",
        x: left + m.column * cw,
        y: top + m.row * ch,
        width: m.columns * cw,
        height: m.rows * ch,
        fill: "none",
      }),
    );
  if (bar)
    colourBar(svg, {
      x: left + width + aside,
      y: top + (height > 60 ? 12 : 0),
      height: Math.max(40, Math.min(height - 12, 180)),
      ...bar,
    });
  svg.style.maxWidth = `${Math.ceil(1.3 * (left + width + right))}px`;
  if (point || pick) {
    const area = draw("rect", { class: "area", x: left, y: top, width, height, fill: "transparent" });
    const find = (event) => {
      const box = area.getBoundingClientRect();
      return [
        clamp(Math.floor(((event.clientY - box.top) / box.height) * rows), 0, rows - 1),
        clamp(Math.floor(((event.clientX - box.left) / box.width) * columns), 0, columns - 1),
      ];
    };
    if (point) explain(area, (event) => point(...find(event)));
    if (pick) {
      area.classList.add("pick");
      area.addEventListener("click", (event) => pick(...find(event)));
    }
    svg.append(area);
  }
  return svg;
}
// About `count` evenly spaced whole numbers below n.
const evenly = (n, count = 5) => {
  const raw = Math.max(1, n / count),
    base = 10 ** Math.floor(Math.log10(raw)),
    step = [1, 2, 5, 10].map((k) => k * base).find((s) => s >= raw) || raw;
  return range(Math.ceil(n / step)).map((k) => k * step);
};

const nice = (low, high) => {
  const raw = (high - low) / 4,
    base = 10 ** Math.floor(Math.log10(raw)),
    step = [1, 2, 2.5, 5, 10].map((k) => k * base).find((x) => x >= raw);
  return range(9)
    .map((k) => (Math.ceil(low / step) + k) * step)
    .filter((x) => x <= high + 1e-9 * step);
};
// 10⁻⁶; 0.01, 1 and 100 as they are
const power = (x) => {
  const e = Math.round(Math.log10(x));
  return e > -3 && e < 4
    ? String(Number(x.toPrecision(1)))
    : `10${[...String(e)].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c])).join("")}`;
};

// Lines or bars.  series: [{name, points: [[x, y]]}]; log: logarithmic y; unit: of y.
const LINE = ["var(--line-1)", "var(--line-2)", "var(--line-3)", "var(--line-4)"],
  DASH = ["", "6 3", "2 3", "8 3 2 3"];
function chart({
  series = [],
  bars = null,
  log = false,
  height = 200,
  x = "",
  y = "",
  unit = "",
  ticks = null,
  name = null,
}) {
  const width = 400,
    left = 62,
    bottom = 36,
    top = 10 + (series.length > 1 ? 16 * Math.ceil(series.length / 2) : 0),
    right = 12;
  const svg = draw("svg", {
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": `${y} against ${x}`,
    class: "chart",
  });
  const points = bars || series.flatMap((s) => s.points);
  const ys = points.map((p) => p[1]).filter((v) => known(v) && (!log || v > 0));
  if (!ys.length) {
    svg.append(label("nothing to draw", width / 2, height / 2, { "text-anchor": "middle" }));
    return svg;
  }
  const floor = Math.min(...ys),
    ceiling = Math.max(...ys);
  const ends = log ? [Math.log10(floor) - 0.05, Math.log10(ceiling) + 0.05] : [Math.min(0, floor), ceiling || 1];
  const xs = points.map((p) => p[0]),
    first = Math.min(...xs),
    last = Math.max(...xs),
    pad = bars ? 0.5 : 0;
  const px = (v) => left + ((v - first + pad) / (last - first + 2 * pad || 1)) * (width - left - right);
  const py = (v) =>
    height -
    bottom -
    (((log ? Math.log10(Math.max(v, floor)) : v) - ends[0]) / (ends[1] - ends[0] || 1)) * (height - bottom - top);
  svg.style.maxWidth = `${1.2 * width}px`;
  let marks = log
    ? range(60)
        .map((i) => i - 40)
        .filter((e) => e >= ends[0] && e <= ends[1])
        .map((e) => 10 ** e)
    : nice(...ends);
  const few = log && marks.length < 2;
  if (few) marks = [floor, ceiling];
  if (marks.length > 7) marks = marks.filter((_, i) => i % Math.ceil(marks.length / 6) === 0);
  for (const mark of marks) {
    svg.append(draw("line", { class: "grid", x1: left, x2: width - right, y1: py(mark), y2: py(mark) }));
    svg.append(label(log && !few ? power(mark) : format(mark, unit), left - 6, py(mark) + 4, { "text-anchor": "end" }));
  }
  const shown = ticks || [...new Set([first, Math.round((first + last) / 2), last])].map((v) => [v, String(v)]);
  for (const [at, text] of shown) svg.append(label(text, px(at), height - bottom + 14, { "text-anchor": "middle" }));
  svg.append(label(x, (left + width - right) / 2, height - 6, { "text-anchor": "middle", class: "label" }));
  svg.append(
    label(y, 0, 0, {
      "text-anchor": "middle",
      class: "label",
      transform: `translate(11,${(top + height - bottom) / 2}) rotate(-90)`,
    }),
  );
  const say = (s, at, v) => `${series.length > 1 ? `${s.name}, ` : ""}${x} ${name ? name(at) : at}: ${format(v, unit)}`;
  if (bars) {
    const wide = ((width - left - right) / (last - first + 1)) * 0.8,
      zero = py(Math.max(0, ends[0]));
    for (const [at, v] of bars) {
      const end = py(v);
      svg.append(
        explain(
          draw("rect", {
            x: px(at) - wide / 2,
            y: Math.min(zero, end),
            width: wide,
            height: Math.max(0.5, Math.abs(zero - end)),
            fill: v < 0 ? LINE[1] : LINE[0],
          }),
          () => say({}, at, v),
        ),
      );
    }
  }
  series.forEach((s, i) => {
    const path = s.points
      .filter((p) => known(p[1]))
      .map((p, k) => `${k ? "L" : "M"}${px(p[0]).toFixed(1)},${py(p[1]).toFixed(1)}`)
      .join("");
    svg.append(
      draw("path", { d: path, fill: "none", stroke: LINE[i % 4], "stroke-width": 2, "stroke-dasharray": DASH[i % 4] }),
    );
    for (const p of s.points)
      if (known(p[1]))
        svg.append(
          explain(
            draw("circle", { cx: px(p[0]), cy: py(p[1]), r: s.points.length > 30 ? 2 : 3.5, fill: LINE[i % 4] }),
            () => say(s, ...p),
          ),
        );
    if (series.length > 1) {
      const lx = left + (i % 2) * 165,
        ly = 14 + 16 * Math.floor(i / 2);
      svg.append(
        draw("line", {
          x1: lx,
          x2: lx + 24,
          y1: ly - 4,
          y2: ly - 4,
          stroke: LINE[i % 4],
          "stroke-width": 2,
          "stroke-dasharray": DASH[i % 4],
        }),
      );
      svg.append(label(s.name, lx + 29, ly, { class: "label" }));
    }
  });
  return svg;
}
