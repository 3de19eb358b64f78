// The charts of a run (ui/run/charts.py). The value is {run, revision, share}; the points are asked for when the revision changes and
// the charts are on the screen. Every text is set with textContent.
const ASK_S = 5; // between two questions while the run trains
const MAIN = ["loss"];
let run = "";
let shown = null; // the answer that is drawn
let answered = ""; // the question that it answers
let range = null; // null: everything
let axis = "step";
let asking = false;
let dirty = false;
let asked_ms = 0;
let visible = false;
const charts = new Map(); // by the key of a quantity, such as the loss
const current = () => props.value || { run: "", revision: "", share: 1 };
const question = () => ({ run: current().run, axis, from: range ? range[0] : null, to: range ? range[1] : null });

const section = make("section", "hp-section");
const heading = make("h3", "", "Charts");
const note = make("span");
heading.append(note);
const bar = make("div", "hp-chart-bar");
const axes = make("fieldset", "hp-chart-axes");
axes.append(make("legend", "hp-visually-hidden", "Horizontal axis"));
for (const [key, text] of [["step", "Steps"], ["time", "Time"]]) {
  const label = make("label");
  const radio = make("input");
  radio.type = "radio";
  radio.name = "hp-chart-axis";
  radio.value = key;
  radio.checked = key === axis;
  radio.addEventListener("change", () => {
    axis = key;
    range = null;
    ask(true);
  });
  label.append(radio, make("span", "", text));
  axes.append(label);
}
const smoothing = make("label", "hp-chart-smooth");
const slider = make("input", "", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0.9" });
slider.addEventListener("input", () => draw());
smoothing.append(make("span", "", "Smoothing"), slider);
const reset = button("Show everything", "hp-quiet", () => zoom(null));
reset.hidden = true;
const readout = live("p", "hp-chart-readout", "status");
bar.append(axes, smoothing, reset);
const place = make("div", "hp-charts");
const none = make("p", "hp-none", "The charts appear after two steps.");
const fold = make("details", "hp-chart-table");
fold.append(make("summary", "", "Values as a table"));
const table = make("div");
fold.append(table);
fold.addEventListener("toggle", drawTable);
section.append(heading, bar, readout, place, none, fold);
const hint = make("p", "hp-hint", "Drag across a chart to zoom in; double-click to show everything. With the keyboard: arrow keys, +, - and Escape.");
section.append(hint);

function zoom(next) {
  if (next) {
    const [low, high] = shown.all;
    next = [Math.max(low, next[0]), Math.min(high, next[1])];
    const least = axis === "step" ? 4 : 1;
    if (next[1] - next[0] < least || (next[0] <= low && next[1] >= high)) next = next[1] - next[0] < least ? range : null;
  }
  range = next;
  ask(true);
}
function readCursor() {
  const [main] = charts.values();
  const x = main ? main.cursor() : null;
  const named = (chart, [name, value]) => `${chart.label}${name ? ` (${name})` : ""} ${shortNumber(value)}${chart.unit && " " + chart.unit}`;
  const parts = x === null ? [] : [...charts.values()].flatMap((chart) => chart.values().map((found) => named(chart, found)));
  readout.textContent = parts.length ? `${position(axis, x)}: ${parts.join(" · ")}` : "";
}
function openIncident(mark) {
  const report = document.getElementById(`incident-${mark.incident}`);
  if (!report) return;
  const details = report.querySelector("details");
  if (details) details.open = true;
  report.scrollIntoView({ block: "start" });
  report.tabIndex = -1;
  report.focus();
}
// One chart for each quantity; the GPUs of a quantity share it. A chart stays while its lines grow: so do the focus and a drag.
function draw() {
  const lines = shown ? shown.lines : [];
  none.hidden = lines.length > 0;
  for (const one of [bar, fold, hint, readout]) one.hidden = !lines.length;
  reset.hidden = !range;
  const groups = new Map();
  for (const line of lines) groups.set(line.key, [...(groups.get(line.key) || []), line]);
  for (const [key, chart] of charts) {
    if (groups.get(key)?.length === chart.count) continue;
    chart.node.closest("figure").remove();
    charts.delete(key);
  }
  for (const [key, group] of groups) {
    const main = MAIN.includes(key);
    const [{ label, unit, top }] = group;
    if (!charts.has(key)) {
      charts.set(key, plot({ label, unit, count: group.length, main, onCursor: readCursor, onRange: zoom, onMark: openIncident }));
      place.append(figure(charts.get(key), main));
    }
    charts.get(key).show({
      lines: group.map((line) => ({ ...line, name: group.length > 1 ? line.name : "" })),
      axis,
      range: shown.range,
      data: shown.data,
      marks: main ? shown.marks : [],
      smooth: main ? Number(slider.value) : 0,
      top: key === "utilization" ? 100 : top,
    });
  }
  drawTable();
}
function figure({ node, label, unit }, main) {
  const caption = make("figcaption", "", [label, ...(unit ? [make("span", "", unit)] : [])]);
  return make("figure", main ? "hp-figure hp-wide" : "hp-figure", [caption, node]);
}
function drawTable() {
  if (fold.open && shown) table.innerHTML = shown.table; // the server has escaped it (ui/html.py)
}

async function ask(now) {
  const asked = question();
  const text = JSON.stringify(asked);
  if (!asked.run || (!visible && !now)) return;
  if (!now && text === answered && shown.revision === current().revision && shown.share === 1) {
    dirty = false;
    return;
  }
  if (asking || (!now && Date.now() - asked_ms < ASK_S * 1000)) {
    dirty = true;
    return;
  }
  asking = true;
  dirty = false;
  asked_ms = Date.now();
  const answer = await server.chart_data(asked).catch(() => null);
  asking = false;
  if (text !== JSON.stringify(question())) return ask(true); // the run, the axis or the range has changed
  if (answer && answer.ok) {
    shown = answer;
    answered = text;
    section.dataset.revision = answer.revision;
    draw();
  } else if (!answer) {
    dirty = true; // a run that has ended gives no other reason to ask again
  }
  const { share } = current();
  note.textContent = share < 1 ? `reading metrics.jsonl: ${Math.round(share * 100)}%` : "band: lowest to highest · thin line: mean · thick line: smoothed";
  if (dirty) later();
}
let timer = 0;
function later() {
  clearTimeout(timer);
  timer = setTimeout(() => element.isConnected && dirty && ask(false), ASK_S * 1000 - (Date.now() - asked_ms) + 20);
}
function update() {
  const value = current();
  section.hidden = !value.run;
  if (value.run !== run) {
    run = value.run;
    shown = null;
    answered = "";
    range = null;
    draw();
    if (run) ask(true);
    return;
  }
  if (!run || (shown && shown.revision === value.revision && value.share === 1)) return;
  dirty = true;
  if (visible) ask(false).then(() => dirty && later());
}
new IntersectionObserver((found) => {
  visible = found[found.length - 1].isIntersecting;
  if (visible && (dirty || !shown)) ask(false).then(() => dirty && later());
}, { rootMargin: "200px" }).observe(element);
// A canvas has the colours with which it was drawn. Gradio changes the page's to those of the system.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTimeout(draw, 200));
element.replaceChildren(section);
watch("value", update);
update();
