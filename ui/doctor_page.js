// The tab "Doctor" (ui/doctor_page.py). Every text is set with textContent. Nothing is asked while the tab is not shown.
const size = (bytes) => (bytes >= 9.5e8 ? `${(bytes / 1e9).toFixed(1)} GB` : `${Math.max(1, Math.round(bytes / 1e6))} MB`);
// Names such as sd-scripts stay as they are.
const title = (name) => (/^(built-in |[a-z]+( |$))/.test(name) ? name[0].toUpperCase() + name.slice(1) : name);
const age = (s) => (s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${Math.floor(s / 3600)} h`);
async function ask(what, data) {
  return reply(server.doctor({ do: what, ...data }));
}
function part(title, about, testid) {
  const node = make("section", "hp-section hp-doctor-part");
  node.dataset.testid = testid;
  const head = make("h3", "", title);
  head.append(make("span", "", about));
  const body = make("div", "hp-doctor-body");
  node.append(head, body);
  return { node, body };
}
// A form with one button, its problem, and what came of it.
function formOf(part, cls, label, ...fields) {
  const form = make("form", cls);
  const go = make("button", "hp-button hp-primary", label);
  go.type = "submit";
  const note = alerts();
  const result = live("div", "hp-doctor-result", "status");
  form.append(...fields, go);
  part.body.append(form, note, result);
  return { form, go, note, result };
}
const alerts = () => live("p", "hp-job-note", "alert");
async function copy(text, node, label) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea"); // without HTTPS, browsers have no clipboard
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
  }
  node.textContent = done ? "Copied" : "Select the text and copy it";
  setTimeout(() => (node.textContent = label), 2000);
}
function printed(label, text) {
  const log = region("hp-text", label);
  log.append(make("pre", "", text));
  return log;
}
function labelled(label, field, hint) {
  const node = make("label", "hp-doctor-field");
  node.append(make("span", "", label), field);
  if (hint) node.append(make("small", "", hint));
  return node;
}

// This machine ---------------------------------------------------------------------------------------------------------
const machine = part("This machine", "Python, PyTorch, GPU, disks, memory and the trainers", "doctor-machine");
const state = live("p", "hp-job-state", "status");
const machine_note = alerts();
const table = make("ul", "hp-findings-list");
let shown = { state: "none", findings: [], text: "" };
const look = button("Look again", "hp-primary", () => examine(false));
const full = button("Also test the trainers (a minute each)", "", () => examine(true));
const halt = button("Cancel", "hp-quiet", async () => drawMachine(await ask("cancel")));
const copy_report = button("Copy report", "", () => copy(shown.text, copy_report, "Copy report"));
copy_report.dataset.testid = "copy-report";
copy_report.hidden = halt.hidden = true;
const machine_row = make("div", "hp-actions-row");
machine_row.append(look, full, halt, copy_report);
machine.body.append(state, machine_note, table, machine_row);
async function examine(all) {
  drawMachine(await ask("look", { full: all }));
  follow();
}
function drawMachine(answer) {
  machine_note.textContent = answer.ok ? answer.error : answer.error;
  if (!answer.ok) return;
  shown = answer;
  const busy = answer.state === "running";
  const count = (kind) => answer.findings.filter((one) => one.status === kind).length;
  const number = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
  const summary = answer.findings.length
    ? `${count("ok")} OK, ${number(count("note"), "warning")}, ${number(count("failed"), "problem")}`
    : "";
  state.textContent = busy ? `Looking for ${age(answer.seconds)}…` : answer.state === "cancelled" ? `Cancelled. ${summary}` : summary;
  look.hidden = full.hidden = busy;
  halt.hidden = !busy;
  copy_report.hidden = busy || !answer.findings.length;
  table.replaceChildren(
    ...answer.findings.map((one) => {
      const item = make("li", `hp-finding hp-${{ ok: "done", note: "warn", failed: "bad" }[one.status]}`);
      item.dataset.status = one.status;
      const text = make("div");
      text.append(make("strong", "", title(one.name)), make("span", "", one.text));
      if (one.action) text.append(make("p", "", one.action));
      item.append(make("span", "hp-finding-mark", one.verdict), text);
      return item;
    }),
  );
}
let following = 0;
function follow() {
  clearTimeout(following);
  if (shown.state !== "running") return;
  following = setTimeout(async () => {
    if (element.isConnected && element.checkVisibility() && !document.hidden) drawMachine(await ask("show"));
    follow();
  }, 700);
}

// Left-over trainers -----------------------------------------------------------------------------------------------------
const left = part("Left-over trainers", "Trainers of Hangproof that no monitor watches any more", "doctor-orphans");
const left_list = make("ul", "hp-findings-list");
const left_note = live("p", "hp-job-state", "status");
const left_again = button("Look again", "hp-quiet", () => drawOrphans());
left.body.append(left_note, left_list, left_again);
async function drawOrphans(said) {
  const answer = said || (await ask("orphans"));
  if (!answer.ok) return void (left_note.textContent = answer.error);
  const none = answer.orphans.length ? "" : "None. Every trainer that runs is watched.";
  left_note.textContent = [answer.text ? `${answer.text}.` : "", none].filter(Boolean).join(" ");
  left_list.replaceChildren(
    ...answer.orphans.map((one) => {
      const item = make("li", "hp-finding hp-warn");
      const text = make("div");
      text.append(make("strong", "", `${one.name}, process ${one.pid}`), make("span", "", `run ${one.run}, ${age(one.age_s)} old, ${size(one.memory_bytes)} of memory`));
      const end = button(`End process ${one.pid}`, "", () => {
        const sure = button(`End process ${one.pid} now? Steps since its last checkpoint are lost`, "hp-danger", async () => {
          sure.disabled = true;
          const done = await ask("end", { pid: one.pid, start: one.start });
          if (done.ok) return drawOrphans(done);
          await drawOrphans();
          left_note.textContent = `${done.error}.`;
        });
        end.replaceWith(sure);
        sure.focus();
      });
      text.append(end);
      item.append(make("span", "hp-finding-mark", "Warning"), text);
      return item;
    }),
  );
}

// Explain a process --------------------------------------------------------------------------------------------------------
const why = part("Explain a process", "What a process of yours does, what it waits for, and the stack of every thread", "doctor-explain");
const pid = make("input");
pid.type = "text";
pid.inputMode = "numeric";
pid.maxLength = 20;
const process = labelled("Process number (pid), as nvidia-smi, top or ps shows it", pid);
const { form: why_form, go: why_go, note: why_note, result: why_result } = formOf(why, "hp-doctor-form", "Explain", process);
why_form.addEventListener("submit", async (event) => {
  event.preventDefault();
  why_go.disabled = true;
  why_note.textContent = "";
  why_result.replaceChildren(make("p", "hp-hint", "Looking twice, two seconds apart…"));
  const answer = await ask("explain", { pid: pid.value });
  why_go.disabled = false;
  why_result.replaceChildren();
  if (!answer.ok) return void (why_note.textContent = `${answer.error}.`);
  why_result.append(...answer.lines.map((line) => make("p", "", line)));
  if (answer.signs.length) why_result.append(make("p", "hp-verdict hp-warn", `It looks stuck or slow: ${answer.signs.join("; ")}.`));
  if (answer.note) why_result.append(make("p", "hp-hint", answer.note));
  if (answer.cause) why_result.append(make("p", "hp-hint", `If it is a training: ${answer.cause} ${answer.advice}`));
  for (const [of, text] of Object.entries(answer.stacks)) why_result.append(make("h4", "", `Stacks of process ${of}`), printed(`Stacks of process ${of}`, text));
});

// Check a script -------------------------------------------------------------------------------------------------------------
const lint = part("Check a training script", "Finds what is known to hang or fail in scripts of kohya's trainers, kohya_ss and FluxGym", "doctor-lint");
const text = make("textarea");
text.rows = 8;
text.spellcheck = false;
text.placeholder = "accelerate launch … flux_train_network.py …";
const kind = make("select");
for (const [value, label] of [["train.sh", "bash (Linux, macOS)"], ["train.bat", "batch (Windows)"], ["train.ps1", "PowerShell (Windows)"]]) {
  const option = make("option", "", label);
  option.value = value;
  kind.append(option);
}
const script = labelled("Script", text, "It is read, not run. Nothing is stored.");
const { form: lint_form, go: lint_go, note: lint_note, result: lint_result } = formOf(
  lint, "hp-doctor-form hp-doctor-wide", "Check the script", script, labelled("Shell", kind),
);
lint_form.addEventListener("submit", async (event) => {
  event.preventDefault();
  lint_go.disabled = true;
  lint_note.textContent = "";
  lint_result.replaceChildren();
  const answer = await ask("lint", { text: text.value, name: kind.value });
  lint_go.disabled = false;
  if (!answer.ok) return void (lint_note.textContent = `${answer.error}.`);
  const list = make("ul", "hp-findings-list");
  list.append(
    ...answer.findings.map((one) => {
      const item = make("li", `hp-finding hp-${one.level === "error" ? "bad" : "warn"}`);
      const said = make("div");
      said.append(make("strong", "", `Line ${one.line}: ${one.id}`), make("span", "", one.why), make("p", "", one.fix));
      item.append(make("span", "hp-finding-mark", one.level === "error" ? "Problem" : "Warning"), said);
      return item;
    }),
  );
  lint_result.append(answer.findings.length ? list : make("p", "hp-verdict hp-done", "No problems found."));
  if (answer.note) lint_result.append(make("p", "hp-hint", answer.note));
  if (answer.fixed) {
    const again = button("Copy the fixed script", "", () => copy(answer.fixed, again, "Copy the fixed script"));
    again.dataset.testid = "copy-fixed";
    lint_result.append(make("h4", "", "The script with these fixes"), printed("Fixed script", answer.fixed), again);
  }
});

// Hang drill ---------------------------------------------------------------------------------------------------------------
const drill = part("Hang drill", "Watch a demo run freeze and recover, in about a minute", "doctor-drill");
const drill_choice = make("select");
const drill_go = button("Start the drill", "hp-primary", startDrill);
drill_go.dataset.testid = "drill-start";
const drill_note = alerts();
const drill_text = make("p", "hp-hint");
const drill_form = make("div", "hp-doctor-form");
drill_form.append(labelled("What freezes", drill_choice), drill_go);
drill.body.append(
  make("p", "", "It trains a toy model on example photos and freezes it in the middle. You see how the hang is detected, explained and ended, and how the run starts again and finishes. No run of yours is touched."),
  drill_form,
  drill_text,
  drill_note,
);
let drills = [];
drill_choice.addEventListener("change", () => (drill_text.textContent = drills.find((one) => one.kind === drill_choice.value)?.text || ""));
async function drawDrills() {
  if (drills.length) return;
  const answer = await ask("drills");
  if (!answer.ok) return;
  drills = answer.drills;
  drill_choice.replaceChildren(
    ...drills.map((one) => {
      const option = make("option", "", one.label);
      option.value = one.kind;
      return option;
    }),
  );
  drill_text.textContent = drills[0].text;
}
async function startDrill() {
  drill_go.disabled = true;
  drill_note.textContent = "";
  drill_go.textContent = "Starting…";
  const answer = await ask("drill", { kind: drill_choice.value });
  if (answer.ok) {
    const url = new URL(window.location);
    url.searchParams.delete("tab");
    url.searchParams.set("run", answer.run);
    window.location.assign(url);
    return;
  }
  drill_go.disabled = false;
  drill_go.textContent = "Start the drill";
  drill_note.textContent = `${answer.error}.`;
}

// All ------------------------------------------------------------------------------------------------------------------------
element.replaceChildren(machine.node, left.node, why.node, lint.node, drill.node);
let opened = false;
async function open() {
  if (opened || !element.checkVisibility()) return;
  opened = true;
  drawDrills();
  drawOrphans();
  const answer = await ask("show");
  drawMachine(answer);
  if (answer.ok && answer.state === "none") await examine(false);
  follow();
}
new ResizeObserver(open).observe(element);
open();
