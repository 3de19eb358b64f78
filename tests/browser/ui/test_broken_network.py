"""Files of the page that do not arrive, and a connection that breaks between two answers."""

import re

from ui_helpers import serving
from ui_page import a_tab, field, open_page, until

# Counts, in the page, the events that have no answer yet and the streams of answers that are open.
WATCH = """() => {
  const plain = window.fetch.bind(window);
  const [joined, answered] = [new Set(), new Set()];
  let streams = 0;
  window.waiting = () => [...joined].filter((one) => !answered.has(one)).length;
  window.streams = () => streams;
  const read = async (body) => {
    streams += 1;
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    try {
      for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
        text += value;
        for (const part of text.split("\\n\\n").slice(0, -1)) {
          const message = JSON.parse(part.slice("data: ".length));
          if (message.msg === "process_completed") answered.add(message.event_id);
        }
        text = text.slice(text.lastIndexOf("\\n\\n") + 2);
      }
    } catch { /* it broke */ }
    streams -= 1;
  };
  window.fetch = async (input, init) => {
    const answer = await plain(input, init);
    const address = String(input.url ?? input);
    if (address.includes("queue/join")) joined.add((await answer.clone().json()).event_id);
    if (address.includes("queue/data")) read(answer.clone().body);
    return answer;
  };
}"""


def test_a_page_whose_files_do_not_arrive_loads_again(browser, server):
    with a_tab(browser) as page:
        refused = []

        def refuse(route):
            kind = route.request.url.rpartition(".")[2]
            if refused.count(kind) < 3:  # of several loads of the page
                refused.append(kind)
                route.abort("failed")
            else:
                route.continue_()

        page.route(re.compile(r"/assets/[^/]*\.css$|/scripts/page-[^/]*\.js$"), refuse)
        open_page(page, server)
        assert sorted(refused) == ["css"] * 3 + ["js"] * 3
        page.locator("#start").click()  # it works
        page.locator(".hp-problem").first.wait_for()
        page.errors.clear()  # of the files that did not arrive


def test_buttons_work_after_the_stream_of_answers_broke_between_two_answers(browser, data):
    with a_tab(browser) as page:
        page.add_init_script(f"({WATCH})()")

        def open_stream_without_events() -> bool:
            """Whether the stream waits for the next event, which it does for a second (LINGER_S of ui/streams.py)."""
            page.locator("#start").click()
            page.locator(".hp-problem").first.wait_for()
            page.wait_for_function("waiting() === 0", polling=20)
            return page.evaluate("streams()") > 0

        with serving(data) as server:
            open_page(page, server)
            until(open_stream_without_events, "a stream between two answers")
            server.stop(hard=True)
            page.wait_for_function("streams() === 0")
        with serving(data, port=server.port):
            field(page, "name").fill("kept")
            page.locator("#name .hp-field-error").wait_for(state="detached")  # an answer to what was typed
            with page.expect_response("**/queue/join*"):
                page.locator("#start").click()
            page.wait_for_function("waiting() === 0")  # the click has its answer
            page.locator(".hp-problem").get_by_text("Add at least one image").first.wait_for()
            assert field(page, "name").input_value() == "kept"
        page.errors.clear()  # of the time without a server
