// What the parts of the page say in words: spans, ages, sizes, lines of a log.
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

/** An element that remembers what was put into it. */
class Node {
  constructor(tag, cls = "", text) {
    Object.assign(this, { tag, className: cls, parts: text === undefined ? [] : [text], dataset: {}, style: {} });
  }
  append(...parts) {
    this.parts.push(...parts.filter((part) => part !== ""));
  }
  setAttribute() {}
  addEventListener() {}
  replaceChildren() {}
  get text() {
    return this.parts.map((part) => part.text ?? part).join("");
  }
}

test("a line of a log keeps its colours, and its markup stays text", () => {
  const document = { createElement: (tag) => new Node(tag), addEventListener: () => {} };
  const { lineNode } = load(["run/log_view"], ["lineNode"], {
    ...{ document, element: new Node("div") },
    ...{ make: (...words) => new Node(...words), button: () => new Node("button"), live: () => new Node("p"), region: () => new Node("div") },
  });
  const line = lineNode(["error", "a \x1b[1;31mred <b>\x1b[0m \x1b[38;5;196mplain\x1b[39m 2026-11-22T00:00:01.500Z end", 7]);
  assert.equal(line.className, "hp-log-line hp-log-error");
  assert.equal(line.text.trimEnd(), "a red <b> plain 2026-11-22T00:00:01.500Z end");
  const spans = line.parts.filter((part) => part.tag === "span");
  assert.deepEqual(spans.map((one) => [one.className, one.text]), [["hp-sgr-bold hp-sgr-c1", "red <b>"]]);
  assert.equal(line.parts.find((part) => part.tag === "time").dateTime, "2026-11-22T00:00:01.500Z");
});
