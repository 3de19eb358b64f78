// The comparison of runs (ui/run/compare.py). The value is {run}. The list is asked for when the fold is opened, and the comparison
// when two to six runs are chosen. Every text is set with textContent.
const MOST = 6;
let run = "";
let listed = [];
let chosen = [];
let asked = 0;

const section = make("section", "hp-section");
const { node: fold, body } = folding("Compare runs", "Settings, losses, samples, time and cost side by side", "fold-compare");
section.append(fold);
const search = make("input", "hp-compared-search");
search.type = "search";
search.placeholder = "Search runs by name or state";
search.setAttribute("aria-label", "Search runs to compare");
const choices = make("fieldset", "hp-compared-choices");
const status = live("p", "hp-log-status", "status");
const result = make("div", "hp-compared");
body.append(search, choices, status, result);

async function ask(name, data) {
  return reply(server[name]({ run, ...data }));
}
function drawChoices() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const matching = listed.filter((one) => words.every((word) => `${one.name} ${one.run} ${one.state}`.toLowerCase().includes(word)));
  const shown = [...listed.filter((one) => chosen.includes(one.run)), ...matching.filter((one) => !chosen.includes(one.run))].slice(0, 30);
  choices.replaceChildren(
    make("legend", "", `Runs to compare (2 to ${MOST})`),
    ...shown.map((one) => {
      const label = make("label", "hp-compared-choice");
      const box = make("input");
      box.type = "checkbox";
      box.value = one.run;
      box.checked = chosen.includes(one.run);
      box.disabled = !box.checked && chosen.length >= MOST;
      box.addEventListener("change", () => {
        chosen = box.checked ? [...chosen, one.run] : chosen.filter((name) => name !== one.run);
        drawChoices();
        choices.querySelector(`input[value="${CSS.escape(one.run)}"]`)?.focus();
        compare();
      });
      const text = make("span");
      text.append(make("b", "", one.name), make("small", "", one.state));
      label.append(box, text);
      return label;
    }),
  );
}
function tableOf(caption, rows, names) {
  const scroll = region("hp-table-scroll", caption);
  const table = make("table");
  table.append(make("caption", "hp-visually-hidden", caption));
  const head = make("tr");
  head.append(make("td"));
  names.forEach((name, n) => {
    const cell = make("th", "", "");
    cell.scope = "col";
    cell.append(make("i", `hp-key hp-line-${n}`), name);
    head.append(cell);
  });
  const header = make("thead");
  header.append(head);
  const body_rows = make("tbody");
  for (const [label, ...values] of rows) {
    const row = make("tr");
    const cell = make("th", "", label);
    cell.scope = "row";
    row.append(cell, ...values.map((text) => make("td", "", text)));
    body_rows.append(row);
  }
  table.append(header, body_rows);
  scroll.append(table);
  return scroll;
}
function draw(answer) {
  const names = answer.runs.map((one) => one.name);
  const parts = [make("h4", "", "Result"), tableOf("Result of each run", answer.facts, names)];
  const lines = answer.lines.map((line, n) => ({ ...line, low: [], high: [], smooth: 0.9, cls: `hp-line-${n}` })).filter((line) => line.x.length > 1);
  if (lines.length) {
    const readout = live("p", "hp-chart-readout", "status");
    const chart = plot({
      label: "Loss of the runs",
      lines,
      range: answer.range,
      axis: "step",
      onCursor: (x) => {
        const found = chart.cursor(x).filter(Boolean);
        readout.textContent = found.length ? `${position("step", x)}: ${found.map((one) => `${one.name} ${shortNumber(one.value)}`).join(" · ")}` : "";
      },
    });
    parts.push(make("h4", "", "Loss"), readout, chart.node);
  }
  parts.push(make("h4", "", "Settings that differ"));
  parts.push(answer.settings.length ? tableOf("Settings that differ", answer.settings, names) : make("p", "hp-none", "All settings are the same."));
  if (answer.samples.length) parts.push(make("h4", "", "Last samples"));
  for (const { prompt, images } of answer.samples) {
    const row = make("div", "hp-compared-samples");
    images.forEach((image, n) => {
      const figure = make("figure");
      if (image) {
        const picture = make("img");
        picture.loading = "lazy";
        picture.src = image.url;
        picture.alt = `Sample of ${names[n]}, ${image.at}: ${prompt}`;
        figure.append(picture);
      } else figure.append(make("p", "hp-none", "No sample"));
      const caption = make("figcaption");
      caption.append(make("i", `hp-key hp-line-${n}`), image ? `${names[n]}, ${image.at}` : names[n]);
      figure.append(caption);
      row.append(figure);
    });
    parts.push(make("p", "hp-compared-prompt", prompt), row);
  }
  result.replaceChildren(...parts);
}
async function compare() {
  const number = (asked += 1);
  if (chosen.length < 2) {
    result.replaceChildren();
    status.textContent = "Choose another run.";
    return;
  }
  status.textContent = "Comparing…";
  const answer = await ask("compare_runs", { runs: chosen });
  if (number !== asked) return;
  status.textContent = answer.ok ? "" : answer.error;
  if (answer.ok) draw(answer);
  else result.replaceChildren();
}
async function open() {
  if (!fold.open) return;
  const answer = await ask("compare_list", {});
  if (!answer.ok) {
    status.textContent = answer.error;
    return;
  }
  listed = answer.runs;
  chosen = chosen.filter((name) => listed.some((one) => one.run === name));
  if (!chosen.length) chosen = [run];
  drawChoices();
  compare();
}
fold.addEventListener("toggle", open);
search.addEventListener("input", drawChoices);
function update() {
  const value = props.value || { run: "" };
  section.hidden = !value.run;
  if (value.run === run) return;
  run = value.run;
  chosen = [];
  result.replaceChildren();
  if (fold.open && run) open();
}
element.replaceChildren(section);
watch("value", update);
update();
