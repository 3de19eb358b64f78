// One chart of lines, drawn by uPlot (ui/vendor). Its node can have the focus: arrow keys move the cursor, + and - zoom, Escape shows
// everything.
const COLOURS = ["--hp-good", "--hp-busy", "--hp-bad", "--hp-warn", "--hp-line-4", "--hp-idle"];
const ROUND_STEPS = Array.from({ length: 24 }, (_, k) => [1, 2, 5][k % 3] * 10 ** Math.floor(k / 3));
const ROUND_TIMES = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, ...ROUND_STEPS.map((days) => days * 86400)];
const LEAST = { step: 4, time: 1 }; // the shortest range
const COLUMNS = 4; // of a line: highest, lowest, mean, smoothed
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
function valueRange(lines) {
  const lows = lines.flatMap((line) => (line.low && line.low.length ? line.low : line.mean));
  const highs = lines.flatMap((line) => (line.high && line.high.length ? line.high : line.mean));
  const low = lows.reduce((a, b) => Math.min(a, b), Infinity);
  // One in 200 of the largest values is cut off: a single spike would flatten the rest of the line.
  const sorted = [...highs].sort((a, b) => a - b);
  return [low, sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * 0.995))]];
}

/** The points of a line within a range. */
function cut({ x, mean, low, high, ...line }, [from, to]) {
  const kept = x.flatMap((at, n) => (at >= from && at <= to ? [n] : []));
  const of = (values) => (values.length ? kept.map((n) => values[n]) : []);
  return { ...line, x: of(x), mean: of(mean), low: of(low), high: of(high) };
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
    const common = { spanGaps: true, points: { show: false } };
    bands.push({ series: [series.length, series.length + 1], fill: () => `${stroke()}29` });
    series.push({ ...common, width: 0 }, { ...common, width: 0 }, { ...common, stroke: () => `${stroke()}80`, width: 1 }, { ...common, stroke, width: 2 });
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
  const yRange = () => {
    const [low, high] = valueRange(shown.lines);
    return uPlot.rangeNum(low, Math.max(high, shown.top ?? high), 0.05, true);
  };
  const chart = new uPlot(
    {
      ...size(),
      series,
      bands,
      legend: { show: false },
      scales: { x: { time: false }, y: { range: () => (shown.lines.some(({ x }) => x.length) ? yRange() : [0, 1]) } },
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
        event.preventDefault();
        openIncident(incident);
      });
    }
    return { x, node: made };
  };
  let drawnMarks = "";
  return {
    node,
    count,
    label,
    unit,
    /** Draw `now`: {lines, axis, all, data and range: [from, to], marks, smooth, top: the least value at the top}. */
    show(now) {
      shown = { ...now, lines: now.lines.map((line) => cut(line, now.range)) };
      const last = shown.lines.map((line) => `${line.name ? line.name + ": " : ""}${shortNumber(line.mean.at(-1))}${unit && " " + unit}`);
      const [from, to] = [Math.max(now.range[0], now.data[0]), Math.min(now.range[1], now.data[1])];
      // An image has nothing inside that can be focused.
      node.setAttribute("role", now.marks.some((one) => one.incident) ? "group" : "img");
      node.setAttribute("aria-label", `${label}, ${position(now.axis, from)} to ${position(now.axis, to)}. Last value ${last.join("; ")}`);
      if (drawnMarks !== JSON.stringify(now.marks)) {
        drawnMarks = JSON.stringify(now.marks);
        marks = now.marks.map(mark);
        layer.replaceChildren(...marks.map((one) => one.node));
      }
      const columns = ({ high, low, mean }) => [high, low, mean, now.smooth ? smoothed(mean, now.smooth) : mean];
      const full = (line) => columns(line).map((values) => (values.length ? values : line.x.map(() => null)));
      chart.setData(uPlot.join(shown.lines.map((line) => [line.x, ...full(line)])), false);
      chart.setScale("x", { min: now.range[0], max: now.range[1] });
    },
    /** [name of the line, its value at x], for each line. */
    values(x) {
      const nearest = (xs) => xs.reduce((best, one, n) => (Math.abs(one - x) < Math.abs(xs[best] - x) ? n : best), 0);
      return shown.lines.map((line) => [line.name, line.mean[nearest(line.x)]]);
    },
  };
}
function openIncident(number) {
  const report = document.getElementById(`incident-${number}`);
  if (!report) return;
  const details = report.querySelector("details");
  if (details) details.open = true;
  report.scrollIntoView({ block: "start" });
  report.tabIndex = -1;
  report.focus();
}
