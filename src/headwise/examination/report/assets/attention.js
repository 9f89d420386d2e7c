// The attention of every head on the excerpt: decoded from the page's bytes, at the resolution of single tokens where stored.
const EXCERPT = data.excerpt && data.excerpt.sites ? data.excerpt : null;
const bytesOf = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const edge = (k, cells, length) => Math.floor((k * length) / cells);
const cellOf = (at, cells, length) => {
  let k = Math.floor((at * cells) / length);
  while (edge(k + 1, cells, length) <= at) k++;
  return k;
};

function excerptTools(excerpt) {
  const cache = new Map();
  const tokenNames = (site) => {
    const both = (excerpt.tokens || []).length === site.keys && site.queries === site.keys ? excerpt.tokens : [];
    return { queries: site.query_tokens || both, keys: site.key_tokens || both };
  };
  function numbers(text) {
    // 255 for each 255, then the rest
    const found = [];
    let sum = 0;
    for (const byte of bytesOf(text)) {
      sum += byte;
      if (byte < 255) {
        found.push(sum);
        sum = 0;
      }
    }
    return found;
  }
  function head(s, h) {
    // the map of a head, its links, and the mean of the weights without a link in every cell
    const key = s * 65536 + h;
    if (cache.has(key)) return cache.get(key);
    const site = excerpt.sites[s],
      { rows, columns, queries, keys } = site,
      top = site.top[h];
    const means = Float32Array.from(bytesOf(site.maps[h]), (b) => (b / 255) ** 2 * top);
    const found = { site, means, rest: means, starts: null };
    if (site.links) {
      const { counts, gaps, weights } = site.links[h],
        many = numbers(counts),
        gap = numbers(gaps);
      found.weights = Float32Array.from(bytesOf(weights), (b) => (b / 255) ** 2);
      found.keys = new Uint32Array(gap.length);
      found.starts = new Uint32Array(many.length + 1);
      const size = (k, cells, length) => edge(k + 1, cells, length) - edge(k, cells, length);
      const sums = means.map(
        (x, at) => x * size(Math.floor(at / columns), rows, queries) * size(at % columns, columns, keys),
      );
      const left = Float32Array.from(
        means,
        (_, at) => size(Math.floor(at / columns), rows, queries) * size(at % columns, columns, keys),
      );
      const columnOf = Uint32Array.from(range(keys), (j) => cellOf(j, columns, keys));
      for (let i = 0, at = 0; i < many.length; i++) {
        const row = cellOf(i, rows, queries) * columns;
        for (let k = 0, j = 0; k < many[i]; k++, at++) {
          j += gap[at];
          found.keys[at] = j;
          sums[row + columnOf[j]] -= found.weights[at];
          left[row + columnOf[j]] -= 1;
        }
        found.starts[i + 1] = at;
      }
      found.rest = sums.map((x, at) => (left[at] > 0 ? clamp(x / left[at], 0, excerpt.threshold) : 0));
    }
    cache.set(key, found);
    return found;
  }
  function weights(s, h, query, from = 0, to = excerpt.sites[s].keys) {
    // of one query on the keys from … to - 1
    const { site, means, rest, starts, keys, weights } = head(s, h),
      out = new Float32Array(to - from);
    const linked = starts && query < starts.length - 1,
      row = cellOf(query, site.rows, site.queries) * site.columns;
    for (let j = from; j < to; j++) out[j - from] = (linked ? rest : means)[row + cellOf(j, site.columns, site.keys)];
    if (linked)
      for (let at = starts[query]; at < starts[query + 1]; at++)
        if (keys[at] >= from && keys[at] < to) out[keys[at] - from] = weights[at];
    return out;
  }
  function received(s, h, key) {
    // what every query gives to one key
    const { site, means, rest, starts, keys, weights } = head(s, h),
      column = cellOf(key, site.columns, site.keys);
    return Float32Array.from(range(site.queries), (i) => {
      const linked = starts && i < starts.length - 1;
      if (linked) for (let at = starts[i]; at < starts[i + 1]; at++) if (keys[at] === key) return weights[at];
      return (linked ? rest : means)[cellOf(i, site.rows, site.queries) * site.columns + column];
    });
  }
  const single = (s) => {
    const site = excerpt.sites[s];
    return site.rows === site.queries && site.columns === site.keys;
  };
  // is this weight known for this very pair, rather than as the mean of a cell?
  const exact = (s, query, w) => single(s) || (query < (excerpt.linked || 0) && w > (excerpt.threshold || 0));
  return { head, weights, received, tokenNames, single, exact };
}
const ATTENTION = EXCERPT && excerptTools(EXCERPT);
const shortToken = (name, length = 12) => clip(name.replace(/^[Ġ▁]/, "").replace(/^Ċ$/, "⏎") || "␣", length);

// "47 “whale”", or the number alone where positions have no name
const nameToken = (names, at) => (names.length ? `“${names[at]}” (${at})` : `${WORDS.unit} ${at}`);
const cellWords = (names, from, to) => (to - from === 1 ? nameToken(names, from) : `${WORDS.units} ${from}–${to - 1}`);
// A square-root scale up to `top`, with five numbers
const rootBar = (top) => ({
  title: "weight",
  colour: ramp,
  ticks: [0, 0.25, 0.5, 0.75, 1].map((t) => [t, percent(t * t * top)]),
});

// The whole excerpt by cells.
function overview(s, h, options = {}, tools = ATTENTION) {
  const { site, means } = tools.head(s, h),
    top = options.top || site.top[h],
    names = tools.tokenNames(site);
  const { rows, columns, queries, keys } = site;
  const ticks = (length, cells) => evenly(length).map((at) => [(at * cells) / length - 0.5, String(at)]);
  return heatMap({
    rows,
    columns,
    colour: (r, c) => ramp(Math.sqrt(means[r * columns + c] / top)),
    x: "key",
    y: "query",
    xTicks: ticks(keys, columns),
    yTicks: ticks(queries, rows),
    bar: rootBar(top),
    title: "Attention on the excerpt: queries down, keys across",
    point: (r, c) =>
      `${cellWords(names.queries, edge(r, rows, queries), edge(r + 1, rows, queries))} → ${cellWords(names.keys, edge(c, columns, keys), edge(c + 1, columns, keys))}: ${percent(means[r * columns + c])}${rows < queries ? " on average" : ""}`,
    ...options,
  });
}
// The same without axes, for small multiples; one image each.
const thumbnail = (s, h) => {
  const { site, means } = ATTENTION.head(s, h);
  return bitmap(site.rows, site.columns, (r, c) => ramp(Math.sqrt(means[r * site.columns + c] / site.top[h])));
};
// Room for a picture with the names of tokens at its sides, and which of `count` names fit in.
const isNarrow = () => innerWidth < 700;
const room = () => (isNarrow() ? { size: 236, left: 78 } : { size: 440, left: 92 });
const fitting = (count, pixels) => {
  const every = Math.max(1, Math.ceil((count * 10.5) / pixels));
  return range(count).filter((i) => i % every === 0);
};
// A window of single tokens: queries from q, keys from k, `size` of each.
function windowMap(s, h, q, k, size, query, pick, key = null) {
  const site = EXCERPT.sites[s],
    names = ATTENTION.tokenNames(site);
  const rows = Math.min(size, site.queries - q),
    columns = Math.min(size, site.keys - k);
  const weights = range(rows).map((r) => ATTENTION.weights(s, h, q + r, k, k + columns));
  const top = Math.max(...weights.map((row) => Math.max(...row)), 1e-6);
  const { size: pixels, left } = room(),
    cell = pixels / Math.max(rows, columns);
  const ticks = (list, from, count) =>
    fitting(count, cell * count).map((i) => [i, list.length ? shortToken(list[from + i]) : String(from + i)]);
  return heatMap({
    rows,
    columns,
    colour: (r, c) => ramp(Math.sqrt(weights[r][c] / top)),
    x: "key",
    y: "query",
    size: pixels,
    left,
    slanted: true,
    xTicks: ticks(names.keys, k, columns),
    yTicks: ticks(names.queries, q, rows),
    bar: rootBar(top),
    title: `Attention between single ${WORDS.units}: queries down, keys across`,
    point: (r, c) =>
      `${nameToken(names.queries, q + r)} → ${nameToken(names.keys, k + c)}: ${percent(weights[r][c])}${ATTENTION.exact(s, q + r, weights[r][c]) ? "" : ", mean of the weaker weights around it"}`,
    pick: (r, c) => pick(q + r, k + c),
    marks: [
      ...(known(query) && query >= q && query < q + rows ? [{ row: query - q, column: 0, rows: 1, columns }] : []),
      ...(known(key) && key >= k && key < k + columns ? [{ row: 0, column: key - k, rows, columns: 1 }] : []),
    ],
  });
}
// The weights of one token in every head: a row for each head, the tokens of the window across.
function everyHead({ rows, axis, from, heads, names, chosen, pick, title }) {
  const columns = rows[0].length,
    at = heads.findIndex((x) => x.index === chosen);
  const { size: wide, left } = room(),
    tall = clamp(heads.length * 14, 40, 500),
    first = (i) => i === 0 || heads[i - 1].site !== heads[i].site;
  const begins = heads.map((_, i) => i).filter(first),
    named = begins.length > 1 ? begins : range(heads.length),
    fit = fitting(named.length, tall);
  return heatMap({
    rows: heads.length,
    columns,
    wide,
    tall,
    left,
    slanted: true,
    x: axis,
    y: "head",
    colour: (r, c) => ramp(Math.sqrt(rows[r][c])),
    xTicks: fitting(columns, wide).map((i) => [i, names.length ? shortToken(names[from + i]) : String(from + i)]),
    yTicks: fit.map((k) => [named[k], heads[named[k]].label]),
    bar: rootBar(1),
    title,
    point: (r, c) => `${heads[r].full}, ${axis} ${nameToken(names, from + c)}: ${percent(rows[r][c])}`,
    pick: (r) => pick(heads[r].index),
    marks: at >= 0 ? [{ row: at, column: 0, rows: 1, columns }] : [],
  });
}
