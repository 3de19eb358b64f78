"""The Hugging Face login in a real browser."""

from contextlib import ExitStack

from loopback import answering
from ui_helpers import alone, serving
from ui_page import field, open_page
from ui_requests import files_with

GOOD, USER = "hf_good0123456789abcdef", "Ann <b>x</b>"


def whoami(request):
    """The hub's answer to "who am I"."""
    if request.headers.get("Authorization") != f"Bearer {GOOD}" or request.path != "/api/whoami-v2":
        return 401, {"error": "Invalid user token."}
    return 200, {"name": USER, "type": "user", "auth": {"accessToken": {"displayName": "laptop", "role": "read"}}}


def test_the_token_goes_to_the_hubs_own_store_and_nowhere_else(tab, tmp_path):
    asked: list[str] = []
    until_shut = ExitStack()
    hub = until_shut.enter_context(answering(lambda request: (asked.append(request.path), whoami(request))[1]))
    environment = {**alone(tmp_path), "HF_ENDPOINT": hub.url, "no_proxy": "127.0.0.1,localhost"}
    sent: list[str] = []
    tab.on("request", lambda request: sent.append(request.url))
    with until_shut, serving(tmp_path / "data", **environment) as server:

        def open_account() -> None:
            open_page(tab, server)
            tab.get_by_text("Hugging Face account", exact=True).click()

        open_account()
        tab.locator("#model-note").get_by_text("accept the licence").wait_for()
        token = field(tab, "hub-token")
        token.wait_for()
        assert token.get_attribute("type") == "password"

        token.fill("hf_wrong0123456789")
        tab.get_by_role("button", name="Log in").click()
        tab.get_by_test_id("hub-error").get_by_text("does not know this token").wait_for()
        assert not (tmp_path / "hf" / "token").exists() and "hf_wrong" not in tab.content()

        token.fill(GOOD)
        token.press("Enter")
        tab.get_by_test_id("hub-user").get_by_text(f"Logged in as {USER}").wait_for()  # as text, not as markup
        assert (tmp_path / "hf" / "token").read_text() == GOOD
        tab.locator("#model-note").get_by_text("accept the licence").wait_for(state="detached")
        token.wait_for(state="hidden")
        assert GOOD not in tab.content() and GOOD.encode() not in server.get("/config")[1]
        assert not any(GOOD in url for url in [*sent, *asked])
        assert files_with(GOOD, tmp_path) == ["stored_tokens", "token"]
        assert tab.evaluate("JSON.stringify(localStorage) + JSON.stringify(sessionStorage)").count(GOOD) == 0

        open_account()
        tab.get_by_test_id("hub-user").get_by_text("token is stored on this machine").wait_for()
        tab.get_by_role("button", name="Log out").click()
        tab.get_by_role("button", name="Log in").wait_for()
        assert not (tmp_path / "hf" / "token").exists() and files_with(GOOD, tmp_path) == []
        tab.locator("#model-note").get_by_text("accept the licence").wait_for()

        # What was just pasted stays when the hub cannot be reached.
        until_shut.close()
        open_account()
        token.fill(GOOD)
        tab.get_by_role("button", name="Log in").click()
        tab.get_by_test_id("hub-error").get_by_text(f"{hub.url} cannot be reached").wait_for()
        assert token.input_value() == GOOD and not (tmp_path / "hf" / "token").exists()
