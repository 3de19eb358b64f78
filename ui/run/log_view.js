// The log of a run (ui/run/log_view.py). The value is {run, stamp, error, hidden, incidents, url, size}; the lines are asked for when the
// stamp changes, the log is on the screen and follows its end. A line is text with a terminal's colour codes: each part is set
// with textContent, so markup in a log stays text.
const ASK_S = 1;
const UTC = /\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)/g;
let run = "";
let stamp = null; // of the lines that are shown
let mode = "tail"; // tail, found or around
let follow = true;
let visible = false;
let asking = false;
let search = { number: 0, next: null, found: [] };
const current = () => props.value || { run: "", stamp: "" };

const section = make("section", "hp-section");
const heading = make("h3", "", "Log");
const where = make("span");
heading.append(where);
const first_error = make("p", "hp-first-error");
first_error.dataset.testid = "first-error";
const bar = make("form", "hp-log-bar");
bar.setAttribute("role", "search");
const query = make("input");
query.type = "search";
query.maxLength = 200;
query.placeholder = "Search the log";
query.setAttribute("aria-label", "Search the log");
const pattern_label = make("label", "hp-switch");
const pattern = make("input");
pattern.type = "checkbox";
pattern_label.append(pattern, make("span", "", "Regex"));
const level = make("select");
level.setAttribute("aria-label", "Lines");
for (const [key, text] of [["", "All lines"], ["warning", "Warnings and errors"], ["error", "Errors"]]) {
  const option = make("option", "", text);
  option.value = key;
  level.append(option);
}
const jump = make("select");
jump.setAttribute("aria-label", "Jump to an incident");
const follow_button = button("Follow", "hp-quiet", () => (follow && mode === "tail" ? pause() : showTail()));
const download = make("a", "hp-button", "Download");
download.download = "training.log";
bar.append(query, pattern_label, level, jump, follow_button, download);
const status = live("p", "hp-log-status", "status");
const more = button("Search earlier lines", "hp-quiet", () => searchOn());
more.hidden = true;
const pane = region("hp-log", "Training log");
pane.dataset.testid = "log";
const text = make("pre");
pane.append(text);
const empty = make("p", "hp-none", "The log is empty.");
const hidden = make("p", "hp-none hp-hidden-lines");
section.append(heading, first_error, bar, status, more, pane, empty, hidden);

// Lines ------------------------------------------------------------------------------------------------------------------
const STYLES = { 1: "hp-sgr-bold", 2: "hp-sgr-faint", 3: "hp-sgr-italic", 4: "hp-sgr-under" };
function withTimes(node, part) {
  let last = 0;
  for (const match of part.matchAll(UTC)) {
    node.append(part.slice(last, match.index));
    const time = make("time", "", match[0]);
    time.dateTime = match[0];
    node.append(time);
    last = match.index + match[0].length;
  }
  node.append(part.slice(last));
}
function lineNode([kind, content, offset]) {
  const node = make("span", `hp-log-line${kind ? " hp-log-" + kind : ""}`);
  const styles = new Set();
  for (const part of content.split(/(\x1b\[[0-9;]*m)/)) {
    if (part.startsWith("\x1b[")) {
      const codes = part.slice(2, -1).split(";").map(Number);
      for (let n = 0; n < codes.length; n += 1) {
        const code = codes[n];
        const colour = (code >= 30 && code <= 37) || (code >= 90 && code <= 97);
        if (code === 0) styles.clear();
        else if (code === 38 || code === 48) n += codes[n + 1] === 5 ? 2 : 4; // a colour of 256, or of all: not shown
        else if (code === 22) for (const one of [STYLES[1], STYLES[2]]) styles.delete(one);
        else if (code === 23 || code === 24) styles.delete(STYLES[code - 20]);
        else if (STYLES[code]) styles.add(STYLES[code]);
        if (colour || code === 39) for (const one of [...styles]) if (one.startsWith("hp-sgr-c")) styles.delete(one);
        if (colour) styles.add(`hp-sgr-c${code % 10}`);
      }
    } else if (part) {
      const target = styles.size ? make("span", [...styles].join(" ")) : node;
      withTimes(target, part);
      if (target !== node) node.append(target);
    }
  }
  node.append("\n");
  if (offset !== undefined) {
    node.tabIndex = 0;
    node.setAttribute("role", "button");
    node.title = "Show the lines around this one";
    node.dataset.at = offset;
  }
  return node;
}
// Only what was added is drawn again: a selection in the lines before it stays.
let shown = [];
function showLines(lines) {
  const key = (line) => line.join("\0");
  const keys = lines.map(key);
  let keep = -1;
  const same = (skip) => shown.length > skip && shown.slice(skip, -1).every((one, n) => one === keys[n]);
  for (let skip = 0; skip < shown.length && keep < 0; skip += 1) if (shown[skip] === keys[0] && same(skip)) keep = skip;
  if (keep < 0) text.replaceChildren(...lines.map(lineNode));
  else {
    for (let n = 0; n < keep; n += 1) text.firstChild.remove();
    const stay = Math.max(0, shown.length - keep - 1); // the last line can be a progress bar that has moved
    while (text.children.length > stay) text.lastChild.remove();
    text.append(...lines.slice(stay).map(lineNode));
  }
  shown = keys;
  empty.hidden = lines.length > 0;
  pane.hidden = !lines.length;
}

// Modes --------------------------------------------------------------------------------------------------------------------
async function ask(name, data) {
  return reply(server[name]({ run: current().run, ...data }));
}
function setFollow(on) {
  follow = on;
  follow_button.setAttribute("aria-pressed", String(on && mode === "tail"));
}
function pause() {
  setFollow(false);
}
function showTail() {
  mode = "tail";
  stamp = null; // whatever is shown is not the end
  search = { number: search.number + 1, next: null, found: [] };
  query.value = "";
  level.value = "";
  more.hidden = true;
  status.textContent = "";
  pane.classList.remove("hp-log-plain");
  setFollow(true);
  pane.scrollTop = 0;
  refresh(true);
}
async function refresh(now) {
  const value = current();
  if (!value.run || mode !== "tail" || !follow || asking || (!visible && !now) || stamp === value.stamp) return;
  asking = true;
  const answer = await ask("log_tail", {});
  if (answer.ok && value.run === current().run && mode === "tail") {
    stamp = value.stamp;
    showLines(answer.lines);
  }
  setTimeout(() => {
    asking = false;
    if (element.isConnected) refresh(false);
  }, ASK_S * 1000);
}
async function searchNew() {
  const number = search.number + 1;
  search = { number, next: null, found: [] };
  if (!query.value && !level.value) {
    if (mode !== "tail") showTail();
    return;
  }
  mode = "found";
  setFollow(false);
  pane.classList.add("hp-log-plain");
  shown = [];
  await searchOn();
}
async function searchOn() {
  const number = search.number;
  const wanted = search.found.length + 200;
  more.hidden = true;
  do {
    const answer = await ask("log_search", { text: query.value, pattern: pattern.checked, level: level.value, before: search.next });
    if (number !== search.number) return;
    if (!answer.ok) {
      status.textContent = answer.error;
      return;
    }
    search.found = [...answer.found, ...search.found];
    search.next = answer.next;
    const many = search.found.length;
    const found = many === 1 ? "1 line" : `${many.toLocaleString("en-US")} lines`;
    const share = Math.floor(answer.searched * 100);
    status.textContent = answer.next === null ? `${found} found` : `${found} found in the last ${share}% of the log`;
  } while (search.next !== null && search.found.length < wanted && search.found.length < 2000);
  shown = [];
  showLines(search.found.map(([at, kind, line]) => [kind, line, at]));
  empty.hidden = true;
  more.hidden = search.next === null || search.found.length >= 2000;
  pane.scrollTop = pane.scrollHeight;
}
async function showAround(question) {
  search = { number: search.number + 1, next: null, found: [] };
  const number = search.number;
  const answer = await ask("log_around", question);
  if (number !== search.number) return;
  if (!answer.ok) {
    status.textContent = answer.error;
    return;
  }
  mode = "around";
  setFollow(false);
  more.hidden = true;
  status.textContent = "A place in the log. Press Follow to return to its end.";
  pane.classList.add("hp-log-plain");
  shown = [];
  showLines(answer.lines);
  const here = text.children[answer.here];
  if (here) {
    here.classList.add("hp-log-here");
    pane.scrollTop = here.offsetTop - pane.clientHeight / 2;
  }
  pane.focus({ preventScroll: true });
}
bar.addEventListener("submit", (event) => {
  event.preventDefault();
  searchNew();
});
let typing = 0;
query.addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(searchNew, 350);
});
for (const one of [pattern, level]) one.addEventListener("change", searchNew);
jump.addEventListener("change", () => {
  if (jump.value) showAround({ incident: jump.value });
  jump.value = "";
});
text.addEventListener("click", (event) => {
  const line = event.target.closest("[data-at]");
  if (line && !String(getSelection())) showAround({ at: Number(line.dataset.at) });
});
text.addEventListener("keydown", (event) => {
  const line = event.target.closest("[data-at]");
  if (line && (event.key === "Enter" || event.key === " ")) {
    event.preventDefault();
    showAround({ at: Number(line.dataset.at) });
  }
});
// The pane is reversed (style.css), so its end is at scrollTop 0.
pane.addEventListener("scroll", () => {
  if (mode !== "tail") return;
  const atEnd = pane.scrollTop > -12;
  if (atEnd !== follow) {
    setFollow(atEnd);
    if (atEnd) refresh(true);
  }
});

// All ----------------------------------------------------------------------------------------------------------------------
function update() {
  const value = current();
  section.hidden = !value.run;
  if (!value.run) return;
  where.textContent = `outputs/${value.run}/training.log`;
  first_error.hidden = !value.error;
  if (first_error.textContent !== value.error) first_error.textContent = value.error;
  hidden.hidden = !value.hidden;
  hidden.textContent = `${value.hidden} lines of the launcher hidden; they are in outputs/${value.run}/training.log.`;
  download.hidden = !value.url;
  if (value.url) download.href = value.url;
  download.textContent = `Download (${value.size})`;
  const labels = value.incidents.map((one) => one.label).join("\0");
  if (jump.dataset.labels !== labels) {
    jump.dataset.labels = labels;
    const head = make("option", "", "Jump to an incident");
    head.value = "";
    const options = value.incidents.map((one) => {
      const option = make("option", "", one.label);
      option.value = one.number;
      return option;
    });
    jump.replaceChildren(head, ...options);
    jump.hidden = !value.incidents.length;
  }
  if (value.run !== run) {
    run = value.run;
    stamp = null;
    shown = [];
    text.replaceChildren();
    asking = false;
    showTail();
  } else refresh(false);
}
new IntersectionObserver((found) => {
  visible = found[found.length - 1].isIntersecting;
  if (visible) refresh(false);
}, { rootMargin: "200px" }).observe(element);
element.replaceChildren(section);
watch("value", update);
update();
