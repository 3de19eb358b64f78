import assert from "node:assert/strict";
import { test } from "node:test";
import { load, some, storage } from "./page.mjs";

const FIRST = { name: "", epochs: 16, repeats: 10 };

/** One tab of a browser whose tabs share `localStorage`, with three fields. `dom`: what they show;
 * `stored`: what the server has. `server` answers as summary.save_settings does, or not at all. */
function open(localStorage, { now = () => 0, stored = { ...FIRST }, server, soon = queueMicrotask } = {}) {
  const dom = { ...stored };
  const listeners = {};
  const inputs = Object.fromEntries(
    Object.keys(dom).map((key) => [key, some({ get value() { return String(dom[key]); }, type: key === "name" ? "text" : "number", role: "" })])
  );
  const requests = [];
  const events = [];
  const save_settings = server || (async ({ changes }) => (Object.assign(stored, changes), { ok: true, values: { ...stored } }));
  const { hangproof } = load(["dom", "unsaved", "new/fields"], ["hangproof"], {
    localStorage,
    sessionStorage: storage(),
    window: {},
    Date: { now },
    setTimeout: (act, ms) => (ms ? 1 : (soon(act), 1)),
    document: some({
      body: some({ classList: some({ contains: () => true }) }),
      querySelectorAll: () => [],
      addEventListener: (name, act) => ((listeners[name] ||= []).push(act)),
      getElementById: (key) => key in dom && { querySelector: (what) => (what.startsWith("input[type=radio]") ? null : inputs[key]) },
    }),
    ask: async (_, data) => (requests.push(data.changes), save_settings(data).then((answer) => answer && { marks: {}, ...answer }, () => null)),
    trigger: (name) => {
      events.push(name);
      if (name === "show") hangproof.shown().forEach((value, n) => value !== undefined && (dom[Object.keys(FIRST)[n]] = value));
    },
  });
  const kept = hangproof.restore(Object.keys(dom), "d1", {}, Object.values(dom));
  kept.forEach((value, n) => value !== undefined && (dom[Object.keys(FIRST)[n]] = value));
  const type = async (key, value, role = "") => {
    dom[key] = value;
    for (const act of listeners.input) act({ target: { closest: (what) => what === `#${key}` && inputs[key], role } });
    await null; // until the field is read
  };
  return { page: hangproof, dom, type, kept, requests, events, stored };
}
const left = (browser) => Object.keys(browser).filter((key) => key.startsWith("hangproof-unsaved/")).length;

test("a field is kept until the server has stored exactly what was typed", async () => {
  const browser = storage();
  const answers = [];
  const tab = open(browser, { server: () => new Promise((done) => answers.push(done)) });
  await new Promise(setImmediate);
  answers.shift()({ ok: true, values: FIRST });
  await new Promise(setImmediate);
  await tab.type("name", "cat");
  tab.page.sync();
  await new Promise(setImmediate);
  await tab.type("name", "cats"); // typed since the request
  answers.shift()({ ok: true, values: { ...FIRST, name: "cat" } });
  await new Promise(setImmediate);
  assert.deepEqual(tab.page.unsaved("field"), [["name", "cats"]]);
  assert.equal(tab.dom.name, "cats");
  const done = tab.page.sync();
  await new Promise(setImmediate);
  answers.shift()({ ok: true, values: { ...FIRST, name: "cats" } });
  assert.equal(await done, true);
  assert.deepEqual(tab.requests, [{}, { name: "cat" }, { name: "cats" }]);
  assert.equal(left(browser), 0);
});

test("what the server did not store is sent again, also by another tab after this one was closed", async () => {
  const browser = storage();
  const dead = open(browser, { server: async () => Promise.reject(new Error("dead")) });
  await dead.type("name", "typed");
  await dead.type("epochs", 3);
  assert.equal(await dead.page.sync(), false);
  const early = open(browser, { now: () => 5000 });
  assert.deepEqual(early.kept, [undefined, undefined, undefined]); // the other tab may be alive
  const { page, kept, dom, stored } = open(browser, { now: () => 20_000 });
  assert.deepEqual(kept, ["typed", 3, undefined]);
  assert.equal(await page.sync(), true);
  assert.deepEqual(stored, { name: "typed", epochs: 3, repeats: 10 });
  assert.deepEqual(dom, stored);
  assert.equal(left(browser), 0);
});

test("a field that was not typed here shows what is stored, and is not sent", async () => {
  const stored = { ...FIRST };
  const tab = open(storage(), { stored });
  await tab.page.sync();
  Object.assign(stored, { epochs: 20, name: "theirs" }); // the number of images changed, another tab typed
  await tab.type("name", "mine");
  await tab.page.sync();
  assert.deepEqual(tab.dom, { name: "mine", epochs: 20, repeats: 10 });
  assert.deepEqual(tab.requests.at(-1), { name: "mine" });
  assert.deepEqual(stored, { name: "mine", epochs: 20, repeats: 10 });
  assert.deepEqual(tab.events.slice(-3), ["review", "script", "checked"]);
});

test("an older value that is shown a moment after the typing does not replace what was typed", async () => {
  const tab = open(storage());
  await tab.page.sync();
  const typed = tab.type("name", "mine");
  tab.dom.name = "older"; // an answer that was being shown
  await typed;
  await tab.page.sync();
  assert.deepEqual([tab.stored.name, tab.dom.name], ["mine", "mine"]);
});

test("an answer that comes before a dropdown was read does not replace what was chosen", async () => {
  const answers = [];
  const waiting = [];
  let hold = false;
  const server = () => new Promise((done) => answers.push(done));
  const tab = open(storage(), { server, soon: (act) => (hold ? waiting.push(act) : queueMicrotask(act)) });
  await new Promise(setImmediate);
  answers.shift()({ ok: true, values: { ...FIRST, name: "theirs" } }); // of the page's start
  hold = true;
  await tab.type("epochs", 2, "combobox");
  await new Promise(setImmediate);
  assert.deepEqual(tab.dom, { ...FIRST, name: "theirs", epochs: 2 });
  hold = false;
  waiting.forEach((act) => act());
  const done = tab.page.sync();
  for (const name of ["theirs", "theirs"]) {
    await new Promise(setImmediate);
    answers.shift()?.({ ok: true, values: { ...FIRST, name, epochs: 2 } });
  }
  assert.equal(await done, true);
  assert.deepEqual(tab.requests.at(-1), { epochs: 2 });
  assert.deepEqual(tab.dom, { ...FIRST, name: "theirs", epochs: 2 });
});

test("a text that the server stores in another form stays as it was typed", async () => {
  let name = "";
  const tab = open(storage(), { server: async ({ changes }) => ({ ok: true, values: { ...FIRST, name: (name = changes.name ? "apart" : name) } }) });
  await tab.type("name", "a secret");
  for (let n = 0; n < 2; n++) assert.equal(await tab.page.sync(), true);
  assert.deepEqual([name, tab.dom.name], ["apart", "a secret"]);
});

test("after Start was pressed, what is only missing stays marked until it is entered", async () => {
  const asked = [];
  const tab = open(storage(), { server: async ({ starting }) => (asked.push(starting), { ok: true, values: { ...FIRST } }) });
  await tab.page.sync();
  tab.page.flush = tab.page.sync; // of images.js
  let twice = false;
  const first = tab.page.starting();
  tab.page.starting().then(() => (twice = true)); // pressed again meanwhile
  await first;
  await tab.page.starting();
  assert.deepEqual([asked.slice(-3), twice], [[false, true, true], false]);
});

test("of two tabs that type into one field, the text typed last wins", async () => {
  const browser = storage();
  const dead = { server: async () => null };
  const [one, two] = [open(browser, { ...dead, now: () => 1 }), open(browser, { ...dead, now: () => 2 })];
  await one.type("name", "first");
  await two.type("name", "second");
  assert.deepEqual(one.page.unsaved("field"), []);
  assert.deepEqual(two.page.unsaved("field"), [["name", "second"]]);
});

test("an answer with an error stores nothing, and what was typed is sent again", async () => {
  const browser = storage();
  let full = true;
  const stored = { ...FIRST };
  const server = async ({ changes }) => (full ? { ok: false, error: "the disk is full" } : (Object.assign(stored, changes), { ok: true, values: { ...stored } }));
  const tab = open(browser, { server });
  await tab.type("epochs", 5);
  assert.equal(await tab.page.sync(), false);
  assert.deepEqual(tab.page.unsaved("field"), [["epochs", 5]]);
  full = false;
  assert.equal(await tab.page.sync(), true);
  assert.equal(tab.dom.epochs, 5);
});

test("a full or broken storage of the browser keeps the text in the open page", () => {
  const browser = storage();
  browser["hangproof-unsaved/d1/field/epochs"] = "{not JSON";
  const full = new Proxy(browser, { get: (store, key) => (key === "setItem" ? () => { throw new Error("full"); } : store[key]) });
  const { page } = open(full, { server: async () => null });
  page.keep("field", "name", "kept");
  assert.deepEqual(page.unsaved("field"), [["name", "kept"]]);
});
