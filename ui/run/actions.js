// The buttons of the selected run beside Start and Stop (ui/run/actions.py). The value says which actions are possible.
const ACTIONS = {
  sample: ["Sample now", "Makes the sample images of the current step. The training stays the same."],
  save: ["Save a checkpoint", "Saves a checkpoint and the LoRA of the current step."],
  pause: ["Pause", "Saves a checkpoint, then ends the training, so that its GPU is free. Resume continues from there."],
  queue: ["Add to the queue", "It starts when the GPU is free and the runs before it have ended."],
  now: ["Run now", "Pauses the run that uses the GPU, trains this one, then goes on with the other."],
  cancel: ["Leave the queue", "The run and its files stay."],
};
const BUSY = { sample: "Sampling…", save: "Saving…" };
let asked = { run: "", id: "" };
let pausing = "";
const current = () => props.value || { run: "", do: [], waiting: [], answer: null, position: 0 };

const row = make("div", "hp-more-actions");
const note = live("p", "hp-action-note", "status");
note.dataset.testid = "action-note";
const buttons = {};
for (const [name, [label, title]] of Object.entries(ACTIONS)) {
  buttons[name] = button(label, "", () => act(name));
  buttons[name].title = title;
  buttons[name].dataset.testid = `do-${name}`;
  row.append(buttons[name]);
}
element.replaceChildren(row, note);

function say(text, bad) {
  if (note.textContent !== text) note.textContent = text;
  note.classList.toggle("hp-bad", Boolean(bad));
  note.hidden = !text;
}
async function act(name) {
  const run = current().run;
  buttons[name].disabled = true;
  const answer = await reply(server.run_action({ run, do: name }));
  buttons[name].disabled = false;
  if (current().run !== run) return;
  if (!answer.ok) return say(answer.error, true);
  if (answer.id) {
    asked = { run, id: answer.id };
    say(`${ACTIONS[name][0]}: requested. It is done when the current step is complete.`);
  } else if (name === "pause") {
    pausing = run;
    say("Pausing: it saves a checkpoint first.");
  } else if (name === "now" && answer.paused.length) say(`Pausing ${answer.paused.join(", ")} first.`);
  else say("");
  draw();
}
let shown = "";
function draw() {
  const { run, do: possible, waiting, answer, position } = current();
  if (run !== shown) {
    shown = run;
    say("");
  }
  if (!possible.includes("pause")) pausing = pausing === run ? "" : pausing;
  for (const [name, one] of Object.entries(buttons)) {
    const busy = waiting.includes(name) || (name === "pause" && pausing === run);
    one.hidden = !possible.includes(name);
    one.setAttribute("aria-disabled", busy);
    const label = busy ? BUSY[name] || "Pausing…" : ACTIONS[name][0];
    if (one.textContent !== label) one.textContent = label;
  }
  row.hidden = !possible.length;
  if (answer && asked.run === run && answer.id === asked.id) {
    asked = { run: "", id: "" };
    say(answer.message[0].toUpperCase() + answer.message.slice(1) + ".", !answer.done);
  } else if (position && !note.classList.contains("hp-bad")) say(`Waits in the queue, position ${position}.`);
  else if (!position && note.textContent.startsWith("Waits in the queue")) say("");
}
watch("value", draw);
draw();
