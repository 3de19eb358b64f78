// The section: its notes, its views as tabs, and the table from the API.
const section = make("section", "hp-section");
section.dataset.testid = "evolution";
const title = make("h3", "", "Evolution");
const note = make("span");
title.append(note);
const notes = make("div", "hp-evolution-notes");
const VIEWS = [
  ["grid", "Grid", grid, () => {}],
  ["steps", "Step by step", steps, () => drawSteps(false)],
  ["compare", "Compare two", compare, () => (drawCompare(), loadRuns())],
  ["vote", "Blind vote", vote, () => openVote()],
];
// Remembered in this tab: the page reloads itself when the server was away.
const VIEW_KEY = "hangproof-evolution-view";
let view = "grid";
try {
  view = sessionStorage.getItem(VIEW_KEY) || view;
} catch {
  // storage is turned off
}
if (!VIEWS.some(([name]) => name === view)) view = "grid";
const tabs = make("div", "hp-ev-tabs");
tabs.setAttribute("role", "tablist");
tabs.setAttribute("aria-label", "Views of the samples");
const tabOf = {};
for (const [name, text, panel] of VIEWS) {
  const tab = button(text, "hp-ev-tab", () => openView(name));
  tab.id = `evolution-tab-${name}`;
  tab.setAttribute("role", "tab");
  panel.id = `evolution-${name}`;
  tab.setAttribute("aria-controls", panel.id);
  tabOf[name] = tab;
  tabs.append(tab);
  const box = make("div");
  box.id = panel.id;
  panel.removeAttribute("id");
  box.setAttribute("role", "tabpanel");
  box.setAttribute("aria-labelledby", tab.id);
  box.append(panel);
  panel.box = box;
}
function openView(name) {
  view = name;
  try {
    sessionStorage.setItem(VIEW_KEY, name);
  } catch {
    // storage is turned off
  }
  for (const [one, , panel, open] of VIEWS) {
    const here = one === name;
    panel.hidden = panel.box.hidden = !here;
    tabOf[one].setAttribute("aria-selected", `${here}`);
    tabOf[one].tabIndex = here ? 0 : -1;
    if (here && data.run) open();
  }
  if (name !== "steps") pause();
}
tabs.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by) return;
  event.preventDefault();
  const names = VIEWS.map(([name]) => name);
  const name = names[(names.indexOf(view) + by + names.length) % names.length];
  openView(name);
  tabOf[name].focus();
});
section.append(title, notes, tabs, ...VIEWS.map(([, , panel]) => panel.box), othersBox, alike);

function drawNotes() {
  const parts = [];
  if (data.overfitting) {
    const box = make("div", "hp-problem hp-warn");
    box.dataset.testid = "overfitting";
    box.setAttribute("role", "status");
    box.append(make("p", "", data.overfitting));
    parts.push(box);
  }
  const { best } = data;
  if (best) {
    const count = data.validation.filter((one) => one.step).length;
    const among = count > 1 ? `, the lowest of ${count}` : "";
    const text = make("p", "hp-say", `Best so far: step ${grouped(best.step)} with a validation loss of ${short(best.val_loss)}${among}.`);
    text.dataset.testid = "evolution-best";
    const near = nearest(best.step);
    if (near && near.step !== best.step) text.append(` The closest LoRA is that of step ${grouped(near.step)}.`);
    parts.push(text);
  }
  if (data.picked !== null) {
    const text = make("p", "hp-say", `Picked: the LoRA of step ${grouped(data.picked)}.`);
    text.dataset.testid = "evolution-picked";
    parts.push(text);
  }
  const shown = parts.map((one) => one.textContent).join("\n");
  if (notes.dataset.shown !== shown) notes.replaceChildren(...parts);
  notes.dataset.shown = shown;
}
function nearest(step) {
  const saved = data.snapshots.filter((one) => one.lora && one.step !== null);
  return saved.sort((a, b) => Math.abs(a.step - step) - Math.abs(b.step - step))[0];
}
function drawAll(otherRun) {
  rows = rowsOf(data);
  const shown = data.snapshots.filter((one) => one.samples.length).length;
  section.hidden = !rows.length && !data.validation.length && !data.others?.length;
  note.textContent = rows.length ? `${rows.length} ${rows.length === 1 ? "prompt" : "prompts"}, ${shown} ${shown === 1 ? "step" : "steps"} with samples` : "no samples yet";
  tabs.hidden = alike.hidden = !rows.length;
  for (const [, , panel] of VIEWS) panel.box.classList.toggle("hp-ev-gone", !rows.length);
  drawNotes();
  drawGrid(otherRun);
  drawOthers();
  if (view === "steps") drawSteps(otherRun);
  if (view === "compare") drawCompare();
  if (view === "vote" && (otherRun || !pair)) openVote();
  drawLikeness();
}

// The table ----------------------------------------------------------------------------------------------------------------
let wanted = ""; // run and stamp of the last request
let fetching = null;
async function load(run) {
  fetching?.abort();
  const mine = (fetching = new AbortController());
  const url = base(`api/evolution/${encodeURIComponent(run)}`);
  const answer = await fetch(url, { signal: mine.signal }).then((r) => (r.ok ? r.json() : null)).catch(() => null);
  if (mine !== fetching) return;
  fetching = null;
  if (!answer) {
    wanted = ""; // asked again at the next tick
    return;
  }
  const otherRun = answer.run !== data.run;
  if (otherRun) {
    other = null;
    pair = null;
    alikeProblem = "";
    voteResult.replaceChildren();
    runB.select.replaceChildren();
    for (const one of [stepA, stepB, comparePrompt, stepsPrompt]) one.select.replaceChildren();
  }
  data = answer;
  drawAll(otherRun);
}
const refetch = () => load(current().run);
function update() {
  const now = current();
  const key = `${now.run} ${now.stamp} ${now.job?.state}`;
  if (!now.run || !now.some) {
    wanted = "";
    data = NOTHING;
    drawAll(true);
  } else if (key !== wanted) {
    if (now.run !== data.run) section.hidden = true;
    wanted = key;
    load(now.run);
  } else if (data.run === now.run) drawLikeness();
}
element.replaceChildren(section, dialog);
openView(view);
watch("value", update);
update();
