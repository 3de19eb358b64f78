// The blind vote and the likeness of samples and training images.
const vote = make("div", "hp-vote-view");
const voteAbout = make(
  "p",
  "hp-vote-about",
  "Which sample is better? Each pair shows one prompt, drawn by two LoRAs of this run. Which LoRA is where stays hidden until you show the result. Each vote is stored at once.",
);
const votePrompt = make("h4");
const voteSides = make("div", "hp-vote-sides");
const voteNote = live("p", "hp-none", "status");
const voteBar = make("div", "hp-vote-bar");
const voteResult = make("div", "hp-vote-result");
let pair = null;
let voting = false;
let forget = false; // the next click on "Start over" forgets the votes
function side(name, text) {
  const node = make("button", "hp-vote-side");
  node.type = "button";
  node.dataset.testid = `vote-${name}`;
  const image = make("img");
  node.append(image, make("span", "", text));
  node.addEventListener("click", () => cast(name));
  return { node, image };
}
const left = side("left", "Left is better");
const right = side("right", "Right is better");
voteSides.append(left.node, right.node);
const equal = button("Equal", "hp-quiet", () => cast("equal"));
const reveal = button("Show the result", "hp-quiet", () => drawResult(true));
const restart = button("Start over", "hp-quiet", startOver);
voteBar.append(equal, reveal, restart);
for (const node of [votePrompt, voteSides, equal, reveal, restart]) node.hidden = true; // until there is a pair
vote.append(voteAbout, votePrompt, voteSides, voteBar, voteNote, voteResult);
vote.addEventListener("keydown", (event) => {
  const named = { ArrowLeft: "left", ArrowRight: "right", ArrowDown: "equal" }[event.key];
  if (!named || !pair) return;
  event.preventDefault();
  cast(named);
});

function problem(text) {
  voteNote.textContent = text;
  voteNote.classList.toggle("hp-vote-problem", Boolean(text));
}
function showPair(answer) {
  pair = answer.ok ? answer : null;
  for (const node of [votePrompt, voteSides, equal]) node.hidden = !pair;
  reveal.hidden = restart.hidden = !pair || !answer.votes;
  if (!pair) return problem(answer.error);
  problem("");
  votePrompt.textContent = pair.prompt;
  const where = `api/evolution/${encodeURIComponent(current().run)}/pair/${encodeURIComponent(pair.id)}`;
  left.image.src = base(`${where}/left`);
  right.image.src = base(`${where}/right`);
  left.image.alt = "Left sample";
  right.image.alt = "Right sample";
  const more = Math.max(0, pair.enough - pair.votes);
  const rest = more ? `; ${more} more give a result` : "";
  voteNote.textContent = `${pair.votes} ${pair.votes === 1 ? "vote" : "votes"} on ${pair.loras} LoRAs${rest}`;
}
async function openVote() {
  if (voting) return;
  voting = true;
  const run = current().run;
  const answer = await ask("evolution_next");
  voting = false;
  if (run === current().run) showPair(answer);
  if (answer.ok && answer.named) drawResult(true);
}
async function cast(name) {
  if (!pair || voting) return;
  voting = true;
  for (const one of [left.node, right.node, equal]) one.disabled = true;
  const wasNamed = pair.named;
  const focused = document.activeElement;
  const answer = await ask("evolution_vote", { id: pair.id, choice: name });
  voting = false;
  for (const one of [left.node, right.node, equal]) one.disabled = false;
  if (focused && vote.contains(focused)) focused.focus();
  if (!answer.ok) return problem(answer.error);
  showPair(answer);
  if (answer.named && !wasNamed) drawResult(true);
  else if (voteResult.childElementCount) drawResult(false);
}
async function drawResult(focus) {
  const answer = await ask("evolution_result");
  if (!answer.ok) return problem(answer.error);
  showResult(answer);
  if (focus) voteResult.scrollIntoView({ block: "nearest" });
}
function showResult(answer) {
  const table = make("table", "hp-vote-table");
  const head = make("tr");
  for (const text of ["LoRA", "Won", "Chance to be the best", ""]) head.append(make(text ? "th" : "td", "", text));
  const body = make("tbody");
  for (const one of answer.rows) {
    const row = make("tr");
    const name = make("th", "", `Step ${grouped(one.step)}`);
    name.scope = "row";
    if (one.step === answer.picked) name.append(make("span", "hp-mark-pill hp-done", "picked"));
    const chance = one.chance < 0.01 ? "below 1%" : `${Math.min(99, Math.round(one.chance * 100))}%`;
    const cell = make("td");
    if (one.step !== answer.picked) {
      const go = button("Pick", "hp-quiet", async () => {
        const result = await ask("evolution_pick", { step: one.step });
        if (!result.ok) return problem(result.error);
        showResult(result);
        refetch();
      });
      go.setAttribute("aria-label", `Pick the LoRA of step ${grouped(one.step)}`);
      cell.append(go);
    }
    row.append(name, make("td", "", `${one.won} of ${one.seen}`), make("td", "", chance), cell);
    body.append(row);
  }
  const top = make("thead");
  top.append(head);
  table.append(top, body);
  const text = make("p", "hp-verdict " + (answer.named === null ? "hp-info" : "hp-done"), answer.text);
  text.dataset.testid = "vote-verdict";
  text.setAttribute("role", "status");
  voteResult.replaceChildren(text, table);
}
async function startOver() {
  if (!forget) {
    forget = true;
    restart.textContent = `Forget ${pair ? pair.votes : "all"} votes`;
    setTimeout(() => {
      forget = false;
      restart.textContent = "Start over";
    }, 6000);
    return;
  }
  forget = false;
  restart.textContent = "Start over";
  const answer = await ask("evolution_reset");
  if (!answer.ok) return problem(answer.error);
  voteResult.replaceChildren();
  refetch();
  openVote();
}

// Likeness ---------------------------------------------------------------------------------------------------------------
const { node: alike, body: alikeBody } = folding("Likeness", "How alike the samples and your images are", "", "hp-alike");
const alikeText = make("p", "hp-say");
const alikeState = live("p", "hp-job-state", "status");
const alikeGo = button("Compute likeness", "hp-primary", () => likenessCall({}));
const alikeStop = button("Cancel", "hp-quiet", () => likenessCall({ cancel: true }));
alikeBody.append(alikeText, alikeState, alikeGo, alikeStop);
let alikeProblem = "";
async function likenessCall(more) {
  alikeGo.disabled = true;
  const answer = await ask("evolution_likeness", more);
  alikeGo.disabled = false;
  alikeProblem = answer.ok ? "" : answer.error;
  drawLikeness();
}
function drawLikeness() {
  const found = data.likeness || { missing: "", model: "", scored: 0, own: null };
  const job = current().job;
  const busy = job && job.state === "running";
  const samples = rows.reduce((sum, row) => sum + row.items.length, 0);
  const own = found.own === null ? "" : ` Your ${found.images} training images among themselves: ${short(found.own)}.`;
  const meaning = "The score is the mean cosine similarity, from 0 (nothing in common) to 1 (the same picture). It measures resemblance, not quality: a LoRA that copies its images scores highest.";
  alikeText.textContent = found.missing && !found.scored ? found.missing : `${found.model ? `Computed by ${found.model}.` : ""}${own} ${meaning}`.trim();
  alikeGo.hidden = Boolean(found.missing) || busy || (found.scored >= samples && samples > 0);
  alikeGo.textContent = found.scored ? "Compute for the new samples" : "Compute likeness";
  alikeStop.hidden = !busy;
  let text = "";
  if (alikeProblem) text = alikeProblem;
  else if (busy) text = job.line ? `Running: ${job.line}` : "Running: reading the model";
  else if (job && job.state !== "done") text = { cancelled: "Cancelled. Finished scores are kept.", failed: `Failed: ${job.error || "no reason was given"}`, lost: "The process ended without a result, for example because the machine restarted. Finished scores are kept." }[job.state] || job.state;
  if (alikeState.textContent !== text) alikeState.textContent = text;
  alikeState.dataset.state = job ? job.state : "";
}
