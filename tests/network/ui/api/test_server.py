"""The API: real clients and a real server. Endpoints make and follow a run, errors are sentences, nothing is open."""

import inspect
import json
import subprocess
import sys

import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AuthenticationError
from ui_helpers import kill_runs, lora_file, photos, serving
from ui_page import until
from ui_requests import PASSWORD, ask

from ui.api.server import endpoints

TINY = {"name": "by api", "model": "tiny-flux", "backend": "diffusers", "trigger": "cat", "prompts": "a cat", "rank": 4}
TINY |= {"max_train_steps": 4000, "sample_every_n_steps": 2, "save_every_n_steps": 2, "resolution": 64, "workers": 0}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The data folder of the server's runs; what they started is ended."""
    folder = tmp_path_factory.mktemp("api") / "data"
    yield folder
    kill_runs(folder)


@pytest.fixture(scope="module")
def page(data):
    with serving(data, "--mcp") as running:
        yield running


@pytest.fixture(scope="module")
def client(page):
    return Client(f"{page.url}/api/", headers=page.headers, verbose=False)


def call(client, name, *values, **named):
    return client.predict(*values, api_name=f"/{name}", **named)


@pytest.mark.slow
def test_each_endpoint_is_documented_and_has_plain_types(client):
    known = client.view_api(return_format="dict", print_info=False)["named_endpoints"]
    assert set(known) == {f"/{name}" for name in endpoints()} and 25 < len(known) < 40
    for name, function in endpoints().items():
        assert inspect.getdoc(function), name
        assert all(one.annotation is not one.empty for one in inspect.signature(function).parameters.values()), name


@pytest.mark.slow
def test_a_run_is_made_from_uploads_started_stopped_read_and_deleted_without_the_page(client, data):
    draft = call(client, "new_draft")
    assert call(client, "set_settings", draft, {**TINY, "rank": 4.5})["problems"]
    files = [handle_file(str(path)) for path in photos("chelsea.png", "coffee.png")]
    assert call(client, "add_images", draft, files)["added"] == 2
    listed = call(client, "list_images", draft)
    assert listed["total"] == 2
    first = listed["images"][0]["id"]
    call(client, "set_caption", draft, first, "cat, sitting")
    assert call(client, "edit_captions", draft, {"kind": "suffix", "text": "photo"}, None, True)["changed"] >= 1
    call(client, "edit_captions", draft, {"kind": "suffix", "text": "photo"})
    assert "photo" in call(client, "list_images", draft)["images"][0]["caption"]
    assert call(client, "undo", draft)
    assert call(client, "set_settings", draft, TINY)["problems"] == []
    run = call(client, "start_draft", draft)["run"]
    assert call(client, "run_status", run)["settings"]["rank"] == 4
    until(lambda: call(client, "run_log", run), "the training has begun")
    call(client, "stop_run", run)
    until(lambda: call(client, "run_status", run)["state"] == "stopped", "the run is stopped", 240)
    assert "environment" not in call(client, "run_status", run)["settings"]
    folder = data / "outputs" / run
    lora_file(folder / f"{run}.safetensors", 4)
    steps = [{"kind": "step", "t": f"2026-11-22T12:00:0{n}.000Z", "attempt": 1, "step": n, "loss": 0.5} for n in (3, 4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    final = next(one for one in call(client, "run_files", run) if one["file"] == f"{run}.safetensors")
    assert final["bytes"] == (folder / f"{run}.safetensors").stat().st_size
    assert any("loss" in line["key"] for line in call(client, "run_charts", run)["lines"])
    assert run in [one["run"] for one in call(client, "list_runs")]
    assert call(client, "delete_run", run, True)["freed_bytes"] > 0
    assert not folder.exists()


@pytest.mark.parametrize(
    ("path", "values", "status", "message"),
    [
        ("run/run_log", {"data": ["cat"]}, 500, "There is no run 'cat'"),  # its other parameters have defaults
        ("run/run_log", {"data": []}, 500, "= 200) -> list[str]: missing a required argument: 'run'"),
        ("run/run_status", {"data": ["a", "b"]}, 500, "run_status(run: str) -> dict[str, typing.Any]: too many"),
        ("run/run_status", {"data": ["../../etc"]}, 500, "There is no run '../../etc'"),
        ("run/review_draft", {"data": ["../x"]}, 500, "There is no draft '../x'; new_draft makes one"),
        ("run/add_images", {"data": ["a", [{"path": "/etc/a", "meta": {"_type": "gradio.FileData"}}]]}, 500, "/etc/a"),
        ("call/run_lag", {"data": []}, 400, "/call/run_lag cannot take this request: Could not infer"),
        ("call/v2/run_log", {"name": "cat"}, 400, "run_log cannot take this request: Parameter `name` is not"),
    ],
)
def test_a_call_with_curl_may_leave_out_defaults_and_a_wrong_one_gets_a_sentence(server, path, values, status, message):
    before, kind = server.log.stat().st_size, {"Content_Type": "application/json"}
    found = ask(server, "POST", f"/api/gradio_api/{path}", json.dumps(values), **kind)
    assert found[0] == status and message in json.loads(found[2])["error"] and server.log.stat().st_size == before


def test_the_answers_of_an_unknown_call_end(server):
    before = server.log.stat().st_size
    assert b"Not Found" in ask(server, "GET", "/api/gradio_api/call/run_log/unknown")[2]
    assert server.log.stat().st_size == before


@pytest.mark.slow
def test_with_a_login_only_its_owner_gets_in(listening):
    with pytest.raises((AuthenticationError, ValueError)):
        Client(f"{listening.url}/api/", auth=("me", "wrong"), verbose=False)
    logged_in = Client(f"{listening.url}/api/", auth=("me", PASSWORD), verbose=False)
    assert isinstance(call(logged_in, "list_runs"), list)
    status, headers, _ = ask(listening, "GET", "/api/")
    assert status == 303 and "login" in headers["Location"]


def test_without_mcp_there_are_no_tools(server):
    assert server.get("/api/gradio_api/mcp/")[0] == 404
    assert server.get("/api/config")[0] == 200


MCP_CLIENT = """
import asyncio, json, sys
from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client

async def main(url, headers):
    async with streamablehttp_client(url, json.loads(headers)) as (read, write, _):
        async with ClientSession(read, write) as session:
            await session.initialize()
            tools = {tool.name for tool in (await session.list_tools()).tools}
            answer = await session.call_tool("list_tiers", {})
            print(json.dumps([sorted(tools), answer.isError, answer.content[0].text]))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow
def test_an_assistant_lists_the_tools_and_calls_one(page):
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    page.get("/api/config")
    command = [sys.executable, "-c", MCP_CLIENT, f"{page.url}/api/gradio_api/mcp/", json.dumps(page.headers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    tools, failed, text = json.loads(done.stdout.splitlines()[-1])
    assert "start_draft" in tools and not failed and "16G" in text
