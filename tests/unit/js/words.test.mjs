// What the parts of the page say in words: spans, ages, failed calls.
import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./page.mjs";

test("the queue says when an entry starts, and why one cannot", () => {
  const { about } = load(["dom", "run/queue"], ["about"]);
  const entry = { problem: "", total: 0, done: 0, paused: false, starts_s: null };
  assert.equal(about(entry), "");
  assert.equal(about({ ...entry, starts_s: 3 }), "starts next");
  assert.equal(about({ ...entry, starts_s: 45 }), "starts in about less than a minute");
  assert.equal(about({ ...entry, starts_s: 5399, paused: true }), "paused · starts in about 90 min");
  assert.equal(about({ ...entry, total: 4, done: 1, starts_s: 9000 }), "1 of 4 started · starts in about 2.5 h");
  assert.equal(about({ ...entry, problem: "no GPU", starts_s: 1 }), "no GPU");
});

test("an age far away is a round number of one unit", () => {
  const { ago } = load(["dom", "run/fleet_page"], ["ago"]);
  const expected = [[1, "just now"], [89, "89 s ago"], [90, "2 min ago"], [5400, "2 h ago"], [129_600, "2 days ago"]];
  for (const [seconds, text] of expected) assert.equal(ago(seconds), text);
});

test("a call of the server that fails, or answers nonsense, is a sentence", async () => {
  const { reply } = load(["dom"], ["reply"]);
  assert.deepEqual(await reply(Promise.resolve({ ok: true, n: 1 })), { ok: true, n: 1 });
  for (const call of [Promise.reject(new Error("x")), Promise.resolve(null), Promise.resolve({ ok: "yes" })]) {
    const { ok, error } = await reply(call);
    assert.equal(ok, false);
    assert.match(error, /does not answer/);
  }
});
