// The button "Rehearse" of step 3: what it does now, and what the last one found (ui/new/rehearsal.py). Texts are set with textContent.
const MARKS = { waiting: "○", running: "◐", done: "✓", failed: "✗", skipped: "–" };
const WORDS = { waiting: "waiting", running: "running", done: "done", failed: "failed", skipped: "not run" };
const span = (s) => (Number.isInteger(s) && s < 90 ? `${s} s` : s < 10 ? `${s.toFixed(1)} s` : s < 90 ? `${Math.round(s)} s` : `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`);
let answer = { state: "none", stages: [], lines: [], warnings: [], problem: {}, seconds: 0, stale: false };

const box = make("section", "hp-rehearsal");
box.setAttribute("aria-label", "Rehearsal");
const row = make("div", "hp-actions-row");
const go = button("Rehearse (about 2 minutes)", "", () => act("start"));
go.dataset.testid = "rehearse";
const stop = button("Cancel", "hp-quiet", () => act("cancel"));
stop.hidden = true;
row.append(go, stop, make("span", "hp-hint", "Tries this run on the real model: load, two steps, a sample, a checkpoint and a resume."));
const state = live("p", "hp-job-state", "status");
state.dataset.testid = "rehearsal-state";
const note = live("p", "hp-job-note", "alert");
const list = make("ol", "hp-stages");
const result = make("div", "hp-rehearsal-result");
box.append(row, note, state, list, result);
element.replaceChildren(box);

async function ask(what) {
  const id = window.hangproof?.draft?.();
  if (!id) return;
  const got = await reply(server.rehearsal({ draft: id, do: what }));
  if (!got.ok) {
    if (what === "show") window.hangproof.lost();
    return got.error;
  }
  if (got.state !== answer.state) note.hidden = true; // of an older attempt to start or to cancel
  const before = answer;
  answer = got;
  if (!window.hangproof.same(before, got)) draw(); // else a selected text stays selected
  return "";
}
async function act(what) {
  go.disabled = stop.disabled = true;
  if (what === "start") await window.hangproof.flush();
  note.textContent = (await ask(what)) || "";
  note.hidden = !note.textContent;
  go.disabled = stop.disabled = false;
}
function headline() {
  const busy = answer.stages.find((one) => one.state === "running");
  const stale = answer.stale ? " Out of date: the settings have changed since." : "";
  if (answer.state === "running") return `Rehearsing for ${span(answer.seconds)}: ${busy ? busy.title.toLowerCase() : "starting"}…`;
  if (answer.state === "passed") return `The rehearsal passed in ${span(answer.seconds)}.${stale}`;
  if (answer.state === "failed") {
    const { stage, title } = answer.problem;
    return `The rehearsal failed${stage ? ` at “${stage}”` : ""}: ${(title || "").replace(/\.$/, "")}.${stale}`;
  }
  if (answer.state === "cancelled") return "The rehearsal was cancelled.";
  if (answer.state === "lost") return "The rehearsal ended without a result, for example because the machine restarted. Rehearse again.";
  return "";
}
function draw() {
  const text = headline();
  if (state.textContent !== text) state.textContent = text;
  const kind = answer.stale ? "idle" : { passed: "done", failed: "bad", running: "busy" }[answer.state] || "idle";
  box.dataset.state = answer.state;
  state.className = `hp-job-state hp-${kind}`;
  go.hidden = answer.state === "running";
  stop.hidden = answer.state !== "running";
  list.replaceChildren(
    ...answer.stages.map((one) => {
      const item = make("li", `hp-stage hp-stage-${one.state}`);
      item.dataset.stage = one.key;
      item.dataset.state = one.state;
      const mark = make("span", "hp-stage-mark", MARKS[one.state] || "");
      mark.setAttribute("aria-hidden", "true");
      const name = make("span", "hp-stage-name", one.title);
      name.append(make("span", "hp-spoken", `: ${WORDS[one.state]}`));
      const took = one.took_s && one.state !== "running" ? span(one.took_s) : "";
      item.append(mark, name, make("span", "hp-stage-text", [took, one.text].filter(Boolean).join(" · ")));
      return item;
    }),
  );
  list.hidden = !answer.stages.length || answer.state === "cancelled" || answer.state === "lost";
  const parts = [];
  if (answer.lines.length) {
    const good = make("div", `hp-verdict hp-${answer.stale ? "idle" : "done"}`);
    good.append(...answer.lines.map((line) => make("p", "", line)));
    parts.push(good);
  }
  for (const line of answer.warnings) parts.push(make("p", "hp-verdict hp-warn", line));
  if (answer.state === "failed") {
    const bad = make("div", `hp-verdict hp-${answer.stale ? "idle" : "bad"}`);
    bad.append(...[answer.problem.text, answer.problem.change].filter(Boolean).map((line) => make("p", "", line)));
    parts.push(bad);
    if (answer.problem.log) {
      const fold = make("details", "hp-fold");
      const log = region("hp-log", "End of the log");
      log.append(make("pre", "", answer.problem.log));
      fold.append(make("summary", "", "End of the log"), log);
      parts.push(fold);
    }
  }
  const open = result.querySelector("details")?.open;
  result.replaceChildren(...parts);
  if (open && result.querySelector("details")) result.querySelector("details").open = true;
}
// Every second while one runs; else now and then, because another browser may start one or change the settings.
const IDLE_S = 5;
let idle = 0;
async function follow() {
  const wanted = answer.state === "running" || ++idle >= IDLE_S;
  if (wanted && !document.hidden && element.checkVisibility()) {
    idle = 0;
    await ask("show");
  }
  setTimeout(follow, 1000);
}
let changed = 0;
for (const name of ["input", "change"]) {
  document.addEventListener(name, (event) => {
    if (answer.state === "none" || answer.state === "running" || !event.target.closest?.(".hp-step")) return;
    clearTimeout(changed);
    changed = setTimeout(() => ask("show"), 2500); // the form has stored the change by then
  });
}
async function begin() {
  for (let n = 0; n < 200 && !document.body.classList.contains("hp-open"); n++) await new Promise((done) => setTimeout(done, 100));
  await ask("show");
  follow();
}
draw();
begin();
