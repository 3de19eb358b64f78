// The fold "Sweep" of step 3 (ui/new/sweep.py). Its fields are built when it is opened. Texts are set with textContent.
const { node, body } = folding("Sweep", "Several runs that differ in rank, learning rate or epochs, one after another", "sweep", "hp-sweep");
element.replaceChildren(node);
const inputs = {};
let other = null;
let timer = 0;
let asked = 0;
const said = live("p", "hp-action-note", "status");
said.dataset.testid = "sweep-plan";
const names = make("ul", "hp-sweep-names");
const go = button("Queue these runs", "", start);
go.dataset.testid = "sweep-start";
go.disabled = true;

function values() {
  const found = {};
  for (const [key, input] of Object.entries(inputs)) if (input.value.trim()) found[key] = input.value;
  if (other && other.key.value && other.input.value.trim()) found[other.key.value] = other.input.value;
  return found;
}
async function ask(what, more) {
  return reply(server.sweep_call({ draft: window.hangproof?.draft?.(), do: what, ...more }));
}
function say(text, bad) {
  said.textContent = text;
  said.classList.toggle("hp-bad", Boolean(bad));
}
function field(label, hint, key) {
  const box = make("label", "hp-sweep-field");
  const input = make("input");
  input.type = "text";
  input.maxLength = 200;
  input.placeholder = hint;
  input.autocomplete = "off";
  if (key) input.dataset.field = key;
  input.addEventListener("input", later);
  box.append(make("span", "", label), input);
  return { box, input };
}
async function open() {
  if (body.childElementCount) return later();
  const answer = await ask("open");
  if (!answer.ok) return body.replaceChildren(make("p", "hp-action-note hp-bad", answer.error));
  const row = make("div", "hp-sweep-fields");
  const hints = { rank: "8, 16, 32", learning_rate: "1e-4, 5e-4", epochs: "8, 16" };
  for (const [key, label] of Object.entries(answer.fields)) {
    const made = field(label, hints[key] || "", key);
    inputs[key] = made.input;
    row.append(made.box);
  }
  const key = make("select");
  key.setAttribute("aria-label", "Another field");
  key.append(new Option("Another field…", ""), ...answer.others.map((one) => new Option(one.label, one.key)));
  key.addEventListener("change", later);
  const made = field("", "Values");
  made.box.firstChild.replaceWith(key);
  other = { key, input: made.input };
  made.input.setAttribute("aria-label", "Values of the other field");
  row.append(made.box);
  const about = `Enter values with commas between them. Each combination is a run, at most ${answer.most}; all share one copy of the images.`;
  body.replaceChildren(make("p", "hp-hint", about), row, said, names, go);
  later();
}
function later() {
  clearTimeout(timer);
  timer = setTimeout(plan, 350);
}
async function plan() {
  const wanted = values();
  names.replaceChildren();
  go.disabled = true;
  if (!Object.keys(wanted).length) return say("");
  const number = ++asked;
  await window.hangproof?.flush?.();
  const answer = await ask("plan", { values: wanted });
  if (number !== asked) return;
  if (!answer.ok) return say(answer.error, true);
  const steps = answer.steps ? `, ${answer.steps.toLocaleString("en-US")} steps together` : "";
  say(`${answer.runs.length} runs${steps}:`);
  names.replaceChildren(...answer.runs.map((name) => make("li", "", name)));
  go.disabled = false;
}
async function start() {
  go.disabled = true;
  await window.hangproof?.flush?.();
  say("Making the runs…");
  const answer = await ask("start", { values: values() });
  if (!answer.ok) {
    go.disabled = false;
    return say(answer.error, true);
  }
  names.replaceChildren();
  say(`${answer.runs.length} runs are in the queue as ${answer.sweep}. The tab Runs shows them.`);
}
node.addEventListener("toggle", () => node.open && open());
