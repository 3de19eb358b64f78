// One chart of lines, drawn by uPlot (ui/vendor). Its node can have the focus: arrow keys move the cursor, + and - zoom, Escape shows
// everything.
const COLOURS = ["--hp-good", "--hp-busy", "--hp-bad", "--hp-warn", "--hp-line-4", "--hp-idle"];
const ROUND_STEPS = Array.from({ length: 24 }, (_, k) => [1, 2, 5][k % 3] * 10 ** Math.floor(k / 3));
const ROUND_TIMES = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, ...ROUND_STEPS.map((days) => days * 86400)];
const LEAST = { step: 4, time: 1 }; // the shortest range
const COLUMNS = 4; // of a line: highest, lowest, mean, smoothed; column 0 of all is where they are
const shortNumber = (value) => {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  return String(Number(value.toPrecision(4)));
};
const timeSpan = (s) => {
  if (s < 60) return `${Math.round(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
};
const position = (axis, x) => (axis === "time" ? timeSpan(x) : `step ${Math.round(x).toLocaleString("en-US")}`);

// An exponential moving average, corrected for its bias towards the first value.
function smoothed(values, weight) {
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}
// One in 200 of the largest values is cut off: a single spike would flatten the rest of the line.
function valueRange(lows, highs) {
  const sorted = [...highs].sort((a, b) => a - b);
  return [lows.reduce((a, b) => Math.min(a, b), Infinity), sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * 0.995))]];
}

/** A chart of `count` lines. onCursor(x or null): the cursor has moved; onRange([from, to] or null): another range is to be shown. */
function plot({ label, unit, count, main, onCursor, onRange }) {
  const node = make("div", `hp-chart ${main ? "hp-main-chart" : ""}`);
  node.tabIndex = 0;
  let shown = { lines: [], axis: "step", all: [0, 1], data: [0, 1], range: [0, 1] };
  let marks = [];
  const layer = make("div", "hp-marks");
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
  const placeMarks = () => {
    for (const { x, node: mark } of marks) {
      mark.hidden = x < shown.range[0] || x > shown.range[1];
      mark.style.left = `${chart.valToPos(x, "x")}px`;
    }
  };
  // A range within the values, or everything where it is too small or has all of them.
  const show = (from, to) => {
    const [low, high] = [Math.max(from, shown.all[0]), Math.min(to, shown.all[1])];
    if (high - low >= LEAST[shown.axis]) onRange(low > shown.all[0] || high < shown.all[1] ? [low, high] : null);
  };
  const select = () => {
    const { left, width } = chart.select;
    if (width > 6) show(chart.posToVal(left, "x"), chart.posToVal(left + width, "x"));
    chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  };
  const cursor = () => (chart.cursor.left >= 0 ? chart.posToVal(chart.cursor.left, "x") : null);
  const size = () => ({ width: Math.max(200, node.clientWidth), height: main ? 240 : 170 });
  const yRange = ({ data, series: [{ idxs }] }) => {
    const inView = (column) => data.filter((_, n) => n % COLUMNS === column).flatMap((line) => line.slice(idxs[0], idxs[1] + 1));
    const known = (values) => values.filter((value) => value !== undefined);
    const [low, high] = valueRange(known(inView(2)), known(inView(1)));
    return high === undefined ? [0, 1] : uPlot.rangeNum(low, Math.max(high, shown.top ?? high), 0.05, true);
  };
  const chart = new uPlot(
    {
      ...size(),
      series,
      bands,
      legend: { show: false },
      scales: { x: { time: false }, y: { range: yRange } },
      axes: [
        {
          ...axisLine,
          incrs: () => (shown.axis === "time" ? ROUND_TIMES : ROUND_STEPS),
          space: 70,
          values: (_, found) => found.map((x) => (shown.axis === "time" ? timeSpan(x) : x.toLocaleString("en-US"))),
        },
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
        bind: { dblclick: () => () => onRange(null), mousemove: (_, __, move) => move }, // also over a mark
        points: { show: (_, at) => at % COLUMNS === 0 },
      },
      hooks: { draw: [placeMarks], setCursor: [() => onCursor(cursor())], setSelect: [select] },
    },
    [[], ...series.slice(1).map(() => [])],
    node
  );
  chart.over.append(layer);
  new ResizeObserver(() => chart.setSize(size())).observe(node);

  const moveTo = (x) => chart.setCursor({ left: chart.valToPos(Math.min(Math.max(x, shown.range[0]), shown.range[1]), "x"), top: 10 }, true, true);
  node.addEventListener("keydown", (event) => {
    const x = cursor() ?? shown.data[1];
    const span = shown.range[1] - shown.range[0];
    const keys = {
      ArrowLeft: () => moveTo(x - span / 50),
      ArrowRight: () => moveTo(x + span / 50),
      "+": () => show(x - span / 4, x + span / 4),
      "-": () => show(x - span, x + span),
      Escape: () => onRange(null),
    };
    if (!keys[event.key] || event.target !== node) return;
    event.preventDefault();
    keys[event.key]();
  });
  node.addEventListener("blur", () => chart.setCursor({ left: -10, top: -10 }, true, true));

  const mark = ({ x, label, incident }) => {
    const made = make(incident ? "a" : "span", "hp-mark", { title: label });
    if (incident) {
      made.href = `#incident-${incident}`;
      made.setAttribute("aria-label", `Incident ${incident}: ${label}`);
      made.addEventListener("click", (event) => {
        event.preventDefault(); // the page has a base address: the link would load it again
        openIncident(incident);
      });
    }
    return { x, node: made };
  };
  let drawnMarks = "";
  const named = (name, value) => [name, shortNumber(value), unit].filter(Boolean).join(" ");
  return {
    node,
    count,
    /** Draw `now`: {lines, axis, all, data and range: [from, to], marks, smooth, top: the least value at the top}. */
    show(now) {
      shown = now;
      const [from, to] = [Math.max(now.range[0], now.data[0]), Math.min(now.range[1], now.data[1])];
      const last = now.lines.map(({ name, x, mean }) => named(name, mean[x.findLastIndex((at) => at <= to)]));
      // An image has nothing inside that can be focused.
      node.setAttribute("role", now.marks.some((one) => one.incident) ? "group" : "img");
      node.setAttribute("aria-label", `${label}, ${position(now.axis, from)} to ${position(now.axis, to)}. Last value ${last.join("; ")}`);
      if (drawnMarks !== JSON.stringify(now.marks)) {
        drawnMarks = JSON.stringify(now.marks);
        marks = now.marks.map(mark);
        layer.replaceChildren(...marks.map((one) => one.node));
      }
      const columns = ({ x, high, low, mean }) => [x, high.length ? high : mean, low.length ? low : mean, mean, smoothed(mean, now.smooth)];
      chart.setData(uPlot.join(now.lines.map(columns)), false);
      chart.setScale("x", { min: now.range[0], max: now.range[1] });
    },
    /** The value of each line at the cursor, as text. */
    values: () =>
      shown.lines.map(({ name }, n) => {
        const mean = COLUMNS * n + 3;
        return `${label} ${named(name && `(${name})`, chart.data[mean][chart.cursor.idxs[mean]])}`;
      }),
  };
}
function openIncident(number) {
  const report = document.getElementById(`incident-${number}`);
  if (!report) return;
  for (const details of report.querySelectorAll("details")) details.open = true;
  report.scrollIntoView({ block: "start" });
  report.tabIndex = -1;
  report.focus();
}
