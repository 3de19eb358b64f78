// The queue above the list of runs, and the sweeps (ui/run/queue.py). The value is {entries, sweeps}. An entry has buttons, and
// can be dragged; a sweep has a table, which is fetched when it is opened.
const panel = make("section", "hp-queue");
panel.setAttribute("aria-label", "Queue");
panel.dataset.testid = "queue";
const heading = make("h3", "", "Queue");
const list = make("ol");
const said = live("p", "hp-action-note", "status");
const sweeps = make("ul", "hp-sweeps");
sweeps.setAttribute("aria-label", "Sweeps");
panel.append(heading, list, said, sweeps);
element.replaceChildren(panel);
let entries = [];
let dragged = "";

const span = (s) => (s < 60 ? "less than a minute" : s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);
function about(entry) {
  if (entry.problem) return entry.problem;
  const parts = [];
  if (entry.total) parts.push(`${entry.done} of ${entry.total} started`);
  if (entry.paused) parts.push("paused");
  if (entry.starts_s !== null) parts.push(entry.starts_s < 15 ? "starts next" : `starts in about ${span(entry.starts_s)}`);
  return parts.join(" · ");
}
async function change(what, run, to) {
  const answer = await reply(server.queue_action({ do: what, run, to }));
  said.classList.toggle("hp-bad", !answer.ok);
  said.textContent = answer.ok ? "" : answer.error;
  if (!answer.ok) return;
  const name = (entries.find((one) => one.run === run) || { name: run }).name;
  const at = answer.entries.findIndex((one) => one.run === run) + 1;
  if (what === "move") said.textContent = `${name}: position ${at} of ${answer.entries.length}`;
  if (what === "cancel") said.textContent = `${name} left the queue. The run and its files stay.`;
  if (answer.paused.length) said.textContent = `Pausing ${answer.paused.join(", ")} first.`;
  draw(answer);
}
// A sweep: how far it is, and what came out of it.
function sweepItem(one) {
  const node = make("li");
  node.dataset.run = one.name;
  const row = make("div", "hp-queue-row");
  const table = button("Compare", "hp-quiet", () => compare(one));
  table.dataset.do = "table";
  table.setAttribute("aria-label", `Compare the runs of ${one.name}`);
  row.append(table);
  if (one.active) {
    const cancel = button("Cancel all", "hp-quiet", () => change("cancel", one.name));
    cancel.dataset.do = "cancel-all";
    cancel.setAttribute("aria-label", `Cancel all runs of ${one.name} that have not ended`);
    row.append(cancel);
  }
  node.append(make("span", "hp-queue-name", one.name), make("span", "hp-queue-about", `${one.ended} of ${one.total} have ended`), row);
  return node;
}
const LOSSES = [["final_loss", "Final loss"], ["best_loss", "Best loss"], ["val_loss", "Validation"]];
const dialog = make("dialog", "hp-compare");
document.body.append(dialog);
async function compare(one) {
  const answer = await reply(server.queue_action({ do: "table", run: one.name }));
  if (!answer.ok) {
    said.textContent = answer.error;
    said.classList.add("hp-bad");
    return;
  }
  const losses = LOSSES.filter(([key]) => key !== "val_loss" || answer.rows.some((row) => row.val_loss !== null));
  const table = make("table");
  const head = make("tr");
  for (const text of [...answer.fields, "State", "Steps", ...losses.map((each) => each[1]), "Time", "LoRA"]) {
    const cell = make("th", "", text[0].toUpperCase() + text.slice(1).replaceAll("_", " "));
    cell.scope = "col";
    head.append(cell);
  }
  table.append(head);
  for (const row of answer.rows) {
    const line = make("tr");
    for (const field of answer.fields) line.append(make("td", "", `${row.values[field]}`));
    line.append(make("td", "", row.state), make("td", "", `${row.steps}`));
    for (const [key] of losses) {
      const known = answer.rows.map((each) => each[key]).filter((each) => each !== null);
      const best = row[key] !== null && row[key] === Math.min(...known) && known.length > 1;
      line.append(make("td", best ? "hp-best" : "", row[key] === null ? "–" : row[key].toFixed(4) + (best ? " (lowest)" : "")));
    }
    line.append(make("td", "", row.seconds === null ? "–" : row.seconds < 90 ? `${Math.round(row.seconds)} s` : `${Math.round(row.seconds / 60)} min`));
    const last = make("td");
    if (row.lora) {
      const link = make("a", "hp-button", "Download");
      link.href = row.lora;
      link.download = row.lora.split("/").pop();
      link.setAttribute("aria-label", `Download the LoRA of ${row.run}`);
      last.append(link);
    }
    line.append(last);
    table.append(line);
  }
  const scroll = region("hp-compare-table", `Runs of ${one.name}`);
  scroll.append(table);
  dialog.setAttribute("aria-label", `Runs of ${one.name}`);
  const about = make("p", "hp-compare-about", "Losses are means of up to 50 steps: the last ones, and those with the lowest mean.");
  dialog.replaceChildren(make("h3", "", one.name), about, scroll, button("Close", "", () => dialog.close()));
  dialog.showModal();
}
function item(entry, number) {
  const node = make("li", entry.problem ? "hp-bad" : "");
  node.dataset.run = entry.run;
  node.draggable = true;
  const name = make("button", "hp-queue-name", entry.name);
  name.type = "button";
  name.title = `Show ${entry.name}`;
  name.dataset.do = "show";
  name.addEventListener("click", () => document.querySelector(`#run-list [data-run="${CSS.escape(entry.run)}"]`)?.click());
  const row = make("div", "hp-queue-row");
  const add = (what, sign, label, off, act) => {
    const one = button(sign, "hp-quiet", act);
    one.dataset.do = what;
    one.setAttribute("aria-label", `${label} ${entry.name}`);
    one.title = label;
    one.disabled = off;
    row.append(one);
  };
  add("up", "↑", "Move up:", number === 1, () => change("move", entry.run, number - 1));
  add("down", "↓", "Move down:", number === entries.length, () => change("move", entry.run, number + 1));
  if (entry.problem) add("retry", "Try again", "Try again:", false, () => change("move", entry.run, number));
  else add("now", "Run now", "Run now, and pause what runs:", false, () => change("now", entry.run));
  add("cancel", "Cancel", "Remove from the queue:", false, () => change("cancel", entry.run));
  node.append(make("span", "hp-queue-number", `${number}`), name, make("span", "hp-queue-about", about(entry)), row);
  node.addEventListener("dragstart", (event) => {
    dragged = entry.run;
    event.dataTransfer.setData("text/plain", entry.name);
    event.dataTransfer.effectAllowed = "move";
  });
  node.addEventListener("dragover", (event) => {
    if (dragged) event.preventDefault();
    node.classList.toggle("hp-over", Boolean(dragged) && dragged !== entry.run);
  });
  for (const end of ["dragleave", "drop", "dragend"]) node.addEventListener(end, () => node.classList.remove("hp-over"));
  node.addEventListener("drop", (event) => {
    event.preventDefault();
    event.stopPropagation();
    if (dragged && dragged !== entry.run) change("move", dragged, number);
    dragged = "";
  });
  node.addEventListener("dragend", () => (dragged = ""));
  return node;
}
let drawn = "";
function draw(now) {
  const key = JSON.stringify(now);
  if (key === drawn || dragged) return;
  drawn = key;
  entries = now.entries;
  const here = panel.contains(document.activeElement) ? document.activeElement.closest("[data-do]") : null;
  const kept = here ? [here.closest("li").dataset.run, here.dataset.do] : null;
  list.replaceChildren(...entries.map((entry, at) => item(entry, at + 1)));
  sweeps.replaceChildren(...now.sweeps.map(sweepItem));
  panel.hidden = !entries.length && !now.sweeps.length && !said.textContent;
  heading.textContent = entries.length ? `Queue (${entries.length})` : "Queue";
  if (!kept) return;
  const row = [...list.children, ...sweeps.children].find((one) => one.dataset.run === kept[0]) || list.firstElementChild;
  const same = row && row.querySelector(`[data-do="${kept[1]}"]:not(:disabled)`);
  (same || (row && row.querySelector("button:not(:disabled)")))?.focus();
}
const update = () => draw(props.value && props.value.entries ? props.value : { entries: [], sweeps: [] });
watch("value", update);
update();
