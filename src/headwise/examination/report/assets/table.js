/* A table of heads that can be sorted, filtered and given other columns.

   column: {name, label, unit, meaning, group, value(i), show(i)?, left?}; rows are 0 … count - 1.
   A filter is a list such as "sink, layer.4, entropy < 2, sink mass >= 30 %": all of it must hold. */
function headTable({ table, count, columns, shown, choose, changed = () => {} }) {
  const byName = Object.fromEntries(columns.map((c) => [c.name, c]));
  const state = { shown: shown.filter((name) => byName[name]), sort: null, down: false, filter: "", chosen: -1 };
  const searchable = columns.filter((c) => c.left);
  const plain = (text) => text.toLowerCase().replaceAll("_", " ").trim();

  function condition(text) {
    const parts = /^(.+?)\s*(<=|>=|<|>|=)\s*(-?[\d.]+(?:e-?\d+)?)\s*(%?)$/i.exec(text.trim());
    if (parts) {
      const wanted = plain(parts[1]),
        limit = Number(parts[3]) / (parts[4] ? 100 : 1);
      const column =
        columns.find((c) => plain(c.name) === wanted || plain(c.label) === wanted) ||
        columns.find((c) => plain(c.label).includes(wanted) || plain(c.name).includes(wanted));
      if (!column) return () => false;
      const holds = {
        "<": (x) => x < limit,
        ">": (x) => x > limit,
        "<=": (x) => x <= limit,
        ">=": (x) => x >= limit,
        "=": (x) => x === limit,
      }[parts[2]];
      return (i) => {
        const x = column.number ? column.number(i) : column.value(i);
        return known(x) && holds(x);
      };
    }
    const word = plain(text);
    return (i) => searchable.some((c) => plain(String(c.value(i))).includes(word));
  }
  const matching = () => {
    const conditions = state.filter
      .split(",")
      .filter((x) => x.trim())
      .map(condition);
    return range(count).filter((i) => conditions.every((holds) => holds(i)));
  };
  const sorted = (rows) => {
    if (!state.sort) return rows;
    const { value, number } = byName[state.sort],
      of = number || value,
      sign = state.down ? -1 : 1;
    return rows
      .map((i) => [of(i), i])
      .sort(([a, i], [b, j]) => {
        if (!known(a) || !known(b)) return known(a) ? -1 : known(b) ? 1 : i - j;
        return (a < b ? -sign : a > b ? sign : 0) || i - j;
      })
      .map(([, i]) => i);
  };
  const lines = new Map();

  function heading(column) {
    const ordered = state.sort === column.name;
    const button = make(
      "button",
      {
        type: "button",
        class: "sort",
        onclick: () => {
          // the larger numbers first, words from A
          if (ordered) state.down = !state.down;
          else {
            state.sort = column.name;
            state.down = !column.left && !column.ascending;
          }
          render();
          table.querySelector(`th[data-name="${CSS.escape(column.name)}"] button`).focus();
        },
      },
      column.heading || column.label,
      make("span", { class: "arrow", "aria-hidden": "true" }, ordered ? (state.down ? "▾" : "▴") : ""),
    );
    if (column.meaning) explain(button, column.meaning);
    const unit = column.unit && column.unit !== "share" ? make("span", { class: "unit" }, column.unit) : null;
    return make(
      "th",
      {
        scope: "col",
        "data-name": column.name,
        class: column.left ? "left" : null,
        "aria-sort": ordered ? (state.down ? "descending" : "ascending") : "none",
      },
      button,
      unit,
    );
  }
  function render() {
    const columnsNow = state.shown.map((name) => byName[name]).filter(Boolean),
      rows = sorted(matching());
    lines.clear();
    const body = make("tbody");
    for (const i of rows) {
      const line = make("tr", { "data-i": i, class: i === state.chosen ? "chosen" : null, onclick: () => choose(i) });
      columnsNow.forEach((column, k) => {
        const found = column.value(i),
          content = column.show ? column.show(i) : typeof found === "string" ? found : format(found, column.unit);
        if (k === 0)
          line.append(
            make(
              "th",
              { scope: "row", class: "left" },
              make(
                "button",
                { type: "button", class: "row", tabindex: -1, "aria-pressed": String(i === state.chosen) },
                content,
              ),
            ),
          );
        else
          line.append(
            make("td", { class: column.left ? "left" : null }, ...(Array.isArray(content) ? content : [content])),
          );
      });
      lines.set(i, line);
      body.append(line);
    }
    table.replaceChildren(make("thead", {}, make("tr", {}, ...columnsNow.map(heading))), body);
    const reachable = lines.get(state.chosen) || lines.get(rows[0]);
    if (reachable) reachable.querySelector("button.row").tabIndex = 0;
    changed(rows);
  }
  function select(i, scroll) {
    for (const [j, mine] of [
      [state.chosen, false],
      [i, true],
    ]) {
      const line = lines.get(j);
      if (!line) continue;
      line.classList.toggle("chosen", mine);
      const button = line.querySelector("button.row");
      button.setAttribute("aria-pressed", String(mine));
      button.tabIndex = mine ? 0 : -1;
    }
    state.chosen = i;
    const line = lines.get(i),
      box = table.parentElement;
    if (line && scroll && box.scrollHeight > box.clientHeight) {
      const head = table.tHead.offsetHeight,
        above = line.offsetTop - head,
        below = line.offsetTop + line.offsetHeight - box.clientHeight;
      if (box.scrollTop > above) box.scrollTop = above;
      else if (box.scrollTop < below) box.scrollTop = below;
    }
  }
  table.addEventListener("keydown", (event) => {
    const line = event.target.closest("tbody tr"),
      step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!line || !step) return;
    event.preventDefault();
    const next = step > 0 ? line.nextElementSibling : line.previousElementSibling;
    if (!next) return;
    choose(Number(next.dataset.i), true);
    next.querySelector("button.row").focus();
  });
  const cells = () => [
    state.shown.map((name) => byName[name].label + (byName[name].unit ? ` (${byName[name].unit})` : "")),
    ...sorted(matching()).map((i) => state.shown.map((name) => byName[name].value(i))),
  ];
  return {
    render,
    select,
    cells,
    matching,
    filter: (text) => {
      state.filter = text;
      render();
    },
    sort: (name, down) => {
      state.sort = name;
      state.down = down;
      render();
    },
    has: (name) => state.shown.includes(name),
    show: (name, yes) => {
      state.shown = columns.map((c) => c.name).filter((x) => (x === name ? yes : state.shown.includes(x)));
      render();
    },
  };
}

// A list of all columns in groups, each with its definition and a box to show it.
function columnChooser(box, table, columns) {
  const groups = [...new Set(columns.map((c) => c.group))];
  for (const group of groups) {
    box.append(make("h4", {}, group));
    for (const column of columns.filter((c) => c.group === group)) {
      const input = make("input", { type: "checkbox", onchange: () => table.show(column.name, input.checked) });
      input.checked = table.has(column.name);
      box.append(
        make(
          "label",
          { class: "column" },
          input,
          make(
            "span",
            {},
            make("strong", {}, column.label),
            column.unit ? ` (${column.unit})` : "",
            column.meaning ? make("span", { class: "soft" }, ` – ${column.meaning}`) : null,
          ),
        ),
      );
    }
  }
}

/* A map of heads: a row for each layer, a cell for each of its heads.  rows: lists of indices; names: [{label, name}] of the
   rows; cell(i): what stands in the cell.  Arrow keys, Home and End move from `chosen()` by `move(i)`. */
function headMap(table, { rows, names, cell, chosen = null, move = null }) {
  const widest = Math.max(...rows.map((row) => row.length));
  const head = range(widest).map((h) => make("th", { scope: "col" }, String(h)));
  const body = rows.map((row, s) =>
    make(
      "tr",
      {},
      make("th", { scope: "row", title: names[s].name }, names[s].label),
      ...row.map((i) => make("td", {}, cell(i))),
    ),
  );
  table.style.minWidth = `${4 + 1.45 * widest}rem`;
  const corner = make("td", {}, make("span", { class: "corner" }, "head →"));
  table.append(make("thead", {}, make("tr", {}, corner, ...head)), make("tbody", {}, ...body));
  if (!move) return;
  table.addEventListener("keydown", (event) => {
    const s = rows.findIndex((row) => row.includes(chosen()));
    const h = rows[s].indexOf(chosen()),
      end = rows[s].length - 1;
    const steps = {
      ArrowLeft: [0, -1],
      ArrowRight: [0, 1],
      ArrowUp: [-1, 0],
      ArrowDown: [1, 0],
      Home: [0, -h],
      End: [0, end - h],
    };
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    const next = rows[clamp(s + step[0], 0, rows.length - 1)];
    move(next[clamp(h + step[1], 0, next.length - 1)]);
  });
}

// The list "colour by": kinds first, then the measures in their groups.
function colourChoices(select, kinds, measured) {
  const groups = new Map([["Kind", kinds]]);
  for (const x of measured) groups.set(x.group, [...(groups.get(x.group) || []), x]);
  for (const [group, list] of groups) {
    const options = list.map((x) => make("option", { value: x.name }, x.label + (x.unit ? ` (${x.unit})` : "")));
    select.append(make("optgroup", { label: group }, ...options));
  }
}

// ---- addresses of heads: #layer.4/head.5, with /token.17 for a token ----
const headAddress = (label, head) => `#${encodeURIComponent(label)}/head.${head}`;
function readAddress(hash) {
  const parts = /^#(.+)\/head\.(\d+)(?:\/token\.(\d+))?$/.exec(hash);
  if (!parts) return null;
  let layer = parts[1];
  try {
    layer = decodeURIComponent(layer);
  } catch {
    // a stray percent sign: as it stands
  }
  return { layer, head: Number(parts[2]), token: parts[3] === undefined ? null : Number(parts[3]) };
}
