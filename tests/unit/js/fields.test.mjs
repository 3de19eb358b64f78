import assert from "node:assert/strict";
import { test } from "node:test";
import { load, nothing, storage } from "./page.mjs";

/** One tab of a browser whose tabs share `localStorage`, with the form's fields name, epochs and repeats. */
function open(localStorage, { now = () => 0, server = ["", 16, 10] } = {}) {
  const { hangproof } = load(["dom", "dataset/unsaved", "new/fields"], ["hangproof"], {
    localStorage,
    sessionStorage: storage(),
    window: {},
    Date: { now },
    agree: async (_, own) => own,
  });
  const shown = hangproof.restore(["name", "epochs", "repeats"], ["d1", ...server]);
  return { page: hangproof, shown };
}
const answer = (form, stored = {}) => ({ ok: true, form, stored });

test("what was typed is kept until the server has stored exactly that", () => {
  const browser = storage();
  const { page } = open(browser);
  assert.deepEqual(page.changes(["cat", 16, 10]).changes, { name: "cat" });
  assert.deepEqual(page.changes(["cats", 16, 10]).changes, { name: "cats" });
  page.merge(answer({ name: "cat" }, { name: "cat" }), ["cats", 16, 10]); // the answer to the first text
  assert.deepEqual(page.changes(["cats", 16, 10]).changes, { name: "cats" });
  page.merge(answer({ name: "cats" }, { name: "cats" }), ["cats", 16, 10]);
  assert.deepEqual(page.changes(["cats", 16, 10]).changes, {});
  assert.equal(Object.keys(browser).filter((key) => key.startsWith("hangproof-unsaved/")).length, 0);
});

test("a reload and a closed tab lose nothing", () => {
  const browser = storage();
  open(browser).page.changes(["typed", 3, 10]);
  const early = open(browser, { now: () => 5000 });
  assert.deepEqual(early.shown, [undefined, undefined, undefined]); // the other tab may be alive
  const { page, shown } = open(browser, { now: () => 20_000 });
  assert.deepEqual(shown, ["typed", 3, undefined]);
  assert.deepEqual(page.changes(["typed", 3, 10]).changes, { name: "typed", epochs: 3 });
});

test("an event that still sees the value from before does not undo what is on its way", () => {
  const browser = storage();
  open(browser).page.changes(["typed", 16, 10]);
  const { page } = open(browser, { now: () => 20_000 });
  assert.deepEqual(page.changes(["", 16, 10]).changes, { name: "typed" });
  assert.deepEqual(page.changes(["typed", 16, 10]).changes, { name: "typed" });
});

test("two tabs are merged field by field", () => {
  const { page } = open(storage());
  page.changes(["mine", 16, 10]);
  const found = page.merge(answer({ name: "theirs", epochs: 3, repeats: 10 }), ["mine", 16, 10]);
  assert.deepEqual(found, [undefined, 3, undefined]); // what was typed here stays
  assert.deepEqual(page.changes(["mine", 3, 10]).changes, { name: "mine" });
});

test("of two tabs that type into one field, the text typed last wins", () => {
  const browser = storage();
  const [one, two] = [open(browser, { now: () => 1 }).page, open(browser, { now: () => 2 }).page];
  one.changes(["first", 16, 10]);
  two.changes(["second", 16, 10]);
  assert.deepEqual(one.unsaved("field"), []);
  assert.deepEqual(two.unsaved("field"), [["name", "second"]]);
});

test("a proposal is no typed value: one that was typed elsewhere wins, and so does one typed later", () => {
  const { page } = open(storage());
  assert.deepEqual(page.offer(["epochs", "repeats"], [16, 10], [8, 5]), [8, 5]);
  const sent = page.changes(["", 8, 5]);
  assert.deepEqual(sent.changes, {});
  assert.deepEqual([sent.offers.epochs.from, sent.offers.epochs.to], [[16, 16], 8]);
  assert.deepEqual(page.merge(answer({ epochs: 3, repeats: 5 }), ["", 8, 5]), [undefined, 3, undefined]);
  assert.deepEqual(page.changes(["", 3, 7]).changes, { repeats: 7 });
  assert.deepEqual(page.offer(["epochs", "repeats"], [3, 7], [1, 1]), [undefined, undefined]); // 7 is not stored yet
});

test("an answer with an error stores nothing and says why", () => {
  const { page } = open(storage());
  page.changes(["mine", 16, 10]);
  assert.deepEqual(page.merge({ ok: false, error: "the disk is full" }, ["mine", 16, 10]), [undefined, undefined, undefined]);
  assert.deepEqual(page.unsaved("field"), [["name", "mine"]]);
});

test("a full or broken storage of the browser keeps the text in the open page", () => {
  const browser = storage();
  browser["hangproof-unsaved/d1/field/epochs"] = "{not JSON";
  const full = new Proxy(browser, { get: (store, key) => (key === "setItem" ? () => { throw new Error("full"); } : store[key]) });
  const { page } = open(full);
  page.keep("field", "name", "kept");
  assert.deepEqual(page.unsaved("field"), [["name", "kept"]]);
});

test("the server's answer decides whether it is away or the login has ended", async () => {
  const answers = { 200: "", 500: "offline", 401: "login", 403: "login" };
  for (const [status, expected] of Object.entries(answers)) {
    const fetch = async () => new Response("", { status: Number(status) });
    const { probe } = load(["dom", "dataset/unsaved"], ["probe"], { fetch, window: {}, sessionStorage: storage(), agree: nothing });
    assert.equal(await probe(), expected, status);
  }
  const fetch = async () => Promise.reject(new TypeError("Failed to fetch"));
  const { probe } = load(["dom", "dataset/unsaved"], ["probe"], { fetch, window: {}, sessionStorage: storage(), agree: nothing });
  assert.equal(await probe(), "offline");
});
