// The lower part of a run: what each rank does, a test of the start, and the files for another place (ui/run/launch_tab.py).
//
// The value is {run, alive, jobs: {name: {state, seconds, stamp}}}, renewed by the page's timer. What a job printed is fetched
// when its stamp changes and its fold is open. Every text is set with textContent.
const STATES = {
  running: "Running",
  done: "Finished",
  failed: "Failed",
  cancelled: "Cancelled",
  lost: "Ended without a result, for example because the machine restarted",
};
const AGAIN_MS = 2000;
let run = "";
let places = null;
let chosen = "slurm";
const current = () => props.value || { run: "", alive: false, jobs: {} };
const span = (s) => (s < 60 ? `${s} s` : `${Math.floor(s / 60)} min ${s % 60} s`);

async function ask(name, data) {
  return reply(server[name]({ run: current().run, ...data }));
}

// What a job did: its state, its verdict, its files, what it printed.
function result(jobName) {
  const node = make("div", "hp-job");
  const state = live("p", "hp-job-state", "status");
  const stop = button("Cancel", "hp-quiet", () => ask("cancel_job", { job: jobName }));
  const body = make("div");
  node.append(state, stop, body);
  let stamp = null;
  let wanted = "";
  let again = 0;
  const draw = (answer) => {
    const job = current().jobs[jobName];
    const parts = [];
    if (answer.verdict) parts.push(make("p", `hp-verdict hp-${answer.verdict.good ? "done" : "bad"}`, answer.verdict.text));
    if (answer.error && job && job.state !== "running" && job.state !== "done") {
      const box = live("div", "hp-problem hp-bad", "alert");
      box.append(...answer.error.split("\n").slice(-12).map((line) => make("p", "", line)));
      parts.push(box);
    }
    parts.push(...answer.files.map(file));
    const printed = [answer.text, job && job.state === "running" ? answer.error : ""].filter(Boolean).join("\n");
    if (printed) {
      const log = region("hp-log", "Output");
      log.append(make("pre", "", printed));
      parts.push(log);
    }
    body.replaceChildren(...parts);
  };
  const update = async (open) => {
    const job = current().jobs[jobName];
    node.hidden = !job;
    if (!job) {
      stamp = null;
      body.replaceChildren();
      return;
    }
    const busy = job.state === "running";
    const text = busy ? `Running for ${span(job.seconds)}…` : STATES[job.state] || job.state;
    if (state.textContent !== text) state.textContent = text;
    state.dataset.state = job.state;
    stop.hidden = !busy;
    const key = `${current().run} ${job.stamp}`;
    if (!open || stamp === key || wanted === key) return;
    wanted = key;
    const answer = await ask("job_output", { job: jobName });
    if (wanted !== key) return;
    wanted = "";
    if (!answer.ok) {
      clearTimeout(again);
      again = setTimeout(() => update(open), AGAIN_MS); // the job may be over, and then no newer value comes
      return;
    }
    stamp = key;
    draw(answer);
  };
  return { node, update };
}
function file({ name, size, text, url }) {
  const node = make("div", "hp-file");
  const link = make("a", "hp-button", "Download");
  link.download = name.split("/").pop();
  link.href = url || URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  link.setAttribute("aria-label", `Download ${name}`);
  const head = make("div", "hp-file-head");
  head.append(make("strong", "", name), make("span", "", size < 1e6 ? `${Math.max(1, Math.round(size / 1e3))} kB` : `${(size / 1e6).toFixed(1)} MB`), link);
  node.append(head);
  if (text !== null) {
    const log = region("hp-text", name);
    log.append(make("pre", "", text));
    node.append(log);
  }
  return node;
}
function starter(text, call, data) {
  const note = live("p", "hp-job-note hp-bad", "alert");
  note.hidden = true;
  const go = button(text, "hp-primary", async () => {
    go.disabled = true;
    note.hidden = true;
    const answer = await ask(call, data());
    if (!answer.ok) {
      note.textContent = answer.error;
      note.hidden = false;
    }
    setTimeout(() => (go.disabled = false), 1500); // the timer shows the job by then
  });
  return { go, note };
}

// The parts ----------------------------------------------------------------------------------------------------------------
const section = make("section", "hp-section");
section.append(make("h3", "", "Checks and other machines"));

const ranks = folding("What is it doing?", "Each rank's check points and stacks, and which one is stuck", "fold-ranks");
const ask_ranks = starter("Look at the stacks", "diagnose", () => ({}));
const ranks_result = result("diagnose");
const report = region("hp-text", "Rank report");
report.dataset.testid = "rank-report";
report.hidden = true;
report.append(make("pre"));
ranks.body.append(report, ask_ranks.go, ask_ranks.note, ranks_result.node);
setInterval(async () => {
  if (!element.isConnected || !ranks.node.open || !ranks.node.checkVisibility()) return;
  const answer = current().alive ? await ask("rank_lines", {}) : { lines: [] };
  report.hidden = !answer.lines?.length;
  if (answer.lines) report.firstChild.textContent = answer.lines.join("\n");
}, 2000);

// Checks that may wait for the GPU, in this order: the job, the title, what it is for, its button, and the names in tests.
const checks = [
  ["rehearse", "Rehearse", "Two steps, a sample, a checkpoint and a resume on the real model, in about two minutes", "Rehearse", "rehearse-run"],
  ["probe", "Test the start", "A few steps on one process and on all, before a night is risked", "Probe", "probe"],
  ["ladder", "Find out what is wrong", "Trains with 2 images, with 100, and with all; names an image that fails", "Find out what is wrong", "ladder"],
].map(([name, title, about, label, testid]) => {
  const { node, body } = folding(title, about, `fold-${name}`);
  const { go, note } = starter(label, `${name}_start`, () => ({}));
  go.dataset.testid = testid;
  const shown = result(name);
  body.append(go, note, shown.node);
  return { name, node, go, result: shown };
});
const checkFolds = checks.map((one) => one.node);

const elsewhere = folding("Run it elsewhere", "Slurm, a cloud, a rented pod, or one file", "fold-elsewhere");
const hint = make("p", "hp-hint");
const choices = make("fieldset", "hp-places");
const form = make("div", "hp-place");
elsewhere.body.append(hint, choices, form);
const results = {};

function drawPlaces(answer) {
  places = answer.places;
  hint.textContent = answer.store
    ? `The run travels by its store, ${answer.store}.`
    : "This run has no store. A rented machine loses its disk, so set Store in its run.toml, or in a new LoRA under More settings.";
  choices.replaceChildren(make("legend", "", "Where"));
  for (const place of places) {
    const label = make("label", "hp-place-choice");
    const radio = make("input");
    radio.type = "radio";
    radio.name = "hp-place";
    radio.value = place.kind;
    radio.checked = place.kind === chosen;
    radio.addEventListener("change", () => {
      chosen = place.kind;
      drawPlace();
    });
    label.append(radio, make("span", "", place.label));
    choices.append(label);
  }
  drawPlace();
}
function drawPlace() {
  const place = places.find((one) => one.kind === chosen);
  const fields = {};
  const grid = make("div", "hp-options");
  for (const option of place.options) {
    const label = make("label", option.kind === "switch" ? "hp-switch" : "");
    const input = make("input");
    input.type = option.kind === "switch" ? "checkbox" : "text";
    input.maxLength = 300;
    input.dataset.flag = option.flag;
    fields[option.flag] = () => (option.kind === "switch" ? input.checked : input.value);
    const name = make("span", "", option.label);
    label.append(...(option.kind === "switch" ? [input, name] : [name, input]));
    if (option.hint) {
      const text = make("small", "", option.hint);
      text.id = `hp-hint-${place.kind}${option.flag}`;
      input.setAttribute("aria-describedby", text.id);
      label.append(text);
    }
    grid.append(label);
  }
  const data = (submit) => () => ({
    kind: place.kind,
    submit,
    options: Object.fromEntries(Object.entries(fields).map(([flag, read]) => [flag, read()])),
  });
  const write = starter("Write the files", "write_files", data(false));
  write.go.dataset.testid = "write-files";
  const row = make("div", "hp-actions-row");
  row.append(write.go);
  const parts = [make("p", "hp-hint", place.about), grid, row];
  if (place.submit) {
    const submit = starter("Write and submit", "write_files", data(true));
    submit.go.classList.remove("hp-primary");
    submit.go.dataset.testid = "submit";
    submit.go.disabled = Boolean(place.missing);
    const really = button("Write and submit", "", () => {
      really.replaceWith(submit.go);
      submit.go.textContent = "Submit now? It can cost money";
      submit.go.focus();
    });
    really.dataset.testid = "ask-submit";
    really.disabled = Boolean(place.missing);
    row.append(really);
    if (place.missing) parts.push(make("p", "hp-hint hp-missing", place.missing));
    parts.push(submit.note);
  }
  parts.push(write.note);
  const name = `launch-${place.kind}`;
  results[name] ||= result(name);
  parts.push(results[name].node);
  form.replaceChildren(...parts);
  update();
}
async function openPlaces() {
  if (!elsewhere.node.open || places) return;
  const answer = await ask("open_places", {});
  if (answer.ok) drawPlaces(answer);
  else hint.textContent = answer.error;
}

// All ------------------------------------------------------------------------------------------------------------------
function update() {
  const value = current();
  section.hidden = !value.run;
  if (value.run !== run) {
    run = value.run;
    places = null;
    form.replaceChildren();
    choices.replaceChildren();
    for (const one of [ranks.node, ...checkFolds, elsewhere.node]) {
      one.open = false;
      delete one.dataset.shown;
    }
    for (const name of Object.keys(results)) delete results[name];
  }
  ask_ranks.go.hidden = !value.alive;
  ranks.node.hidden = !value.alive && !value.jobs.diagnose;
  ranks_result.update(ranks.node.open);
  for (const one of Object.values(results)) one.update(elsewhere.node.open);
  for (const { name, node, go, result } of checks) {
    const busy = value.jobs[name]?.state === "running";
    go.hidden = busy;
    node.hidden = value.alive && !value.jobs[name] && name !== "probe"; // the GPU is in use
    result.update(node.open);
    // A job that runs is shown, also after the page was reloaded.
    if (busy && !node.dataset.shown) {
      node.dataset.shown = "1";
      node.open = true;
    }
  }
}
for (const one of [ranks.node, ...checkFolds]) one.addEventListener("toggle", update);
elsewhere.node.addEventListener("toggle", () => {
  openPlaces();
  update();
});
section.append(ranks.node, ...checkFolds, elsewhere.node);
element.replaceChildren(section);
watch("value", update);
update();
