// The tab "Other machines" (ui/run/fleet_page.py): asks the server while the tab is visible, and shows each store with its runs.
// All text is another machine's: it is set with textContent. Pictures are data URLs that the server made.
const ASK_MS = 2000;
const FAR = {
  queued: ["idle", "Queued"], opening: ["busy", "Preparing"], starting: ["busy", "Starting"], running: ["good", "Training"],
  suspect: ["warn", "No progress"], slow: ["warn", "Slow"], recovering: ["warn", "Recovering"],
  backoff: ["warn", "Waiting to restart"], stopping: ["busy", "Stopping"], completed: ["done", "Completed"],
  failed: ["bad", "Failed"], stopped: ["idle", "Stopped"], paused: ["idle", "Paused"], preempted: ["idle", "Interrupted"],
  unkillable: ["bad", "Stuck in the kernel"],
};
const ENDED = ["completed", "failed", "stopped", "paused", "preempted", "unkillable"];
const STALE_S = 180; // a machine that trains writes its status every 15 s
const root = make("div", "hp-fleet");
const intro = make("section", "hp-section");
const adding = make("form", "hp-stores");
const label = make("label");
const input = make("input");
input.type = "text";
input.maxLength = 500;
input.placeholder = "s3://bucket/runs, hf://buckets/me/runs, sftp://host/folder";
input.dataset.testid = "store-address";
label.append(make("span", "", "Address of a store"), input);
const add = make("button", "hp-button", "Add store");
add.type = "submit";
const again = button("Refresh", "", () => show(true));
const problem = live("p", "hp-job-note", "alert");
problem.hidden = true;
adding.append(label, add, again);
const unanswered = live("p", "hp-job-note", "status");
unanswered.dataset.testid = "fleet-unanswered";
unanswered.hidden = true;
const list = make("div", "hp-fleet");
list.dataset.testid = "fleet";
intro.append(
  make("h3", "", "Other machines"),
  make("p", "hp-hint", "Runs on rented machines and clusters, read from the stores that they copy to. The stores of your own runs are included."),
  adding,
  problem,
  unanswered
);
root.append(intro, list);
element.replaceChildren(root);

const ago = (s) => (s < 2 ? "just now" : s < 90 ? `${Math.round(s)} s ago` : s < 5400 ? `${Math.round(s / 60)} min ago` : s < 129600 ? `${Math.round(s / 3600)} h ago` : `${Math.round(s / 86400)} days ago`);
const span = (s) => (s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);
function fact(name, value) {
  const node = make("div");
  node.append(make("dt", "", name), make("dd", "", value));
  return node;
}
function runCard(run, store) {
  const node = make("article", "hp-section hp-far");
  node.dataset.run = run.slug;
  const [colour, text] = FAR[run.state] || ["idle", "Unknown"];
  const head = make("header");
  const pill = make("span", `hp-pill hp-${colour}`, text);
  pill.dataset.testid = "far-state";
  head.append(make("strong", "", run.name), pill);
  const facts = make("dl", "hp-facts");
  const planned = run.planned_steps ? ` of ${run.planned_steps.toLocaleString()}` : "";
  if (run.step !== undefined) facts.append(fact("Step", `${run.step.toLocaleString()}${planned}`));
  if (run.loss !== undefined) facts.append(fact("Loss", String(Number(run.loss.toPrecision(3)))));
  if (run.checkpoint_step) facts.append(fact("Last checkpoint", `step ${run.checkpoint_step.toLocaleString()}`));
  if (run.eta_s && !ENDED.includes(run.state)) facts.append(fact("Time left", span(run.eta_s)));
  if (run.restarts !== undefined) facts.append(fact("Restarts", String(run.restarts)));
  const age = run.updated_at ? Math.max(0, (Date.now() - Date.parse(run.updated_at)) / 1000) : null;
  if (age !== null) facts.append(fact("Last update", ago(age)));
  node.append(head, facts);
  const lines = [];
  if (run.reason || run.message) lines.push(run.reason || run.message);
  if (run.holder) lines.push(run.held ? `Trained by ${run.holder}.` : `Last trained by ${run.holder}.`);
  if (!ENDED.includes(run.state) && age > STALE_S) lines.push("No update for a while: the machine may be gone. Another one can take over from the store.");
  if (run.problem) lines.push(run.problem);
  node.append(...lines.map((line) => make("p", "", line)));
  if (!ENDED.includes(run.state)) {
    const asked = run.stop_requested || run.stop === "Stop requested" || run.stop === "";
    const stop = button(asked ? "Stop requested" : "Stop", "", async () => {
      stop.disabled = true;
      stop.textContent = "Requesting…";
      const answer = await reply(server.stop_far({ store, run: run.slug }));
      if (!answer.ok) tell(answer.error);
      show(false);
    });
    stop.disabled = Boolean(asked);
    stop.dataset.testid = "far-stop";
    stop.setAttribute("aria-label", `Stop ${run.name}`);
    const row = make("div");
    row.append(stop);
    node.append(row);
    if (run.stop && run.stop !== "Stop requested") node.append(make("p", "hp-job-note", run.stop));
  }
  return node;
}
function storePart(store, added) {
  const node = make("section");
  node.dataset.store = store.store;
  const head = make("ul", "hp-store-list");
  const row = make("li");
  const state = store.age_s === null ? (store.reading ? "Reading…" : store.error ? "" : "Waiting…") : `read ${ago(store.age_s)}`;
  row.append(make("strong", "", store.store), make("span", "hp-hint", state));
  if (added.includes(store.store)) {
    const forget = button("Remove", "hp-quiet", async () => {
      await server.change_stores({ remove: store.store }).catch(() => null);
      show(false);
    });
    forget.setAttribute("aria-label", `Remove ${store.store} from this list`);
    row.append(forget);
  }
  head.append(row);
  node.append(head);
  if (store.error) {
    const box = live("div", "hp-problem hp-bad", "status");
    box.append(make("p", "", store.error));
    node.append(box);
  }
  if (store.age_s !== null && !store.runs.length && !store.error) node.append(make("p", "hp-none", "This store has no run."));
  node.append(...store.runs.map((run) => runCard(run, store.store)));
  return node;
}
function tell(text) {
  problem.textContent = text;
  problem.hidden = !text;
}
let drawn = "";
let asking = false;
async function show(refresh) {
  if (asking) return;
  asking = true;
  const answer = await server.show_fleet({ refresh }).catch(() => null);
  asking = false;
  // Runs on other machines do not need this server, so what was read last stays.
  unanswered.textContent = answer ? "" : "Hangproof does not answer. What follows is what it read last; the runs continue without it.";
  unanswered.hidden = Boolean(answer);
  if (answer?.ok && !answer.stores) setTimeout(show, 300); // it has just started, and looks for the stores
  if (!answer?.stores) return;
  const key = JSON.stringify([answer, Math.floor(Date.now() / 10000)]); // ages are renewed every ten seconds
  if (key === drawn) return;
  drawn = key;
  const focused = list.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  const parts = answer.stores.map((store) => storePart(store, answer.added));
  if (!parts.length) {
    const empty = make("div", "hp-empty");
    empty.append(make("strong", "", "No store is known"), make("p", "", "Add one above, or give a run a store."));
    parts.push(empty);
  }
  list.replaceChildren(...parts);
  if (focused) [...list.querySelectorAll("button")].find((one) => one.getAttribute("aria-label") === focused)?.focus();
}
adding.addEventListener("submit", async (event) => {
  event.preventDefault();
  tell("");
  const answer = await reply(server.change_stores({ add: input.value }));
  if (answer.ok) input.value = "";
  else tell(answer.error);
  show(false);
});
const seen = () => element.isConnected && element.checkVisibility() && document.visibilityState === "visible";
const timer = setInterval(() => {
  if (!element.isConnected) clearInterval(timer);
  else if (seen()) show(false);
}, ASK_MS);
new IntersectionObserver(() => seen() && show(false)).observe(element);
