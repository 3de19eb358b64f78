"""Waits after wrong passwords, sessions, host names and size limits, as functions with clocks of their own."""

import asyncio
import os
from unittest.mock import Mock

import pytest
from hypothesis import given, settings, strategies as st
from starlette.requests import Request

import app
from runs.files import RunError
from ui import login
from ui.login import Login, Sessions, Throttle
from ui.security import Hosts, same_origin, valid_host


@pytest.fixture
def clock() -> Mock:
    """A clock that a test moves."""
    return Mock(return_value=1000.0)


def test_a_form_that_does_not_arrive_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(login, "FORM_S", 0.1)
    headers = [(b"content-type", b"application/x-www-form-urlencoded"), (b"content-length", b"9")]
    scope = {"type": "http", "method": "POST", "path": "/login", "query_string": b"", "headers": headers}

    async def ask() -> int:
        request = Request(scope, asyncio.Event().wait)
        answer = Login("token", None, tmp_path, 7860).respond(request)
        return (await asyncio.wait_for(answer, 30)).status_code

    assert asyncio.run(ask()) == 408


def test_the_wait_doubles_up_to_a_limit_and_is_forgotten(clock):
    throttle = Throttle(clock)
    waits = []
    for _ in range(40):
        throttle.failed("192.0.2.1")
        waits.append(throttle.wait_s("192.0.2.1"))
        clock.return_value += waits[-1]
        assert throttle.wait_s("192.0.2.1") == 0
    assert waits[: login.ADDRESS_WAITS.free] == [0] * login.ADDRESS_WAITS.free and waits == sorted(waits)
    assert waits[login.ADDRESS_WAITS.free :][:4] == [1, 2, 4, 8] and waits[-1] == login.ADDRESS_WAITS.most_s
    clock.return_value += login.ADDRESS_WAITS.forget_s + 1
    throttle.failed("192.0.2.1")
    assert throttle.wait_s("192.0.2.1") == 0
    for _ in range(9):
        throttle.failed("192.0.2.1")
    throttle.succeeded("192.0.2.1")
    throttle.failed("192.0.2.1")
    assert throttle.wait_s("192.0.2.1") == 0


def test_guesses_from_many_addresses_slow_down_but_lock_nobody_out(clock):
    throttle = Throttle(clock)
    throttle.succeeded("198.51.100.7")
    for number in range(20_000):
        throttle.failed(f"10.{number // 65536}.{number // 256 % 256}.{number % 256}")
    assert len(throttle.failures) <= login.MAX_ADDRESSES
    assert 0 < throttle.wait_s("203.0.113.9") <= login.ALL_WAITS.most_s  # a new address waits a little
    assert throttle.wait_s("198.51.100.7") == 0  # the owner's does not, and is still known
    clock.return_value += login.ALL_WAITS.most_s
    assert throttle.wait_s("203.0.113.9") == 0


def test_all_addresses_of_an_ipv6_network_count_as_one(clock):
    throttle = Throttle(clock)
    for number in range(6):
        throttle.failed(f"2001:db8:1:2::{number}")
    assert throttle.wait_s("2001:db8:1:2:ffff::1") > 0 and throttle.wait_s("2001:db8:1:3::1") == 0
    for _ in range(6):
        throttle.failed("::ffff:192.0.2.1")
    assert throttle.wait_s("192.0.2.1") > 0
    assert throttle.wait_s("fe80::1%eth0") == 0 == throttle.wait_s("")


def test_sessions_expire_and_are_bounded(tmp_path, clock):
    sessions = Sessions(tmp_path / "logins", ("me", "secret"), clock)
    first = sessions.start()
    assert sessions.valid(first) and not sessions.valid("") and not sessions.valid(first + "x")
    clock.return_value += login.SESSION_S - 1
    tokens = [sessions.start() for _ in range(login.MAX_SESSIONS + 20)]
    assert not sessions.valid(first) and sessions.valid(tokens[-1]) and len(sessions.expiry) == login.MAX_SESSIONS
    clock.return_value += login.SESSION_S + 1
    assert not sessions.valid(tokens[-1])
    token, kept = sessions.start(), tmp_path / "logins"
    assert Sessions(kept, ("me", "secret"), clock).valid(token)
    assert token not in kept.read_text() and "secret" not in kept.read_text()
    assert os.name == "nt" or kept.stat().st_mode & 0o077 == 0
    assert not Sessions(tmp_path / "logins", ("me", "another"), clock).valid(token), "a new password ends the logins"


def test_two_servers_of_a_data_folder_leave_each_others_logins_alone(tmp_path):
    one, other = (Login(None, ("me", "secret"), tmp_path, port).sessions for port in (7860, 7861))
    ended, kept = one.start(), one.start()
    one.end(ended)
    other.start()
    one = Login(None, ("me", "secret"), tmp_path, 7860).sessions  # the server starts again
    assert one.valid(kept) and not one.valid(ended)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a": "b"}', b'{"a": null}', b"\xff", b"7"])
def test_a_damaged_file_of_sessions_only_ends_the_logins(tmp_path, content, capsys):
    file = tmp_path / "logins"
    file.write_bytes(content)
    sessions = Sessions(file, ("me", "secret"))
    assert sessions.expiry == {} and "log in again" in capsys.readouterr().err
    token = sessions.start()
    assert Sessions(file, ("me", "secret")).valid(token)


def test_a_login_works_where_the_file_cannot_be_written(tmp_path, capsys):
    sessions = Sessions(tmp_path / "none" / "logins", ("me", "secret"))
    assert sessions.valid(sessions.start()) and "cannot be written" in capsys.readouterr().err


@settings(max_examples=50)
@given(st.text())
def test_after_the_login_only_a_query_is_kept(text):
    kept = login._own_query(text)
    assert kept.isascii() and kept.isprintable() and not set(kept) & set(':/\\#? "<>')


def test_which_origins_are_the_page_itself():
    for origin, host, same in (
        ("http://127.0.0.1:7860", "127.0.0.1:7860", True),
        ("https://train.example.org", "train.example.org:443", True),
        ("https://Train.example.org:8443", "train.example.org:8443", True),
        ("http://localhost:8000", "localhost:9000", False),
        ("http://localhost:9000", "127.0.0.1:9000", False),
        ("null", "localhost:9000", False),
        ("", "", False),
        ("http://", "", True),  # no host is refused before
        ("http://localhost@evil.example", "localhost", False),
        ("http://localhost.evil.example", "localhost", False),
        ("chrome-extension://localhost:9000", "localhost:9000", False),
    ):
        assert same_origin(origin, host) is same, (origin, host)


def test_which_names_can_be_allowed():
    for text, name in (
        ("train.example.org", "train.example.org"),
        (" Train.Example.org ", "train.example.org"),
        ("*.proxy.runpod.net", "*.proxy.runpod.net"),
        ("[2001:DB8::1]", "2001:db8::1"),
        ("https://train.example.org", None),
        ("train.example.org:443", None),
        ("*", None),
        ("a.*.org", None),
        ("", None),
    ):
        assert valid_host(text) == name, text


def test_a_changed_address_of_the_machine_is_noticed(monkeypatch):
    for own, other in (("192.0.2.1", "192.0.2.2"), ("192.0.2.2", "192.0.2.1")):
        monkeypatch.setattr("ui.security.machine_names", lambda own=own: frozenset({own}))
        assert Hosts(True).allowed(f"{own}:7860") and not Hosts(True).allowed(f"{other}:7860")
        assert not Hosts(False).allowed(f"{own}:7860")


def test_ctrl_c_is_noticed_within_a_slice():
    """On Windows a signal is delivered only between two waits, so each must be short."""
    closing = Mock(**{"wait.side_effect": [False] * 4 + [True]})
    app.wait_for(closing)
    assert len(closing.wait.mock_calls) == 5 and all(0 < one.args[0] <= 0.5 for one in closing.wait.mock_calls)


def arguments(*given: str):
    return app.parser().parse_args(list(given))


def test_where_the_password_comes_from(monkeypatch):
    assert app.auth_of(arguments()) is None
    assert app.auth_of(arguments("--auth", "me:typed")) == ("me", "typed")
    for given_flags, expected in (((), ("me", "variable")), (("--auth", "me:typed"), ("me", "typed"))):
        monkeypatch.setenv("HANGPROOF_AUTH", "me:variable")
        assert app.auth_of(arguments(*given_flags)) == expected
        assert "HANGPROOF_AUTH" not in os.environ  # trainers do not get it
    for text in ("no-colon", "me:", ""):
        with pytest.raises(RunError, match="--auth: write USER:PASSWORD"):
            app.auth_of(arguments("--auth", text))


def test_the_allowed_hosts_come_from_flags_and_the_environment_and_need_a_password(monkeypatch):
    monkeypatch.setenv("HANGPROOF_ALLOWED_HOSTS", " , ")
    assert app.auth_of(arguments("--no-token")) is None
    monkeypatch.setenv("HANGPROOF_ALLOWED_HOSTS", "b.example.org, 203.0.113.7,")
    found = app.allowed_hosts(arguments("--allow-host", "A.example.org"))
    assert found == ("a.example.org", "b.example.org", "203.0.113.7")
    with pytest.raises(RunError, match="a password is required"):
        app.auth_of(arguments("--no-token"))
    with pytest.raises(RunError, match="without http:// and port"):
        app.allowed_hosts(arguments("--allow-host", "https://a.example.org"))
