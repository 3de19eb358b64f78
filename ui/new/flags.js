// The table of a trainer's options. Runs as the body of gr.HTML's js_on_load.
//
// Built with textContent only. The values are stored in the "Extra trainer options" box: the table changes the line of one
// option there and leaves all other text as typed.
const search = make("input", "hp-search");
search.type = "search";
search.placeholder = "Search names and descriptions";
search.setAttribute("aria-label", "Search options");
const count = live("span", "hp-flag-count", "status");
const top = make("div", "hp-flag-top");
top.append(search, count);
const list = make("div", "hp-flag-list");
element.replaceChildren(top, list);

// The box -----------------------------------------------------------------------------------------------------------
const box = () => document.querySelector("#flags textarea");
const keyOf = (line) => (line.includes("=") ? line.split("=")[0].trim().replace(/^--/, "").replaceAll("-", "_") : "");
const valueOf = (line) => line.slice(line.indexOf("=") + 1);
const typed = () => {
  const found = new Map();
  for (const line of (box() ? box().value : "").split("\n")) if (keyOf(line)) found.set(keyOf(line), valueOf(line));
  return found;
};
function write(name, value) {
  const area = box();
  const lines = area.value.split("\n");
  const last = lines.map(keyOf).lastIndexOf(name); // the last line wins
  if (value === null) area.value = lines.filter((line) => keyOf(line) !== name).join("\n");
  else if (last >= 0) area.value = lines.map((line, at) => (at === last ? `${name}=${value}` : line)).join("\n");
  else area.value += (area.value && !area.value.endsWith("\n") ? "\n" : "") + `${name}=${value}`;
  area.dispatchEvent(new Event("input", { bubbles: true }));
}

// Rows --------------------------------------------------------------------------------------------------------------
const state = () => props.value || { flags: [], label: "", problem: "", backend: "", model: "" };
let rows = new Map();
async function check(name, value) {
  try {
    return (await server.check_flag({ backend: state().backend, model: state().model, name, value })).errors;
  } catch (error) {
    return ["The server does not respond. The option was not set."];
  }
}
function control(flag, current) {
  const options = flag.switch ? ["true", "false"] : flag.choices;
  const node = make(options.length && !flag.type.startsWith("list of") ? "select" : "input");
  if (node.tagName === "SELECT") for (const one of options) node.append(new Option(one, one));
  const start = current ?? (flag.value || (flag.switch ? "true" : ""));
  if (node.tagName === "INPUT") {
    node.placeholder = flag.default || flag.type;
    node.spellcheck = false;
    node.value = start;
  } else {
    if (current !== undefined && !options.includes(current)) node.prepend(new Option(current, current));
    node.value = start || options[0];
  }
  node.setAttribute("aria-label", "Value of " + flag.name);
  return node;
}
function editor(flag) {
  const line = make("div", "hp-flag-edit");
  const problems = live("div", "hp-flag-errors", "alert");
  const value = control(flag, typed().get(flag.name));
  let timer = null;
  const showErrors = (errors) => {
    problems.replaceChildren(...errors.map((one) => make("p", "", one)));
    value.setAttribute("aria-invalid", errors.length ? "true" : "false");
  };
  const validate = async () => {
    clearTimeout(timer);
    const text = value.value;
    const errors = text.trim() ? await check(flag.name, text) : [];
    if (text === value.value) showErrors(errors);
    return errors;
  };
  value.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(validate, 350);
  });
  value.addEventListener("blur", validate);
  const set = async () => {
    if (!value.value.trim()) return showErrors([`${flag.name}: enter a value`]);
    if (!(await validate()).length) write(flag.name, value.value);
  };
  value.addEventListener("keydown", (event) => {
    if (event.key === "Enter") set();
  });
  const remove = button("Remove", "hp-quiet hp-flag-remove", () => write(flag.name, null));
  line.append(value, button("Set", "hp-set", set), remove);
  return [line, problems];
}
function body(flag) {
  const inside = make("div", "hp-flag-body");
  inside.append(make("p", "", flag.help || "The trainer has no description of this option."));
  const facts = [`Type: ${flag.type}`];
  if (flag.choices.length) facts.push(`One of: ${flag.choices.join(", ")}`);
  facts.push(`Trainer default: ${flag.default || "none"}`);
  if (flag.value) facts.push(`${flag.by} sets it to ${flag.value}`);
  inside.append(make("p", "hp-flag-facts", facts.join(" · ")));
  if (flag.locked) inside.append(make("p", "hp-flag-facts", `Set by: ${flag.by}. Change it there.`));
  else inside.append(...editor(flag));
  return inside;
}
function rowOf(flag) {
  const row = make("div", "hp-flag");
  row.dataset.flag = flag.name;
  const head = make("button", "hp-flag-head");
  head.type = "button";
  head.setAttribute("aria-expanded", "false");
  const mark = make("span", "hp-flag-mark");
  head.append(make("code", "", flag.name), mark, make("span", "hp-flag-type", flag.type), make("span", "hp-flag-help", flag.brief));
  head.addEventListener("click", () => {
    const open = row.children.length > 1;
    head.setAttribute("aria-expanded", String(!open));
    if (open) row.lastChild.remove();
    else row.append(body(flag));
  });
  row.append(head);
  return { flag, row, mark, text: `${flag.name} ${flag.name.replaceAll("_", " ")} ${flag.help}`.toLowerCase() };
}
function marks() {
  const set = typed();
  for (const { flag, row, mark } of rows.values()) {
    const own = set.get(flag.name);
    row.classList.toggle("hp-own", own !== undefined);
    row.classList.toggle("hp-locked", flag.locked);
    if (own !== undefined) mark.textContent = `your value: ${own}`;
    else if (flag.by) mark.textContent = flag.value ? `${flag.by}: ${flag.value}` : flag.by;
    else mark.textContent = "";
  }
}
let latest = 0;
async function filter() {
  const request = ++latest;
  const query = search.value.trim().toLowerCase().replace(/^--/, "");
  const words = query.split(/\s+/).filter(Boolean);
  const hits = [...rows.values()].filter((one) => words.every((word) => one.text.includes(word)));
  const rank = ({ flag }) => (flag.name === query ? 0 : flag.name.startsWith(query) ? 1 : flag.name.includes(query) ? 2 : 3);
  if (query) hits.sort((a, b) => rank(a) - rank(b));
  list.replaceChildren(...hits.map((one) => one.row));
  list.scrollTop = 0;
  count.textContent = query ? `${hits.length} of ${rows.size}` : `${rows.size} options of ${state().label}`;
  if (hits.length || !query) return;
  const name = query.replaceAll("-", "_");
  const errors = /^\w+$/.test(name) ? await check(name, "") : [];
  if (request === latest) list.replaceChildren(make("p", "hp-none", errors.join(" ") || "No option matches this search."));
}
function draw() {
  const { flags, problem } = state();
  rows = new Map(flags.map((flag) => [flag.name, rowOf(flag)]));
  top.hidden = !flags.length;
  marks();
  filter();
  if (!flags.length) list.replaceChildren(make("p", "hp-none", problem || "Loading the trainer's options…"));
}
search.addEventListener("input", filter);
document.addEventListener("input", (event) => {
  if (event.target === box()) marks();
});
watch("value", draw);
draw();
