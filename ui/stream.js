// The page's stream of answers, which loses none. This is the only place that replaces a function of the browser,
// because Gradio's client (6.31) has no public means for any of these:
// - Gradio's server ends its stream (queue/data) as soon as no event is pending. The client takes the stream for open
//   until it reads that, so the answer to an event that it joined at that moment would wait for a later one. Here the
//   client reads one stream that does not end: it is connected while an event has no answer, and again when one is joined.
// - A connection that breaks looks open to the client forever. Here its stream ends with two messages: the events without
//   an answer fail, for which Gradio says "Connection Lost" and loads the page again; and the stream is closed.
// - Each tab keeps a connection open (heartbeat), of which a browser has six to a server. So it is not made.
// In the page's head, because it must be there before the first event.
(() => {
  const ENDING = ['data: {"msg":"broken_connection","message":"The connection broke."}', 'data: {"msg":"close_stream","event_id":null}'];
  const plain = window.fetch.bind(window);
  const pending = new Set(); // events of which the join or the answer was seen: either can come first
  let wake = () => {};
  const seen = (id) => id && (pending.delete(id) || pending.add(id));
  const joined = async (answer) => {
    seen((await answer.clone().json().catch(() => ({}))).event_id);
    wake();
    return answer;
  };
  // Passes the messages of one connection on, until Gradio ends it.
  const pass = async (reader, send) => {
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error("The connection broke.");
      const messages = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = messages.pop();
      for (const message of messages) {
        if (message.startsWith('data: {"msg":"close_stream"')) return;
        if (message.startsWith('data: {"msg":"process_completed"')) seen(message.match(/"event_id":\s*"([^"]+)"/)?.[1]);
        send(message);
      }
    }
  };
  const endless = (first, connect) => {
    let reader = null;
    const start = async (controller) => {
      const send = (message) => controller.enqueue(new TextEncoder().encode(`${message}\n\n`));
      try {
        for (let answer = first; ; answer = await connect()) {
          reader = answer.body.getReader();
          await pass(reader, send);
          while (!pending.size) await new Promise((done) => (wake = done));
        }
      } catch {
        pending.clear();
        ENDING.forEach(send);
        controller.close();
      }
    };
    return new ReadableStream({ start: (controller) => void start(controller).catch(() => {}), cancel: () => reader?.cancel() });
  };
  window.fetch = async (input, init) => {
    const connect = () => plain(input, init);
    const { pathname } = new URL(input instanceof Request ? input.url : input, document.baseURI);
    if (pathname.includes("/gradio_api/heartbeat/")) return new Response();
    if (pathname.endsWith("/gradio_api/queue/join")) return joined(await connect());
    if (!pathname.endsWith("/gradio_api/queue/data")) return connect();
    const answer = await connect().catch(() => ({}));
    if (answer.ok === false) return answer;
    return new Response(endless(answer, connect), { headers: { "content-type": "text/event-stream" } });
  };
})();
