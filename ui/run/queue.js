// The queue above the list of runs (ui/run/queue.py). The value is the list of entries; each has buttons, and can be dragged.
const panel = make("section", "hp-queue");
panel.setAttribute("aria-label", "Queue");
panel.dataset.testid = "queue";
const heading = make("h3", "", "Queue");
const list = make("ol");
const said = make("p", "hp-action-note");
said.setAttribute("role", "status");
panel.append(heading, list, said);
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
  const answer = await server.queue_action({ do: what, run, to }).catch(() => null);
  said.classList.toggle("hp-bad", !answer || !answer.ok);
  said.textContent = !answer ? "The server does not answer. Try again." : answer.ok ? "" : answer.error;
  if (!answer || !answer.ok) return;
  const name = (entries.find((one) => one.run === run) || { name: run }).name;
  const at = answer.entries.findIndex((one) => one.run === run) + 1;
  if (what === "move") said.textContent = `${name}: position ${at} of ${answer.entries.length}`;
  if (what === "cancel") said.textContent = `${name} left the queue. The run and its files stay.`;
  if (answer.paused.length) said.textContent = `Pausing ${answer.paused.join(", ")} first.`;
  draw(answer.entries);
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
  entries = now;
  const here = list.contains(document.activeElement) ? document.activeElement : null;
  const kept = here ? [here.closest("li").dataset.run, here.dataset.do] : null;
  list.replaceChildren(...entries.map((entry, at) => item(entry, at + 1)));
  panel.hidden = !entries.length && !said.textContent;
  heading.textContent = entries.length ? `Queue (${entries.length})` : "Queue";
  if (!kept) return;
  const row = [...list.children].find((one) => one.dataset.run === kept[0]) || list.firstElementChild;
  const same = row && row.querySelector(`[data-do="${kept[1]}"]:not(:disabled)`);
  (same || (row && row.querySelector("button:not(:disabled)")))?.focus();
}
const update = () => draw(Array.isArray(props.value) ? props.value : []);
watch("value", update);
update();
