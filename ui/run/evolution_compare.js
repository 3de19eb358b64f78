// Two views of large samples: one prompt through all steps, and two checkpoints beside or over each other.

// Through the steps -------------------------------------------------------------------------------------------------------
const steps = make("div", "hp-steps-view");
const stepsPrompt = choice("Prompt", "steps-prompt");
const stepsRange = make("input");
stepsRange.type = "range";
stepsRange.min = "0";
stepsRange.step = "1";
stepsRange.setAttribute("aria-label", "Step");
stepsRange.dataset.testid = "steps-range";
const PLAY_MS = 400;
let playing = 0;
const play = button("Play", "hp-quiet", () => (playing ? pause() : begin()));
const stepsPicture = make("img", "hp-ev-large");
const stepsCaption = live("p", "hp-steps-caption", "status");
const stepsBar = make("div", "hp-steps-bar");
stepsBar.append(play, stepsRange);
steps.append(stepsPrompt.box, stepsBar, stepsCaption, stepsPicture);
const kept = new Map(); // URL -> image that was loaded ahead

const stepsRow = () => rows.find((row) => `${row.number}` === stepsPrompt.select.value) || rows[0];
function ahead(url) {
  if (!kept.has(url)) {
    const image = new Image();
    image.src = url;
    kept.set(url, image);
    if (kept.size > 24) kept.delete(kept.keys().next().value);
  }
  return kept.get(url);
}
function drawStep() {
  const row = stepsRow();
  if (!row) return;
  const index = Math.min(Number(stepsRange.value), row.items.length - 1);
  const item = row.items[index];
  if (stepsPicture.getAttribute("src") !== item.url) stepsPicture.src = item.url;
  stepsPicture.alt = `Sample, ${item.at}: ${row.prompt}`;
  stepsRange.setAttribute("aria-valuetext", item.at);
  const found = figures(item.snapshot).map(([label, value]) => `${label} ${short(value)}`);
  const text = make("span", "", [upper(item.at), ...found].join(" · "));
  stepsCaption.replaceChildren(text, ...marksOf(item.snapshot), ...(item.snapshot.lora ? [loraLink(item.snapshot, "Download LoRA")] : []));
  for (const near of [index + 1, index - 1, index + 2]) if (row.items[near]) ahead(row.items[near].url);
}
function pause() {
  clearTimeout(playing);
  playing = 0;
  play.textContent = "Play";
}
function begin() {
  if (Number(stepsRange.value) >= Number(stepsRange.max)) stepsRange.value = "0";
  drawStep();
  play.textContent = "Pause";
  playing = setTimeout(next, PLAY_MS);
}
async function next() {
  const row = stepsRow();
  const index = Number(stepsRange.value) + 1;
  if (!element.isConnected || steps.hidden || !row || index >= row.items.length) return pause();
  const image = ahead(row.items[index].url); // a step is shown when its image is there
  await image.decode().catch(() => {});
  if (!playing) return;
  stepsRange.value = `${index}`;
  drawStep();
  playing = setTimeout(next, PLAY_MS);
}
stepsRange.addEventListener("input", () => {
  pause();
  drawStep();
});
stepsPrompt.select.addEventListener("change", () => drawSteps(true));
function drawSteps(otherPrompt) {
  setOptions(stepsPrompt.select, rows.map((row) => [`${row.number}`, row.prompt]));
  const row = stepsRow();
  if (!row) return;
  const atEnd = otherPrompt || stepsRange.value === stepsRange.max;
  stepsRange.max = `${row.items.length - 1}`;
  if (atEnd && !playing) stepsRange.value = stepsRange.max;
  drawStep();
}

// Two checkpoints -----------------------------------------------------------------------------------------------------------
const compare = make("div", "hp-compare-view");
const comparePrompt = choice("Prompt", "compare-prompt");
const stepA = choice("A", "compare-a");
const runB = choice("Run of B", "compare-run");
const stepB = choice("B", "compare-b");
const layout = choice("Show", "compare-layout");
setOptions(layout.select, [["over", "over each other"], ["beside", "beside each other"]]);
const compareBar = make("div", "hp-compare-bar");
compareBar.append(comparePrompt.box, stepA.box, runB.box, stepB.box, layout.box);
const stage = make("div", "hp-ab");
stage.dataset.testid = "compare-stage";
const [imageA, imageB] = [make("img"), make("img")];
imageA.className = "hp-ab-a";
imageB.className = "hp-ab-b";
const divider = make("input");
divider.type = "range";
divider.min = "0";
divider.max = "100";
divider.value = "50";
divider.setAttribute("aria-label", "Divider: share of the picture that shows A");
const line = make("i", "hp-ab-line");
stage.append(imageB, imageA, line, divider);
const compareText = make("div", "hp-compare-text");
const compareNote = live("p", "hp-none", "status");
compare.append(compareBar, compareNote, stage, compareText);
let other = null; // the API's answer for the run of B, when it is another one
let runsKnown = [];

const slide = () => stage.style.setProperty("--hp-at", `${divider.value}%`);
divider.addEventListener("input", slide);
slide();
const ofB = () => (other && other.run === runB.select.value ? other : data);
function samePrompt(found, row) {
  const list = found === data ? rows : rowsOf(found);
  return list.find((one) => one.prompt === row.prompt) || list.find((one) => one.number === row.number) || list[0];
}
function describe(name, found, item) {
  const node = make("div");
  const title = make("strong", "", `${name} · ${found === data ? "" : `${found.name} · `}${item.at}`);
  const list = make("dl", "hp-facts");
  for (const [label, value] of figures(item.snapshot)) {
    const pair = make("div");
    pair.append(make("dt", "", label), make("dd", "", short(value)));
    list.append(pair);
  }
  node.append(title, ...marksOf(item.snapshot), ...(list.childElementCount ? [list] : []));
  if (item.snapshot.lora) node.append(loraLink(item.snapshot, "Download LoRA"));
  return node;
}
function drawCompare() {
  setOptions(comparePrompt.select, rows.map((row) => [`${row.number}`, row.prompt]));
  const row = rows.find((one) => `${one.number}` === comparePrompt.select.value) || rows[0];
  if (!row) return;
  const second = samePrompt(ofB(), row);
  setOptions(stepA.select, row.items.map((one) => [one.key, upper(one.at)]), row.items[0].key);
  if (second) setOptions(stepB.select, second.items.map((one) => [one.key, upper(one.at)]), second.items.at(-1).key);
  const known = runsKnown.filter((one) => one.run !== data.run);
  setOptions(runB.select, [[data.run, "this run"], ...known.map((one) => [one.run, one.name])], data.run);
  const a = row.items.find((one) => one.key === stepA.select.value) || row.items[0];
  const b = second && (second.items.find((one) => one.key === stepB.select.value) || second.items.at(-1));
  compareNote.textContent = b ? (second.prompt === row.prompt ? "" : `B shows another prompt: ${second.prompt}`) : "This run has no samples.";
  stage.hidden = !b;
  if (!b) return compareText.replaceChildren();
  stage.dataset.layout = layout.select.value;
  for (const [image, name, item] of [[imageA, "A", a], [imageB, "B", b]]) {
    if (image.getAttribute("src") !== item.url) image.src = item.url;
    image.alt = `${name}, ${item.at}: ${row.prompt}`;
  }
  compareText.replaceChildren(describe("A", data, a), describe("B", ofB(), b));
}
async function loadRuns() {
  const answer = await fetch(base("api/evolution")).then((r) => (r.ok ? r.json() : null)).catch(() => null);
  if (!answer) return;
  runsKnown = answer.runs;
  drawCompare();
}
runB.select.addEventListener("change", async () => {
  const wanted = runB.select.value;
  other = null;
  if (wanted !== data.run) {
    const url = base(`api/evolution/${encodeURIComponent(wanted)}`);
    const answer = await fetch(url).then((r) => (r.ok ? r.json() : null)).catch(() => null);
    if (runB.select.value !== wanted) return;
    other = answer;
  }
  drawCompare();
});
for (const one of [comparePrompt, stepA, stepB, layout]) one.select.addEventListener("change", drawCompare);
