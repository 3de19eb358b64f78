import assert from "node:assert/strict";
import { test } from "node:test";
import { load } from "./page.mjs";

const CLOSE = 'data: {"msg":"close_stream","event_id":null}\n\n';
const BROKEN = 'data: {"msg":"broken_connection","message":"The connection broke."}\n\n';
const address = "http://127.0.0.1:7860/gradio_api/queue/data?session_hash=x";

/** What the page reads at an address. pieces: what arrives before the connection ends; with `error` it breaks. */
async function arrives(pieces, { error = false, status = 200, url = address } = {}) {
  let asked = 0;
  const body = new ReadableStream({
    pull: (controller) => {
      if (pieces.length) controller.enqueue(new TextEncoder().encode(pieces.shift()));
      else if (error) controller.error(new TypeError("network error"));
      else controller.close();
    },
  });
  const fetch = async () => {
    asked += 1;
    if (pieces === null) throw new TypeError("Failed to fetch");
    return new Response(body, { status });
  };
  const window = { fetch };
  load(["stream_end"], [], { window, document: { baseURI: "http://127.0.0.1:7860/" } });
  const answer = await window.fetch(url);
  assert.equal(asked, 1);
  return [answer.status, await answer.text()];
}

test("a stream that ends by itself is left as it is, however it is cut", async () => {
  for (const cut of [1, 20, CLOSE.length - 3]) {
    const pieces = ["data: 1\n\n" + CLOSE.slice(0, cut), CLOSE.slice(cut)];
    assert.deepEqual(await arrives(pieces), [200, "data: 1\n\n" + CLOSE]);
  }
});

test("a stream that breaks, or ends between two answers, ends with an error and is closed", async () => {
  assert.deepEqual(await arrives(["data: é\n\n"], { error: true }), [200, "data: é\n\n" + BROKEN + CLOSE]);
  assert.deepEqual(await arrives(["data: 1\n\n"]), [200, "data: 1\n\n" + BROKEN + CLOSE]);
  assert.deepEqual(await arrives([], { error: true }), [200, BROKEN + CLOSE]);
});

test("an answer that says no, and every other address, pass as they are", async () => {
  assert.deepEqual(await arrives(["refused"], { status: 403 }), [403, "refused"]);
  assert.deepEqual(await arrives(["data: 1\n\n"], { url: "gradio_api/app_id" }), [200, "data: 1\n\n"]);
});

test("a server that cannot be reached counts as a broken stream", async () => {
  const window = { fetch: async () => Promise.reject(new TypeError("Failed to fetch")) };
  load(["stream_end"], [], { window, document: { baseURI: "http://127.0.0.1:7860/" } });
  assert.equal(await (await window.fetch(address)).text(), BROKEN + CLOSE);
  await assert.rejects(window.fetch("gradio_api/app_id"));
});
