// Draws one chart of lines as SVG (ui/run/charts.py sends the points).
//
// plot({label, unit, height, data: [from, to] with values, lines: [{x, mean, low, high, smooth, cls, name}], range, axis, marks, top, onCursor, onRange, onMark})
// returns {node, cursor(x)}. A chart is focusable: arrow keys move the cursor, + and - zoom, Escape shows everything.
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 720;
const EDGE = { right: 14, top: 20, bottom: 30 };
const svg = (tag, attributes, text) => {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
};
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

// Three to six round numbers from low to high; of a time axis, round spans.
const ROUND_TIMES = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400];
function tickValues(low, high, axis) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  let unit = [1, 2, 2.5, 5, 10].map((f) => f * power).find((u) => u >= raw * 0.999);
  if (axis === "time") unit = ROUND_TIMES.find((u) => u >= raw * 0.999) || Math.ceil(raw / 86400) * 86400;
  if (axis === "step") unit = Math.max(1, Math.round(unit));
  const out = [];
  for (let k = Math.floor(low / unit); k <= Math.ceil(high / unit) && out.length < 20; k += 1) out.push(Number((k * unit).toPrecision(10)));
  return out;
}
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

function plot(options) {
  const { lines, range, axis, marks = [], top, label, unit = "" } = options;
  const height = options.height || 240;
  let [low, high] = valueRange(lines);
  if (top) high = Math.max(high, top);
  if (low === high) [low, high] = [low - Math.abs(low) / 10, high + (Math.abs(high) / 10 || 1)];
  const yTicks = tickValues(low, high);
  low = Math.min(low, yTicks[0]);
  high = Math.max(high, yTicks[yTicks.length - 1]);
  const left = Math.max(52, 10 + 15 * Math.max(...yTicks.map((value) => shortNumber(value).length)));
  const [begin, end] = range;
  const toX = (x) => left + ((WIDTH - left - EDGE.right) * (x - begin)) / (end - begin || 1);
  const toY = (y) => EDGE.top + (height - EDGE.top - EDGE.bottom) * (1 - (Math.min(Math.max(y, low), high) - low) / (high - low || 1));
  const fromX = (px) => begin + ((px - left) / (WIDTH - left - EDGE.right)) * (end - begin);
  const last = lines[0].mean.length - 1;
  const summary = lines.map((line) => `${line.name ? line.name + ": " : ""}${shortNumber(line.mean[line.mean.length - 1])}${unit && " " + unit}`);
  const chart = svg("svg", {
    class: `hp-chart ${options.cls || ""}`,
    viewBox: `0 0 ${WIDTH} ${height}`,
    role: marks.some((mark) => mark.incident) ? "group" : "img", // an image has nothing inside that can be focused
    tabindex: "0",
    "aria-label": `${label}, ${position(axis, (options.data || range)[0])} to ${position(axis, (options.data || range)[1])}. Last value ${summary.join("; ")}`,
  });
  for (const value of yTicks) {
    chart.append(svg("line", { class: "hp-gridline", x1: left, x2: WIDTH - EDGE.right, y1: toY(value), y2: toY(value) }));
    chart.append(svg("text", { class: "hp-axis", x: left - 8, y: toY(value) + 4, "text-anchor": "end" }, shortNumber(value)));
  }
  const xTicks = tickValues(begin, end, axis).filter((x) => x >= begin && x <= end);
  for (const x of xTicks) {
    const anchor = toX(x) > WIDTH - 4 * EDGE.right ? "end" : "middle";
    const text = axis === "time" ? timeSpan(x) : x.toLocaleString("en-US");
    chart.append(svg("text", { class: "hp-axis", x: toX(x), y: height - 8, "text-anchor": anchor }, text));
  }
  const path = (xs, ys) => "M" + xs.map((x, n) => `${toX(x).toFixed(1)} ${toY(ys[n]).toFixed(1)}`).join("L");
  for (const line of lines) {
    const cls = line.cls || "";
    if (line.low && line.low.length) {
      const back = [...line.x].reverse();
      const lower = path(back, [...line.low].reverse()).slice(1);
      chart.append(svg("path", { class: `hp-band ${cls}`, d: `${path(line.x, line.high)}L${lower}Z` }));
    }
    chart.append(svg("path", { class: `${line.smooth ? "hp-raw" : "hp-line"} ${cls}`, d: path(line.x, line.mean) }));
    if (line.smooth) chart.append(svg("path", { class: `hp-line ${cls}`, d: path(line.x, smoothed(line.mean, line.smooth)) }));
  }
  // Marks come last, so that a click reaches them.
  for (const mark of marks.filter((one) => one.x >= begin && one.x <= end)) {
    const x = toX(mark.x);
    const group = mark.incident
      ? svg("a", { href: `#incident-${mark.incident}`, class: "hp-mark-link", "aria-label": `Incident ${mark.incident}: ${mark.label}` })
      : svg("g", {});
    group.append(svg("title", {}, mark.label));
    group.append(svg("line", { class: "hp-mark", x1: x, x2: x, y1: EDGE.top, y2: height - EDGE.bottom }));
    group.append(svg("path", { class: "hp-mark-foot", d: `M${x - 5} ${height - EDGE.bottom + 8}h10l-5 -8z` }));
    if (mark.incident) {
      group.append(svg("rect", { class: "hp-mark-hit", x: x - 8, y: EDGE.top, width: 16, height: height - EDGE.top - EDGE.bottom + 8 }));
      group.addEventListener("click", (event) => {
        event.preventDefault();
        if (options.onMark) options.onMark(mark);
      });
    }
    chart.append(group);
  }
  // The cursor, its dots, and the range that a drag selects.
  const cursorLine = svg("line", { class: "hp-cursor", y1: EDGE.top, y2: height - EDGE.bottom, visibility: "hidden" });
  const picked = svg("rect", { class: "hp-picked", y: EDGE.top, height: height - EDGE.top - EDGE.bottom, visibility: "hidden" });
  chart.append(cursorLine, picked);
  const at = (line, x) => {
    if (!line.x.length) return null;
    let [a, b] = [0, line.x.length - 1];
    while (b - a > 1) {
      const middle = (a + b) >> 1;
      if (line.x[middle] < x) a = middle;
      else b = middle;
    }
    return Math.abs(line.x[a] - x) <= Math.abs(line.x[b] - x) ? a : b;
  };
  const cursor = (x) => {
    const show = x !== null && x >= begin && x <= end;
    cursorLine.setAttribute("visibility", show ? "visible" : "hidden");
    if (!show) return [];
    cursorLine.setAttribute("x1", toX(x));
    cursorLine.setAttribute("x2", toX(x));
    return lines.map((line) => {
      const n = at(line, x);
      return n === null ? null : { name: line.name, x: line.x[n], value: line.mean[n] };
    });
  };
  const clamp = (x) => Math.min(Math.max(x, begin), end);
  const pointer = (event) => {
    const box = chart.getBoundingClientRect();
    return clamp(fromX(((event.clientX - box.left) / box.width) * WIDTH));
  };
  let dragged = null;
  let here = null;
  const move = (x) => {
    here = x;
    if (options.onCursor) options.onCursor(x);
  };
  chart.addEventListener("pointermove", (event) => {
    const x = pointer(event);
    if (dragged !== null) {
      const [a, b] = [toX(Math.min(dragged, x)), toX(Math.max(dragged, x))];
      picked.setAttribute("x", a);
      picked.setAttribute("width", b - a);
      picked.setAttribute("visibility", b - a > 6 ? "visible" : "hidden");
    }
    move(x);
  });
  chart.addEventListener("pointerleave", () => dragged === null && move(null));
  chart.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.pointerType === "touch" || event.target.closest(".hp-mark-link")) return;
    dragged = pointer(event);
    chart.setPointerCapture(event.pointerId);
  });
  chart.addEventListener("pointerup", (event) => {
    if (dragged === null) return;
    const [a, b] = [Math.min(dragged, pointer(event)), Math.max(dragged, pointer(event))];
    dragged = null;
    picked.setAttribute("visibility", "hidden");
    if (toX(b) - toX(a) > 6 && options.onRange) options.onRange([a, b]);
  });
  chart.addEventListener("dblclick", () => options.onRange && options.onRange(null));
  chart.addEventListener("blur", () => move(null));
  chart.addEventListener("keydown", (event) => {
    const x = here === null ? lines[0].x[last] : here;
    const step = (end - begin) / 50;
    const zoom = (factor) => {
      const half = ((end - begin) * factor) / 2;
      options.onRange([x - half, x + half]);
    };
    const keys = {
      ArrowLeft: () => move(clamp(x - step)),
      ArrowRight: () => move(clamp(x + step)),
      Home: () => move(begin),
      End: () => move(end),
      "+": () => options.onRange && zoom(0.5),
      "-": () => options.onRange && zoom(2),
      Escape: () => options.onRange && options.onRange(null),
    };
    if (!keys[event.key] || event.target !== chart) return;
    event.preventDefault();
    keys[event.key]();
  });
  return { node: chart, cursor };
}
