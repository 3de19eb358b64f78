// Says when the stream of answers breaks. Gradio's client (6.31) takes the stream for open until it reads `close_stream`, so after a
// connection that broke between two answers it would wait for the next one forever. Here a stream that breaks ends with two
// messages: the events without an answer fail, for which Gradio says "Connection Lost" and loads the page again; and the stream is closed.
const STREAM = "/gradio_api/queue/data";
const ENDING = ['{"msg":"broken_connection","message":"The connection broke."}', '{"msg":"close_stream","event_id":null}'];
const plainFetch = window.fetch.bind(window);
function untilItBreaks(body) {
  const reader = body && body.getReader();
  const decoder = new TextDecoder();
  let tail = ""; // whether it said that it is over
  return new ReadableStream({
    async pull(controller) {
      const read = await (reader ? reader.read() : Promise.reject()).catch(() => ({ done: true }));
      if (!read.done) {
        tail = (tail + decoder.decode(read.value.slice(-100), { stream: true })).slice(-100);
        controller.enqueue(read.value);
        return;
      }
      if (!tail.includes('{"msg":"close_stream"')) controller.enqueue(new TextEncoder().encode(ENDING.map((one) => `data: ${one}\n\n`).join("")));
      controller.close();
    },
    cancel: (reason) => reader && reader.cancel(reason),
  });
}
window.fetch = async (input, init) => {
  const address = new URL(input instanceof Request ? input.url : input, document.baseURI);
  if (!address.pathname.endsWith(STREAM)) return plainFetch(input, init);
  const answer = await plainFetch(input, init).catch(() => null);
  if (answer && !answer.ok) return answer;
  return new Response(untilItBreaks(answer && answer.body), { headers: { "content-type": "text/event-stream" } });
};
