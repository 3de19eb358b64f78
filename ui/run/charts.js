// The charts of a run. The value is what ui/run/charts.py makes of its numbers, again and again while it trains, as JSON: {run, share, all,
// data, lines, marks, table}; {run: ""} where there is nothing. Every text is set with textContent.
const charts = new Map(); // by the key of a quantity, such as the loss
let run = "";
let range = null; // null: everything
let axis = "step";

const section = make("section", "hp-section");
const note = make("span");
const axes = make("fieldset", "hp-chart-axes", [make("legend", "hp-spoken", "Horizontal axis")]);
for (const [key, text] of [["step", "Steps"], ["time", "Time"]]) {
  const choose = () => {
    axis = key;
    zoom(null);
  };
  const radio = make("input", "", { type: "radio", name: "hp-chart-axis", checked: key === axis, onchange: choose });
  axes.append(make("label", "", [radio, make("span", "", text)]));
}
const slider = make("input", "", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0.9", oninput: () => draw() });
const reset = button("Show everything", "hp-quiet", () => zoom(null));
const bar = make("div", "hp-chart-bar", [axes, make("label", "hp-chart-smooth", [make("span", "", "Smoothing"), slider]), reset]);
const readout = live("p", "hp-chart-readout", "status");
const place = make("div", "hp-charts");
const none = make("p", "hp-none", "The charts appear after two steps.");
const table = make("div");
const fold = make("details", "hp-chart-table", [make("summary", "", "Values as a table"), table]);
const hint = make("p", "hp-hint", "Drag across a chart to zoom in; double-click to show everything. With the keyboard: arrow keys, +, - and Escape.");
section.append(make("h3", "", ["Charts", note]), bar, readout, place, none, fold, hint);

function zoom(next) {
  range = next;
  draw();
}
function readCursor(x) {
  const values = x === null ? [] : [...charts.values()].flatMap((chart) => chart.values());
  readout.textContent = values.length ? `${position(axis, x)}: ${values.join(" · ")}` : "";
}
// One chart for each quantity; the GPUs of a quantity share it. A chart stays while its lines grow: so do the focus and a drag.
function draw() {
  const { all, data, lines = [], marks, share = 1, ...value } = JSON.parse(props.value || "{}");
  section.hidden = !value.run;
  if (value.run !== run) range = null;
  run = value.run;
  section.dataset.run = run;
  none.hidden = lines.length > 0;
  for (const one of [bar, fold, hint, readout]) one.hidden = !lines.length;
  reset.hidden = !range;
  note.textContent = share < 1 ? `reading metrics.jsonl: ${Math.round(share * 100)}%` : "band: lowest to highest · thin line: mean · thick line: smoothed";
  table.innerHTML = value.table || ""; // the server has escaped it (ui/html.py)
  const groups = Map.groupBy(lines, (line) => line.key);
  for (const [key, chart] of charts) {
    if (groups.get(key)?.length === chart.count) continue;
    chart.node.closest("figure").remove();
    charts.delete(key);
  }
  for (const [key, group] of groups) {
    const main = key === "loss";
    const [{ label, unit, top }] = group;
    if (!charts.has(key)) {
      const made = plot({ label, unit, count: group.length, main, onCursor: readCursor, onRange: zoom });
      charts.set(key, made);
      const caption = make("figcaption", "", [label, ...(unit ? [make("span", "", unit)] : [])]);
      place.append(make("figure", main ? "hp-figure hp-wide" : "hp-figure", [caption, made.node]));
    }
    charts.get(key).show({
      lines: group.map((line) => ({ ...line, x: line[axis], name: group.length > 1 ? line.name : "" })),
      axis,
      all: all[axis],
      data: data[axis],
      range: range || all[axis],
      marks: main ? marks.map((one) => ({ ...one, x: one[axis] })) : [],
      smooth: main ? Number(slider.value) : 0,
      top: key === "utilization" ? 100 : top,
    });
  }
}
// A canvas has the colours with which it was drawn. Gradio changes the page's to those of the system.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTimeout(draw, 200));
element.replaceChildren(section);
watch("value", draw);
draw();
