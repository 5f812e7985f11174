"""Whatever cannot be meant fails when the policy is built, with a message that says what would be right."""

import errno
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard.core.decision import Rungs
from runguard.errors import PolicyError
from runguard.ledger.sqlite import SqliteStore
from runguard.policy import Policy, ToolRule, find_policy_file, load_policy_file, tool
from runguard.policy.settings import (
    _MEANT,
    RULES,
    PolicyFile,
    declared_rule,
    policy_schema,
)
from tests.kit.examples import each_row
from tests.kit.optional import present

LADDER = ("warn", "nudge", "block", "stop")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory and no RUNGUARD_* in the environment."""
    for name in ("RUNGUARD_MODE", "RUNGUARD_POLICY", "RUNGUARD_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(**keywords: Any) -> str:
    with pytest.raises(PolicyError) as caught:
        Policy.build(**keywords)
    return str(caught.value)


def a_step(at: dict[str, Any]) -> dict[str, Any]:
    return {"rules": {"repetition": at}}


# ---- keywords that cannot be meant ----------------------------------------------------------------------------------


@each_row(
    ("keywords", "path", "nearest"),
    [
        ({"max_model_cals": 5}, "max_model_cals", "max_model_calls"),
        ({"on_stopp": "raise"}, "on_stopp", "on_stop"),
        ({"tools": {"x": {"pollng": True}}}, "tools.x.pollng", "polling"),
        ({"rules": {"repetitions": {"stop": 5}}}, "rules.repetitions", "repetition"),
        ({"rules": {"repetition": {"stopp": 5}}}, "rules.repetition.stopp", "stop"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_right_one(
    keywords: dict[str, Any], path: str, nearest: str
) -> None:
    message = refused(**keywords)
    assert path in message
    assert f"did you mean '{nearest}'?" in message


def test_a_name_near_to_nothing_is_refused_with_those_there_are() -> None:
    assert "repetition" in refused(rules={"zzzz": {"stop": 5}})


@each_row(
    ("keywords", "path"),
    [
        ({"max_model_calls": "5"}, "max_model_calls = '5'"),
        ({"max_model_calls": 5.5}, "max_model_calls = 5.5"),
        ({"max_model_calls": True}, "max_model_calls = True"),
        ({"max_seconds": "soon"}, "max_seconds = 'soon'"),
        ({"mode": "shdow"}, "mode = 'shdow'"),
        ({"mode": 1}, "mode = 1"),
        ({"on_trip": "print"}, "on_trip = 'print'"),
        ({"tools": {"x": {"once": "yes"}}}, "tools.x.once = 'yes'"),
        ({"tools": {"x": True}}, "tools.x = True"),
        ({"tools": ["x"]}, "tools = a list"),
        ({"rules": "strict"}, "rules = 'strict'"),
        (a_step({"stop": "5"}), "rules.repetition.stop = '5'"),
        (a_step({"stop": True}), "rules.repetition.stop = True"),
        ({"rules": {"repetition": 5}}, "rules.repetition = 5"),
        ({"tool_result_normalizer": {"x": "f"}}, "tool_result_normalizer.x = 'f'"),
    ],
)
def test_a_wrong_type_is_refused_with_path_and_value(keywords: Any, path: str) -> None:
    message = refused(**keywords)
    assert path in message
    assert "dict[str" not in message  # the path is the user's, not the validator's


@each_row(
    "keywords",
    [
        {"max_model_calls": 0},
        {"max_model_calls": -1},
        {"max_tool_calls": 0},
        {"max_seconds": 0},
        {"max_seconds": float("nan")},
        {"max_seconds": float("inf")},
        {"max_identical_tool_results": 1},
        {"max_handoff_repeats": 1},
        {"max_event_cost_ratio": 1.0},
        {"cost_baseline_events": 0},
        {"max_nudges": -1},
        {"half_open_reset_seconds": 0},
        {"stop_text": ""},
        {"max_cycle_len": 4},
        {"cycle_repeats": 1},
        {"on_surplus": "refuse"},
        {"rules": {"repetition": True}},
        {"tools": {"x": {"exempt": True, "polling": True}}},
        {"tools": {"x": {"max_calls": 0}}},
        a_step({"stop": 0}),
        a_step({"stop": -3}),
        a_step({"stop": 1}),
        a_step({"stop": 2.5}),
        a_step({"stop": float("nan")}),
        {"rules": {"growth": {"stop": 1}}},
        {"rules": {"growth": {"nudge": 3}}},
        {"rules": {"no_news": {"block": 3}}},
        {"rules": {"empty": {"block": 3}}},
        {"rules": {"polling": {"stop": 0.5}}},
    ],
)
def test_an_impossible_value_is_refused(keywords: Any) -> None:
    assert "is not valid" in refused(**keywords)


@each_row(
    ("rungs", "never"),
    [
        ({"nudge": 5, "stop": 5}, "nudge"),
        ({"nudge": 6, "stop": 5}, "nudge"),
        ({"block": 5, "stop": 4}, "block"),
        ({"warn": 3, "nudge": 3}, "warn"),
        ({"stop": 3, "warn": 9}, "warn"),
    ],
)
def test_a_rung_that_can_never_fire_is_refused_and_named(rungs: dict[str, Any], never: str) -> None:
    assert f"rules.repetition.{never}" in refused(**a_step(rungs))


def test_all_faults_are_told_at_once() -> None:
    message = refused(max_model_calls=0, max_tool_cals=1)
    assert "max_model_calls" in message
    assert "max_tool_cals" in message


def test_the_policy_is_frozen() -> None:
    policy = Policy.build()
    with pytest.raises(Exception, match="frozen"):
        policy.mode = "off"


# ---- files and environment ------------------------------------------------------------------------------------------


def test_runguard_toml_is_found_upward(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "runguard.toml").write_text(
        'mode = "shadow"\nmax_model_calls = 7\n[rules]\ngrowth = false\n[tools."send_*"]\nonce = true\n'
    )
    (folder / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(folder / "a" / "b")
    policy = Policy.build()
    assert (policy.mode, policy.max_model_calls, policy.rungs("growth")) == ("shadow", 7, None)
    assert present(policy.tool_rule("send_mail")).once


def test_the_nearest_file_wins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "runguard.toml").write_text("max_model_calls = 1\n")
    inner = folder / "inner"
    inner.mkdir()
    (inner / "runguard.toml").write_text("max_model_calls = 2\n")
    monkeypatch.chdir(inner)
    assert Policy.build().max_model_calls == 2


def test_pyproject_has_a_table_of_the_same_names(folder: Path) -> None:
    (folder / "pyproject.toml").write_text(
        "[tool.other]\nx = 1\n[tool.runguard]\nmax_model_calls = 3\n[tool.runguard.rules]\ngrowth = false\n"
    )
    policy = Policy.build()
    assert (policy.max_model_calls, policy.rungs("growth")) == (3, None)


def test_runguard_toml_comes_before_pyproject(folder: Path) -> None:
    (folder / "runguard.toml").write_text("max_model_calls = 1\n")
    (folder / "pyproject.toml").write_text("[tool.runguard]\nmax_model_calls = 2\n")
    assert Policy.build().max_model_calls == 1


def test_the_environment_names_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "runguard.toml").write_text("max_model_calls = 1\n")
    named = folder / "strict.toml"
    named.write_text("max_model_calls = 2\n")
    monkeypatch.setenv("RUNGUARD_POLICY", str(named))
    assert find_policy_file() == named
    assert Policy.build().max_model_calls == 2


def test_keywords_come_before_the_file(folder: Path) -> None:
    (folder / "runguard.toml").write_text("max_model_calls = 1\nmax_seconds = 5\n")
    policy = Policy.build(max_model_calls=9)
    assert (policy.max_model_calls, policy.max_seconds) == (9, 5)


def test_a_keyword_of_none_leaves_the_default() -> None:
    assert Policy.build(max_seconds=None, on_surplus=None, half_open_reset_seconds=None) == Policy()


@pytest.mark.parametrize("name", ["max_tool_calls", "max_delegation_depth"])
def test_none_switches_off_a_limit_that_has_a_default(name: str) -> None:
    assert getattr(Policy.build(), name) is not None
    assert getattr(Policy.build(**{name: None}), name) is None


def test_the_mode_of_the_environment_comes_before_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "runguard.toml").write_text('mode = "enforce"\n')
    monkeypatch.setenv("RUNGUARD_MODE", "shadow")
    assert Policy.build(mode="off").mode == "shadow"


def test_a_wrong_mode_in_the_environment_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNGUARD_MODE", "loud")
    message = refused()
    assert "RUNGUARD_MODE" in message
    assert "'loud'" in message


def test_a_fault_in_a_file_names_the_file(folder: Path) -> None:
    (folder / "runguard.toml").write_text("max_model_cals = 1\n")
    assert str(folder / "runguard.toml") in refused()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"max_model_calls = = 1", id="not TOML"),
        pytest.param(b"\xff\xfe", id="not UTF-8"),
        pytest.param(b"on_trip = 'print'", id="code in a file"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(folder: Path, content: bytes) -> None:
    (folder / "runguard.toml").write_bytes(content)
    assert "runguard.toml" in refused()


@pytest.mark.parametrize("as_what", ["folder", "link"])
def test_a_policy_file_that_cannot_be_one_is_told_and_not_passed_over(folder: Path, as_what: str) -> None:
    """A container makes a folder of a file that is not there to be mounted:
    without a word every limit would be gone.
    """
    path = folder / "runguard.toml"
    path.mkdir() if as_what == "folder" else path.symlink_to(folder / "nowhere")
    what = {"folder": "is a folder, not a policy file", "link": "no such policy file: it is a link to nothing"}
    with pytest.raises(PolicyError, match=what[as_what]):
        Policy.build()


def test_a_folder_that_may_not_be_searched_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "lstat", locked)
    assert "runguard.toml: cannot be looked for: Permission denied; start from another folder" in refused()


def test_a_file_that_is_not_there_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNGUARD_POLICY", str(folder / "missing.toml"))
    assert "missing.toml" in refused()


def test_a_folder_in_place_of_a_file_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNGUARD_POLICY", str(folder))
    assert str(folder) in refused()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[runguard]\nmax_usd = 1\n", "[runguard]: settings stand at the top level of runguard.toml; move them there"),
        ("[tool.runguard]\nmax_usd = 1\n", "[tool.runguard]: settings stand at the top level of runguard.toml; move"),
        ('[budgets]\nusd = 5\nper = "user"\n', "[budgets]: write [[budgets]], with two brackets, because there may"),
        ('[budget]\nusd = 5\nper = "user"\n', "[budget]: write [[budgets]], with two brackets"),
        ('[[budget]]\nusd = 5\nper = "user"\n', "[budget]: write [[budgets]], with two brackets"),
    ],
)
def test_a_misplaced_heading_is_answered_with_the_right_one(folder: Path, text: str, message: str) -> None:
    (folder / "runguard.toml").write_text(text)
    assert message in refused()
    (folder / "runguard.toml").unlink()
    (folder / "pyproject.toml").write_text("[tool.runguard.budgets]\nusd = 5\n")
    assert "[tool.runguard.budgets]: write [[tool.runguard.budgets]]" in refused()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[budgets]]\nusd = 5\nmax_model_calls = 60\n", "'max_model_calls' is no part of budgets.0"),
        ('[tools.x]\npolling = true\nstore = "memory"\n', "tools.x.store: 'store' is no part of tools.x; in a file"),
        ('[rules]\nstall = false\nmode = "shadow"\n', "rules.mode: 'mode' is no part of rules; in a file, write it"),
        ("[alerts]\nlog = true\nmax_usd = 3\n", "alerts.max_usd: 'max_usd' is no part of alerts; in a file, write it"),
        ('[remote_agents."a.b"]\nmode = "off"\n', "remote_agents.a.b.mode: 'mode' is no part of remote_agents.a.b"),
        ("[[thresholds]]\npercent = 0.5\n", "thresholds: no such setting; use budgets=[Budget("),
        ('tools = ["search"]\n', "tools = a list: give {'tool-name': {'polling': True}}, in a file [tools.tool-name]"),
        ("[tools]\npolling = true\n", "tools.polling = True: give {'tool-name': {'polling': True}}"),
        ("[[rules]]\nstall = false\n", "rules = a list: give {'stall': {'stop': 5}}, in a file [rules]"),
        ("[rules]\nstall = 3\n", "rules.stall = 3: give rungs such as"),
    ],
)
def test_a_setting_below_the_wrong_heading_is_answered_with_its_place(folder: Path, text: str, message: str) -> None:
    (folder / "runguard.toml").write_text(text)
    assert message in refused()


def test_a_file_with_a_byte_order_mark_is_read(folder: Path) -> None:
    (folder / "runguard.toml").write_bytes(b"\xef\xbb\xbfmax_model_calls = 7\n")
    assert Policy.build().max_model_calls == 7


def test_a_file_in_another_encoding_is_answered_with_the_one_to_use(folder: Path) -> None:
    (folder / "runguard.toml").write_bytes("max_model_calls = 7\n".encode("utf-16"))
    assert "save it as UTF-8" in refused()


def test_a_pyproject_whose_entry_is_no_table_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "pyproject.toml").write_text("[tool]\nrunguard = 5\n")
    monkeypatch.setenv("RUNGUARD_POLICY", str(folder / "pyproject.toml"))
    assert "pyproject.toml" in refused()


# ---- rungs ----------------------------------------------------------------------------------------------------------


@st.composite
def explicit_rungs(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    rule = draw(st.sampled_from(sorted(RULES)))
    names = draw(st.lists(st.sampled_from([n for n in LADDER if n in RULES[rule][1]]), unique=True, min_size=1))
    numbers = sorted(draw(st.lists(st.integers(2, 60), min_size=len(names), max_size=len(names), unique=True)))
    return rule, dict(zip([n for n in LADDER if n in names], numbers, strict=True))


def in_force(rungs: Rungs | None) -> dict[str, float]:
    assert rungs is not None
    return {name: number for name in LADDER if (number := getattr(rungs, name)) is not None}


@given(explicit_rungs())
def test_explicit_rungs_are_kept_exactly_and_every_rung_can_fire(given_rungs: tuple[str, dict[str, int]]) -> None:
    rule, explicit = given_rungs
    merged = in_force(Policy.validated({"rules": {rule: explicit}}, "").rungs(rule))
    assert explicit.items() <= merged.items()
    assert all(weaker < stronger for weaker, stronger in pairwise(merged.values()))
    for name, number in merged.items():
        assert present(Rungs(**merged).at(number))[0].word == name


@given(explicit_rungs())
def test_every_rung_in_force_is_explicit_a_default_or_the_stop_after_a_block(
    given_rungs: tuple[str, dict[str, int]],
) -> None:
    rule, explicit = given_rungs
    merged = in_force(Policy.validated({"rules": {rule: explicit}}, "").rungs(rule))
    for name, number in merged.items():
        follows_block = name == "stop" and number == explicit.get("block", -1) + 1
        assert explicit.get(name) == number or getattr(RULES[rule][0], name) == number or follows_block


@each_row(
    ("explicit", "merged"),
    [
        ({"stop": 3}, Rungs(stop=3)),
        ({"stop": 5}, Rungs(nudge=4, stop=5)),
        ({"stop": 9}, Rungs(nudge=4, block=8, stop=9)),
        ({"block": 3}, Rungs(block=3, stop=4)),
        ({"block": 10}, Rungs(nudge=4, block=10, stop=11)),
        ({"nudge": 10}, Rungs(nudge=10)),
        ({"nudge": 2}, Rungs(nudge=2, block=8, stop=9)),
    ],
)
def test_an_explicit_rung_drops_the_defaults_that_cannot_stand_beside_it(
    explicit: dict[str, Any], merged: Rungs
) -> None:
    assert Policy.build(**a_step(explicit)).rungs("repetition") == merged


@each_row("rule", sorted(RULES))
def test_a_rule_can_be_switched_off(rule: Any) -> None:
    assert Policy.build(rules={rule: False}).rungs(rule) is None


@each_row("rule", sorted(RULES))
def test_without_a_word_the_defaults_hold(rule: Any) -> None:
    assert Policy.build().rungs(rule) == RULES[rule][0]


@each_row(
    ("keywords", "rule", "stop"),
    [
        ({"max_identical_tool_results": 3}, "stall", 3),
        ({"max_identical_tool_results": 3}, "repetition", 3),
        ({"max_handoff_repeats": 3}, "handoff", 3),
        ({"cycle_repeats": 4}, "cycle", 4),
        ({"max_event_cost_ratio": 2.5}, "growth", 2.5),
    ],
)
def test_keywords_set_the_stop_of_their_rule(keywords: dict[str, Any], rule: str, stop: float) -> None:
    assert present(Policy.build(**keywords).rungs(rule)).stop == stop


def test_explicit_rungs_come_before_a_keyword_for_the_same_rule() -> None:
    policy = Policy.build(max_identical_tool_results=3, rules={"stall": {"stop": 8}})
    assert present(policy.rungs("stall")).stop == 8
    assert present(policy.rungs("repetition")).stop == 3


# ---- tools ----------------------------------------------------------------------------------------------------------


def test_a_tool_has_the_rule_of_its_exact_name_or_else_of_the_first_glob() -> None:
    policy = Policy.build(tools={"*": {"max_calls": 1}, "send_*": {"max_calls": 2}, "send_mail": {"max_calls": 3}})
    assert present(policy.tool_rule("send_mail")).max_calls == 3
    assert present(policy.tool_rule("send_fax")).max_calls == 1
    assert Policy.build(tools={"send_*": {}}).tool_rule("read") is None


def test_a_rule_can_stand_beside_the_tool() -> None:
    @tool(once=True, identity=["to"])
    def send(to: str) -> str:
        return to

    assert send("ann") == "ann"
    assert vars(send)["__runguard_tool__"] == ToolRule(once=True, identity=("to",))


def test_a_wrong_rule_beside_the_tool_is_refused() -> None:
    with pytest.raises(PolicyError, match="did you mean 'once'"):
        tool(onc=True)
    with pytest.raises(PolicyError, match="exempt"):
        declared_rule(exempt=True, paging=True)


# ---- fan-out and queue ----------------------------------------------------------------------------------------------


@each_row(
    ("keywords", "in_flight", "queues", "fan_out"),
    [
        ({}, 20, True, 100),
        ({"max_concurrent_agents": 5}, 5, False, None),
        ({"max_concurrent_agents": 5, "on_surplus": "queue"}, 5, True, None),
        ({"max_concurrent_agents": 5, "max_fan_out": 7}, 5, False, 7),
        ({"max_fan_out": 7}, 20, True, 7),
    ],
)
def test_who_sets_the_number_in_flight_decides_about_the_surplus(
    keywords: dict[str, Any], in_flight: int, queues: bool, fan_out: int | None
) -> None:
    policy = Policy.build(**keywords)
    assert (policy.in_flight, policy.queues, policy.fan_out) == (in_flight, queues, fan_out)


# ---- schema and digest ----------------------------------------------------------------------------------------------

EXAMPLE = {
    "mode": "shadow",
    "max_model_calls": 50,
    "max_seconds": 12.5,
    "rules": {"repetition": {"nudge": 3, "stop": 6}, "growth": False},
    "tools": {
        "check_*": {"polling": True},
        "send_mail": {"once": True, "identity": ["to"], "failed": {"status": ["bounced"]}},
    },
}


def test_the_schema_accepts_what_the_policy_accepts_and_refuses_what_it_refuses() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(policy_schema())
    validator.check_schema(policy_schema())
    assert not list(validator.iter_errors(EXAMPLE))
    assert Policy.build(**EXAMPLE).max_model_calls == 50
    for wrong in (
        {"max_model_cals": 1},
        {"mode": "loud"},
        {"max_model_calls": 0},
        {"tools": {"x": {"pollng": True}}},
        {"rules": {"growth": "off"}},
    ):
        assert list(validator.iter_errors(wrong)), wrong
        refused(**wrong)


def test_the_schema_names_and_explains_every_setting_of_the_file() -> None:
    properties = policy_schema()["properties"]
    assert set(properties) == set(PolicyFile.model_fields)
    assert all(entry.get("description") for entry in properties.values())


def test_equal_policies_have_equal_digests_and_others_have_others() -> None:
    digests = {Policy.build(**EXAMPLE).digest, Policy.build(**EXAMPLE).digest}
    assert len(digests) == 1
    others: list[dict[str, Any]] = [
        {},
        {"max_model_calls": 51},
        {"rules": {"stall": {"stop": 9}}},
        {"tools": {"x": {"once": True}}},
    ]
    assert len(digests | {Policy.build(**{**EXAMPLE, **other}).digest for other in others}) == 4


def test_functions_have_no_part_in_the_digest() -> None:
    with_code = Policy.build(
        on_trip=print, clock=float, tool_result_normalizer={"x": str}, tools={"t": ToolRule(failed=bool)}
    )
    assert with_code.digest == Policy.build(tools={"t": ToolRule()}).digest


def test_the_digest_is_the_same_in_another_process() -> None:
    script = f"from runguard import Policy; print(Policy.validated({EXAMPLE!r}, '').digest)"
    elsewhere = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert elsewhere == Policy.build(**EXAMPLE).digest


def test_a_relative_store_in_a_file_counts_from_the_files_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a %20 project"
    (folder / "agents").mkdir(parents=True)
    file = folder / "runguard.toml"
    for store, wanted in (
        ("sqlite:///guard.db?synchronous=normal", folder / "guard.db"),
        (f"sqlite:///{tmp_path}/x.db", tmp_path / "x.db"),
    ):
        file.write_text(f'store = "{store}"\n')
        monkeypatch.chdir(folder / "agents")
        policy = Policy.validated(load_policy_file(file), str(file))
        assert SqliteStore(policy.store).path == wanted


@each_row(
    ("keyword", "named"),
    [
        ("budget", "max_usd="),
        ("loop", "cycle_repeats="),
        ("context", "max_context_tokens="),
        ("max_cost", "max_usd="),
        ("policy", "a runguard.toml, found upward from the working directory"),
        ("config_file", "a runguard.toml, found upward from the working directory"),
        ("max_dollars", "max_usd="),
        ("max_total_tokens", "max_tokens="),
        ("max_llm_calls", "max_model_calls="),
        ("max_iterations", "max_model_calls="),
        ("timeout", "max_seconds="),
        ("session", "your framework's own names"),
        ("breaker", "max_tool_failures="),
    ],
)
def test_a_keyword_of_another_function_names_the_one_to_use(keyword: str, named: str) -> None:
    with pytest.raises(PolicyError, match=rf"{keyword}: no such setting; use {named}"):
        Policy.build(**{keyword: {"max_usd": 1}})


def test_the_keywords_that_errors_name_exist() -> None:
    for sentence in _MEANT.values():
        for name in re.findall(r"(\w+)=", sentence):
            assert name in Policy.model_fields or name in ("usd", "per", "window", "user"), name


def test_a_keyword_and_a_rung_of_the_same_rule_hold_both() -> None:
    policy = Policy.build(max_tool_failures=2, rules={"tool_failures": {"nudge": 2}})
    assert policy.rungs("tool_failures") == Rungs(nudge=2, block=3, stop=4)
    policy = Policy.build(max_identical_tool_results=3, rules={"stall": {"stop": 5}})
    stops = [rungs.stop for rungs in map(policy.rungs, ("stall", "repetition")) if rungs is not None]
    assert stops == [5, 3]


def test_a_rung_that_comes_after_that_of_a_keyword_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"rules\.stall\.nudge = 5 can never fire: stop = 3 comes first"):
        Policy.build(max_identical_tool_results=3, rules={"stall": {"nudge": 5}})


@each_row(
    "settings",
    [
        {"rules": {"stall": {}}},
        {"stop_text": " "},
        {"stop_text": {"budget": "\n"}},
        {"final_answer": "  "},
        {"tools": {"": {"polling": True}}},
        {"tools": {"search": {"failed": {}}}},
        {"prices": {" ": {"input": 1, "output": 2}}},
        {"models": {"": {"context_window": 5}}},
        {"remote_agents": {"": {"max_usd": 1}}},
    ],
)
def test_a_setting_that_says_nothing_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match=next(iter(settings))):
        Policy.build(**settings)
