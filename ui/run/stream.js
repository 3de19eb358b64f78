// The page's stream of answers, which loses none. Gradio's server ends its stream (queue/data) as soon as no event is pending. Its client
// (6.31) takes the stream for open until it reads that, so the answer to an event that it joined at that moment would wait for a later one.
// Here the client reads one stream that does not end: it is connected while an event has no answer, and again when one is joined. A
// connection that breaks breaks it (stream_end.js). In the page's head, because it must be there before the first event.
(() => {
  const plain = window.fetch.bind(window);
  const waiting = new Set(); // events that were joined and have no answer yet
  const early = new Set(); // events whose answer came before that to their join
  let wake = () => {};
  const joined = async (answer) => {
    const { event_id: id } = await answer.clone().json().catch(() => ({}));
    if (id && !early.delete(id)) waiting.add(id);
    wake();
    return answer;
  };
  const answered = (message) => {
    const [, id] = (message.startsWith('data: {"msg":"process_completed"') && message.match(/"event_id":\s*"([^"]+)"/)) || [];
    if (id && !waiting.delete(id)) early.add(id);
  };
  // Passes the messages of one connection on. Resolves to whether Gradio ended it.
  const pass = async (reader, controller) => {
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return false;
      const messages = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = messages.pop();
      for (const message of messages) {
        if (message.startsWith('data: {"msg":"close_stream"')) return true;
        answered(message);
        controller.enqueue(new TextEncoder().encode(`${message}\n\n`));
      }
    }
  };
  const endless = (address, first) => {
    let reader = first.body.getReader();
    const run = async (controller) => {
      while (await pass(reader, controller)) {
        while (!waiting.size) await new Promise((done) => (wake = done));
        reader = (await plain(address, { headers: { accept: "text/event-stream" } })).body.getReader();
      }
    };
    const start = (controller) => {
      run(controller).catch(() => {}).finally(() => {
        waiting.clear();
        try {
          controller.close();
        } catch {} // the client has left
      });
    };
    return new ReadableStream({ start, cancel: (reason) => reader.cancel(reason) });
  };
  window.fetch = async (input, init) => {
    const { pathname, href } = new URL(input instanceof Request ? input.url : input, document.baseURI);
    const answer = await plain(input, init);
    if (pathname.endsWith("/gradio_api/queue/join")) return joined(answer);
    if (!answer.ok || !pathname.endsWith("/gradio_api/queue/data")) return answer;
    return new Response(endless(href, answer), { headers: { "content-type": "text/event-stream" } });
  };
})();
