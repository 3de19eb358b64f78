import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./page.mjs";

const CLOSE = 'data: {"msg":"close_stream","event_id":null}\n\n';
const BROKEN = 'data: {"msg":"broken_connection","message":"The connection broke."}\n\n';
const done = (id) => `data: {"msg":"process_completed","event_id":"${id}","output":{}}\n\n`;

/** A page whose server sends what a test puts into `connections`, one after the other. status: of the stream; 0 for no answer. */
function open(status = 200) {
  const connections = [];
  const fetch = async (input) => {
    const url = String(input.url || input);
    if (url.includes("queue/join")) return new Response(JSON.stringify({ event_id: url.split("#")[1] }));
    if (!url.includes("queue/data")) return new Response("other");
    if (!status) throw new TypeError("Failed to fetch");
    if (status !== 200) return new Response("refused", { status });
    const body = new TransformStream();
    const writer = body.writable.getWriter();
    connections.push({ send: (text) => writer.write(new TextEncoder().encode(text)), end: () => writer.close(), break: () => writer.abort() });
    return new Response(body.readable);
  };
  const window = { fetch };
  load(["stream"], [], { window, document: { baseURI: "http://127.0.0.1:7860/" } });
  return { connections, join: (id) => window.fetch(`gradio_api/queue/join#${id}`), fetch: window.fetch };
}
const stream = (page) => page.fetch("gradio_api/queue/data?session_hash=x");
const until = async (found) => {
  for (let tries = 0; !found(); tries += 1) {
    assert.ok(tries < 200, "it does not happen");
    await new Promise((next) => setTimeout(next, 5));
  }
};

test("an event that is joined while or after Gradio ends its stream is answered in the same one", async () => {
  const page = open();
  await page.join("one");
  const reader = (await stream(page)).body.getReader();
  const next = async () => new TextDecoder().decode((await reader.read()).value);
  await page.join("two");
  page.connections[0].send(done("one").slice(0, 20));
  page.connections[0].send(done("one").slice(20) + CLOSE); // it had not heard of "two" yet
  assert.equal(await next(), done("one"));
  await until(() => page.connections.length === 2);
  page.connections[1].send(done("two") + CLOSE);
  assert.equal(await next(), done("two"));
  assert.equal(page.connections.length, 2, "nothing is open without an event");
  await page.join("three");
  await until(() => page.connections.length === 3);
  page.connections[2].send(done("four") + done("three") + CLOSE);
  assert.deepEqual([await next(), await next()], [done("four"), done("three")]);
  await page.join("four"); // its answer is there already
  await page.join("five");
  await until(() => page.connections.length === 4);
});

test("a stream that breaks, or ends between two answers, ends with an error and is closed", async () => {
  for (const how of ["end", "break"]) {
    const page = open();
    await page.join("one");
    const answer = await stream(page);
    if (how === "end") page.connections[0].send("data: é\n\n");
    page.connections[0][how]();
    assert.equal(await answer.text(), (how === "end" ? "data: é\n\n" : "") + BROKEN + CLOSE);
    assert.equal(await (await page.fetch("gradio_api/app_id")).text(), "other");
  }
});

test("a server that cannot be reached counts as a broken stream, and one that says no is passed on", async () => {
  assert.equal(await (await stream(open(0))).text(), BROKEN + CLOSE);
  const refused = await stream(open(403));
  assert.deepEqual([refused.status, await refused.text()], [403, "refused"]);
});
