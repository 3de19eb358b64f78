// The charts of a run, drawn by uPlot (ui/vendor). The value is what ui/run/charts.py makes of its numbers, again and
// again while it trains, as JSON: {run, all, data, lines, marks, table}; {run: ""} where there is nothing. Every text
// is set with textContent. A chart can have the focus: arrow keys move the cursor, + and - zoom, Escape shows
// everything.
const COLOURS = ["--hp-good", "--hp-busy", "--hp-bad", "--hp-warn", "--hp-line-4", "--hp-idle"];
const ROUND_STEPS = Array.from({ length: 24 }, (_, k) => [1, 2, 5][k % 3] * 10 ** Math.floor(k / 3));
const LEAST_STEPS = 4; // the shortest range
const COLUMNS = 4; // of a line: highest, lowest, mean, smoothed; column 0 of all is where they are
const charts = new Map(); // by the key of a quantity, such as the loss
let value = {};
let range = null; // null: everything

const section = make("section", "hp-section");
const slider = make("input", "", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0.9", oninput: () => draw() });
const reset = button("Show everything", "hp-quiet", () => zoom());
const bar = make("div", "hp-chart-bar", [make("label", "hp-chart-smooth", [make("span", "", "Smoothing"), slider]), reset]);
const readout = live("p", "hp-chart-readout", "status");
const place = make("div", "hp-charts");
const none = make("p", "hp-none", "The charts appear after two steps.");
const table = make("div");
const fold = make("details", "hp-chart-table", [make("summary", "", "Values as a table"), table]);
const hint = make("p", "hp-hint", "Drag across a chart to zoom in; double-click to show everything. With the keyboard: arrow keys, +, - and Escape.");
const note = make("span", "", "band: lowest to highest · thin line: mean · thick line: smoothed");
section.append(make("h3", "", ["Charts", note]), bar, readout, place, none, fold, hint);

const shortNumber = (number) => {
  if (number === null || number === undefined || !Number.isFinite(number)) return "–";
  const size = Math.abs(number);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return Number(number.toPrecision(3)).toExponential().replace("e+", "e");
  return String(Number(number.toPrecision(4)));
};
const stepText = (x) => `step ${Math.round(x).toLocaleString("en-US")}`;
const span = () => (range || value.all)[1] - (range || value.all)[0];

// An exponential moving average, corrected for its bias towards the first value.
function smoothed(values, weight) {
  let mean = 0;
  let total = 0;
  return values.map((number) => {
    mean = weight * mean + (1 - weight) * number;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}
// One in 200 of the largest values is cut off: a single spike would flatten the rest of the line.
function valueRange(lows, highs) {
  const sorted = [...highs].sort((a, b) => a - b);
  return [lows.reduce((a, b) => Math.min(a, b), Infinity), sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * 0.995))]];
}
// Show a range within the steps; everything where it has all of them, and no change where it is too small.
function zoom(from = -Infinity, to = Infinity) {
  const [low, high] = [Math.max(from, value.all[0]), Math.min(to, value.all[1])];
  if (high - low < LEAST_STEPS && from !== -Infinity) return;
  range = low > value.all[0] || high < value.all[1] ? [low, high] : null;
  draw();
}
// The values under the cursor, which is at the same step in all charts, and what happened near it.
function readCursor(x) {
  const near = x === null ? [] : value.marks.filter((mark) => Math.abs(mark.x - x) <= span() / 100);
  const values = x === null ? [] : [...charts.values()].flatMap((chart) => chart.values());
  readout.textContent = values.length ? `${stepText(x)}: ${[...values, ...near.map((mark) => mark.label)].join(" · ")}` : "";
}

/** A chart of `count` lines of one quantity. */
function plot({ key, label, unit }, count) {
  const main = key === "loss";
  const node = make("div", `hp-chart ${main ? "hp-main-chart" : ""}`, { tabIndex: 0, role: "img" });
  let lines = [];
  const colour = (name) => getComputedStyle(node).getPropertyValue(name).trim();
  const axisLine = { stroke: () => colour("--body-text-color-subdued"), grid: { stroke: () => colour("--border-color-primary"), width: 1 } };
  const series = [{}];
  const bands = [];
  for (let n = 0; n < count; n += 1) {
    const stroke = () => colour(COLOURS[n % COLOURS.length]);
    const points = { show: false };
    bands.push({ series: [series.length, series.length + 1], fill: () => `${stroke()}29` });
    series.push({ points, width: 0 }, { points, width: 0 }, { points, stroke: () => `${stroke()}80`, width: 1 }, { points, stroke, width: 2 });
  }
  const drawMarks = ({ ctx, bbox, valToPos }) => {
    ctx.fillStyle = colour("--hp-warn");
    for (const x of value.marks.map((mark) => valToPos(mark.x, "x", true)))
      if (main && x >= bbox.left && x <= bbox.left + bbox.width) ctx.fillRect(x, bbox.top, devicePixelRatio, bbox.height);
  };
  const select = () => {
    const { left, width } = chart.select;
    if (width > 6) zoom(chart.posToVal(left, "x"), chart.posToVal(left + width, "x"));
    chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  };
  const cursor = () => (chart.cursor.left >= 0 ? chart.posToVal(chart.cursor.left, "x") : null);
  const size = () => ({ width: Math.max(200, node.clientWidth), height: main ? 240 : 170 });
  const yRange = ({ data, series: [{ idxs }] }) => {
    const inView = (column) => data.filter((_, n) => n % COLUMNS === column).flatMap((line) => line.slice(idxs[0], idxs[1] + 1));
    const known = (values) => values.filter((number) => number !== undefined);
    const [low, high] = valueRange(known(inView(2)), known(inView(1)));
    const top = key === "utilization" ? 100 : (lines[0]?.top ?? high);
    return high === undefined ? [0, 1] : uPlot.rangeNum(low, Math.max(high, top), 0.05, true);
  };
  const chart = new uPlot(
    {
      ...size(),
      series,
      bands,
      legend: { show: false },
      scales: { x: { time: false }, y: { range: yRange } },
      axes: [
        { ...axisLine, incrs: ROUND_STEPS, space: 70, values: (_, found) => found.map((x) => x.toLocaleString("en-US")) },
        {
          ...axisLine,
          values: (_, found) => found.map(shortNumber),
          size: (_, texts) => 16 + 8 * Math.max(0, ...(texts || []).map((text) => text.length)),
        },
      ],
      cursor: {
        y: false,
        sync: { key: "hangproof", scales: ["x", null] },
        drag: { setScale: false },
        bind: { dblclick: () => () => zoom() },
        points: { show: (_, at) => at % COLUMNS === 0 },
      },
      hooks: { draw: [drawMarks], setCursor: [() => readCursor(cursor())], setSelect: [select] },
    },
    [[], ...series.slice(1).map(() => [])],
    node
  );
  new ResizeObserver(() => chart.setSize(size())).observe(node);

  const moveTo = (x) => {
    const [from, to] = range || value.all;
    chart.setCursor({ left: chart.valToPos(Math.min(Math.max(x, from), to), "x"), top: 10 }, true, true);
  };
  node.addEventListener("keydown", (event) => {
    const x = cursor() ?? value.data[1];
    const keys = {
      ArrowLeft: () => moveTo(x - span() / 50),
      ArrowRight: () => moveTo(x + span() / 50),
      "+": () => zoom(x - span() / 4, x + span() / 4),
      "-": () => zoom(x - span(), x + span()),
      Escape: () => zoom(),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  node.addEventListener("blur", () => chart.setCursor({ left: -10, top: -10 }, true, true));

  const named = (name, number) => [name, shortNumber(number), unit].filter(Boolean).join(" ");
  return {
    node,
    count,
    show(now) {
      lines = now;
      const [from, to] = range || value.all;
      const [first, last] = [Math.max(from, value.data[0]), Math.min(to, value.data[1])];
      const values = lines.map(({ name, x, mean }) => named(count > 1 && name, mean[x.findLastIndex((at) => at <= last)]));
      const marked = main && value.marks.length ? [`Marked: ${value.marks.map((mark) => mark.label).join("; ")}`] : [];
      node.ariaLabel = [`${label}, ${stepText(first)} to ${stepText(last)}`, `Last value ${values.join("; ")}`, ...marked].join(". ");
      const weight = main ? Number(slider.value) : 0;
      const columns = ({ x, high, low, mean }) => [x, high.length ? high : mean, low.length ? low : mean, mean, smoothed(mean, weight)];
      chart.setData(uPlot.join(lines.map(columns)), false);
      chart.setScale("x", { min: from, max: to });
    },
    /** The value of each line at the cursor, as text. */
    values: () =>
      lines.map(({ name }, n) => {
        const mean = COLUMNS * n + 3;
        return `${label} ${named(count > 1 && `(${name})`, chart.data[mean][chart.cursor.idxs[mean]])}`;
      }),
  };
}
// One chart for each quantity; the GPUs of a quantity share it. A chart stays while its lines grow, with its focus.
function draw() {
  const before = value.run;
  value = { lines: [], marks: [], ...JSON.parse(props.value || "{}") };
  if (value.run !== before) range = null;
  section.hidden = !value.run;
  section.dataset.run = value.run;
  none.hidden = value.lines.length > 0;
  for (const one of [bar, fold, hint, readout]) one.hidden = !value.lines.length;
  reset.hidden = !range;
  table.innerHTML = value.table || ""; // the server has escaped it (ui/html.py)
  const groups = Map.groupBy(value.lines, (line) => line.key);
  for (const [key, chart] of charts) {
    if (groups.get(key)?.length === chart.count) continue;
    chart.node.closest("figure").remove();
    charts.delete(key);
  }
  [...groups].forEach(([key, lines], n) => {
    if (!charts.has(key)) {
      const { label, unit } = lines[0];
      charts.set(key, plot(lines[0], lines.length));
      const caption = make("figcaption", "", [label, ...(unit ? [make("span", "", unit)] : [])]);
      const figure = make("figure", key === "loss" ? "hp-figure hp-wide" : "hp-figure", [caption, charts.get(key).node]);
      place.insertBefore(figure, place.children[n] ?? null);
    }
    charts.get(key).show(lines);
  });
}
// A canvas has the colours with which it was drawn. Gradio changes the page's to those of the system.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTimeout(draw, 200));
element.replaceChildren(section);
watch("value", draw);
draw();
