"""The form for a new search in a browser: its messages, its estimate, and its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator
from zbv_solver.plans.plan import Plan
from zbv_solver.plans.reading import parse_plan
from zbv_solver.problem.reading import parse_problem

from web.browsing import PROBLEM, Look, Service

READY = "Ready to search."


class Form:
    """The form in a browser."""

    def __init__(self, look: Look):
        self.look, self.page = look, look.page

    def open(self, query: str = "") -> None:
        self.page.goto(f"{self.look.origin}/new{query}")
        self.says(READY)

    def field(self, name: str, at: int = 0) -> Locator:
        """A field by its id, or a cell of a table by its quantity."""
        return self.page.locator(f'[id="{name}-{at}"]' if "." in name else f"#{name}")

    def give(self, name: str, mode: str) -> None:
        self.page.locator(f'[id="mode-{name}"]').select_option(mode)

    def cells(self, name: str) -> list[str]:
        cells = self.page.locator(f'input[data-key="{name}"]')
        return [cell.input_value() for cell in cells.all()]

    def says(self, text: str) -> None:
        """Wait for a verdict on the current input."""
        self.look.soon(self.page.locator('#verdict[aria-busy="false"]').filter(has_text=text))

    def issue(self, name: str) -> str:
        """The message at a field, as soon as there is one."""
        found = self.page.locator(f'[id="issue-{name}"]:not(:empty)')
        self.look.soon(found)
        return found.inner_text()

    def problem(self) -> dict[str, Any]:
        """The problem that the page shows as JSON."""
        found: dict[str, Any] = json.loads(self.page.locator("#json").inner_text())
        return found

    def promised(self) -> list[str]:
        """The bars of the estimate, as soon as they are drawn."""
        self.look.soon(self.page.locator("#bars .own"))
        return self.page.locator("#bars li").all_inner_texts()

    def upload(self, name: str, content: str) -> None:
        self.page.set_input_files(
            "#file", {"name": name, "mimeType": "application/json", "buffer": content.encode()}
        )

    def note(self) -> str:
        return self.page.locator("#note").inner_text()


@pytest.fixture(scope="module")
def shared(look: Callable[..., Look], service: Service) -> Form:
    return Form(look(service.url, has_clock=True))


@pytest.fixture
def form(shared: Form) -> Form:
    """The form as it is at first."""
    if shared.page.url == f"{shared.look.origin}/new":
        shared.page.select_option("#preset", "equal-stages")
        shared.says(READY)
    else:
        shared.open()
    return shared


def test_from_the_form_to_the_live_search_to_the_plan_and_its_export(form: Form, service: Service) -> None:
    page = form.page
    page.select_option("#preset", "heavy-head")
    form.field("pp_degree").fill("3")
    form.field("microbatches").fill("7")
    form.give("costs.forward", "same")
    form.field("effort").select_option("quick")
    form.says(READY)
    asked = form.problem()
    form.field("microbatches").press("Enter")

    page.wait_for_url(f"{service.url}/searches/*")
    assert page.locator("h1").inner_text() == "3 ranks × 7 microbatches"
    page.get_by_role("link", name="Open plan").click()
    page.wait_for_selector('#chart[data-state="ready"]')
    link = page.locator(".exports a").filter(has_text="json").first.get_attribute("href") or ""
    plan = parse_plan(page.request.get(service.url + link).json())
    assert plan.problem == parse_problem(asked)
    assert plan.problem.microbatches == 7
    assert form.look.complaints == []
    assert form.look.strangers() == []


def test_the_expected_result_is_shown_before_the_search(form: Form) -> None:
    bars = form.promised()
    names = [bar.split("\n")[0] for bar in bars[1:-1]]
    assert names[0] == "zbv in 0.5 s"
    classical = {"ZB-H1", "ZB-V", "V-half", "V-min", "DualPipeV", "Interleaved 1F1B", "1F1B", "GPipe"}
    assert set(names[1:]) == classical | {"Eager 1F1B"}
    assert "Lower bound:" in bars[-1]
    facts = form.page.locator("#facts").inner_text()
    assert "384 on 8 stages" in facts
    assert "89\u202f600 µs" in facts
    form.look.keep("new-search")


def test_a_wrong_field_gets_the_services_message_at_once(form: Form, service: Service) -> None:
    for name, text, pointer in (
        ("pp_degree", "four", "/problem/pp_degree"),
        ("costs.backward_weight", "-7", "/problem/costs/backward_weight"),
        ("time_unit", "x" * 32 + "y", "/problem/units/time"),
        ("limit_fraction", "half", "/limit_fraction"),
        ("time_limit", "1e9", "/options/time_limit"),
    ):
        before = form.field(name).input_value()
        if name == "time_unit":
            form.page.locator("#time_unit").evaluate("field => field.removeAttribute('maxlength')")
        form.field(name).fill(text)
        form.says("1 error to correct.")
        body: dict[str, Any] = {"problem": form.problem(), "options": {}}
        value = text if text in ("four", "half") else float(text) if name != "time_unit" else text
        if name == "limit_fraction":
            body["problem"]["memory"]["limit"], body["limit_fraction"] = None, value
        elif pointer.startswith("/options"):
            body["options"] = {name: value}
        (issue,) = service.call("/v1/problems/check", body)["issues"]
        assert (issue["pointer"], issue["detail"]) == (pointer, form.issue(name).removeprefix("⚠︎ ").strip())
        assert form.field(name).get_attribute("aria-invalid") == "true"
        assert form.field(name).get_attribute("aria-describedby") == f"issue-{name}"
        form.field(name).fill(before)
        form.says(READY)
        assert form.field(name).get_attribute("aria-invalid") is None
    assert form.look.complaints == []


def test_a_wrong_form_is_not_sent_and_links_to_its_errors(form: Form) -> None:
    form.give("costs.forward", "each")
    form.field("costs.forward", 5).fill("-1")
    form.field("costs.backward_input").fill("-2")
    form.field("microbatches").press("Enter")
    summary = form.page.locator("#summary")
    summary.get_by_text("Correct these fields first").wait_for()
    assert form.page.evaluate("document.activeElement.id") == "summary"
    assert summary.get_by_role("link").count() == 2
    form.look.keep("new-search-wrong", whole=False)
    summary.get_by_role("link", name="stage 5").press("Enter")
    assert form.page.evaluate("document.activeElement.id") == "costs.forward-5"
    assert form.page.url.endswith("/new")


def test_values_per_stage_are_a_table_that_grows_with_the_ranks(form: Form) -> None:
    form.give("costs.forward", "each")
    form.field("costs.forward", 7).fill("2000")
    form.says(READY)
    assert form.problem()["costs"]["forward"] == [1000] * 7 + [2000]
    heads = form.page.locator("#table-costs thead th").all_inner_texts()[2:]
    assert [head.split("\n") for head in heads[3:5]] == [["stage 3", "rank 3"], ["stage 4", "rank 3"]]

    form.field("pp_degree").fill("12")
    form.page.locator('[id="costs.forward-23"]').wait_for()
    form.field("pp_degree").fill("4")
    assert form.cells("costs.forward") == ["1000"] * 7 + ["2000"], "hidden values are kept"
    form.field("placement").select_option("single")
    form.says(READY)
    assert form.problem()["costs"]["forward"] == [1000] * 4

    form.field("placement").select_option("v")
    form.give("costs.forward", "same")
    form.give("costs.forward", "each")
    assert form.cells("costs.forward") == ["1000"] * 7 + ["2000"]
    form.give("costs.forward", "chunk")
    form.field("costs.forward", 1).fill("1250")
    form.says(READY)
    assert form.problem()["costs"]["forward"] == [1000, 1250]
    form.give("costs.p2p", "each")
    assert len(form.cells("costs.p2p")) == 7


def test_numbers_are_pasted_from_a_spreadsheet(form: Form) -> None:
    def paste(name: str, text: str) -> None:
        form.field(name).evaluate(
            """(field, text) => {
              const clipboardData = new DataTransfer();
              clipboardData.setData("text/plain", text);
              const kind = {clipboardData, bubbles: true, cancelable: true};
              field.dispatchEvent(new ClipboardEvent("paste", kind));
            }""",
            text,
        )

    paste("costs.forward", "1\t2\t3\t4\t5\t6\t7\t8.5\n")
    assert form.cells("costs.forward") == ["1", "2", "3", "4", "5", "6", "7", "8.5"]
    paste("costs.backward_input", "10\t20\n30\t40\n")  # two rows, two chunks
    form.says(READY)
    costs = form.problem()["costs"]
    assert costs["forward"] == [1, 2, 3, 4, 5, 6, 7, 8.5]
    assert (costs["backward_input"], costs["backward_weight"]) == ([10, 20], [30, 40])

    # As many as there are, with empty cells behind them, and with the commas of many a spreadsheet.
    paste("costs.forward", "1,5\t2,25\t\n3\t4,125\t\t\n")
    assert form.cells("costs.forward")[:3] == ["1.5", "2.25", "3"]
    assert form.cells("costs.backward_input") == ["3", "4.125"]
    # Too many are not dropped in silence; they have room once there are more ranks.
    paste("costs.forward", "\t".join(str(value) for value in range(1, 13)))
    assert "found 12 values" in form.issue("costs.forward")
    form.field("pp_degree").fill("6")
    form.says(READY)
    assert form.problem()["costs"]["forward"] == list(range(1, 13))


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("1,2,3", [["1", "2", "3"]]),
        ("1, 2, 3", [["1", "2", "3"]]),
        ("1000,1000,1000,1000", [["1000"] * 4]),
        ("1,5;2,5", [["1.5", "2.5"]]),
        ("-1,5 2,0e3", [["-1.5", "2.0e3"]]),
        ("1,000\t2,000", [["1,000", "2,000"]]),  # thousands or not: the service asks
        ("1.5\t2,5", [["1.5", "2,5"]]),
        ("1\t2\t\t\r\n3\t4\r\n", [["1", "2"], ["3", "4"]]),
        ("\t7", [["", "7"]]),
        ("1\n2\n3", [["1", "2", "3"]]),
        ("", [[]]),
    ],
)
def test_a_list_of_numbers_is_split_at_its_separators(shared: Form, text: str, rows: list[list[str]]) -> None:
    module = "/static/new-search/values.js"
    if not shared.page.url.startswith(shared.look.origin):
        shared.open()
    read = "async ([module, text]) => (await import(module)).pasted(text)"
    assert shared.page.evaluate(read, [module, text]) == rows


def test_a_number_too_large_for_json_is_sent_as_text(form: Form) -> None:
    """JSON has no infinity: it would become null, which means no limit."""
    form.field("limit_kind").select_option("amount")
    form.field("memory.limit").fill("1e309")
    assert "found '1e309'" in form.issue("memory.limit")
    assert form.problem()["memory"]["limit"] == "1e309"
    form.field("memory.limit").fill("16")
    form.field("costs.backward").fill("-1e400")
    assert "found '-1e400'" in form.issue("costs.backward")


def test_many_values_are_one_field_that_says_when_their_number_is_wrong(form: Form) -> None:
    form.field("pp_degree").fill("200")
    form.give("costs.forward", "each")
    field = form.field("costs.forward")
    assert field.evaluate("field => field.localName") == "textarea"
    field.fill(" ".join(["1,5"] * 400))
    form.says(READY)
    assert form.problem()["costs"]["forward"] == [1.5] * 400
    field.fill("7 " * 401)
    assert "found 401 values" in form.issue("costs.forward")
    field.fill("7 " * 400)
    form.says(READY)
    field.fill("7 " * 399)
    assert "found 399 values" in form.issue("costs.forward")
    assert len(form.problem()["costs"]["forward"]) == 399


def test_every_column_has_a_name_for_screen_readers(form: Form) -> None:
    names = form.page.locator("#app thead th").all_text_contents()
    assert len(names) == 9
    assert all(names)


def test_the_memory_of_w_follows_the_others_until_it_is_edited(form: Form) -> None:
    form.field("memory.forward").fill("5")
    assert form.field("memory.backward_weight").input_value() == "-4"
    form.give("memory.backward_input", "chunk")
    form.field("memory.backward_input", 1).fill("-2.5")
    form.says(READY)
    assert form.problem()["memory"]["backward_weight"] == [-4, -2.5]
    form.field("memory.backward_weight").fill("-3")
    assert "must be 0, or memory would leak" in form.issue("memory")
    form.field("memory.forward").fill("6")
    assert form.field("memory.backward_weight").input_value() == "-3", "it is the reader's own now"


def test_a_limit_is_a_fraction_of_1f1bs_memory_or_an_amount_or_none(form: Form) -> None:
    form.field("limit_fraction").fill("0.6")
    form.page.get_by_text("That is 9.6 per rank; no plan fits below 0.25.").wait_for()
    assert form.problem()["memory"]["limit"] == 9.6
    form.field("limit_fraction").fill("0.2")
    form.says("No plan fits this memory limit. The smallest feasible one is 0.25 × 1F1B.")
    form.field("limit_kind").select_option("amount")
    assert form.cells("memory.limit") == ["3.2"]
    form.give("memory.limit", "each")
    form.field("memory.limit", 2).fill("24")
    form.field("memory.limit", 0).fill("8")
    form.says("No plan fits this memory limit.")
    assert form.problem()["memory"]["limit"] == [8, 3.2, 24, 3.2]
    form.field("limit_kind").select_option("none")
    form.says(READY)
    assert form.problem()["memory"]["limit"] is None
    form.page.locator("#has_memory").uncheck()
    form.says(READY)
    assert "memory" not in form.problem()


def test_a_file_fills_the_form_and_keys_without_a_field_are_sent_unchanged(form: Form, plan: Plan) -> None:
    costs = {
        **PROBLEM["costs"],
        "forward": [1, 2, 3, 4, 5, 6, 7, 8],
        "backward_input": [9, 9, 9, 9, 4, 4, 4, 4],
    }
    form.upload("mine.json", json.dumps({**PROBLEM, "costs": costs}))
    form.says(READY)
    assert form.note() == "Loaded mine.json."
    assert form.cells("costs.forward") == list("12345678")
    assert form.cells("costs.backward_input") == ["9", "4"]
    assert form.problem()["memory"]["limit"] == 16

    odd = {**PROBLEM, "colour": "red", "costs": {**costs, "forward": [1, 2, 3]}}
    form.upload("odd.json", json.dumps({"problem": odd, "options": {"effort": "quick", "speed": 1}}))
    form.page.get_by_text("The form has no fields for colour, options.speed, costs.forward").wait_for()
    form.says("/problem/colour: unknown key; remove it or correct its spelling.")
    assert form.problem()["colour"] == "red"
    assert form.problem()["costs"]["forward"] == [1, 2, 3]
    assert form.field("effort").input_value() == "quick"

    form.upload("lengths.json", json.dumps({**PROBLEM, "costs": {**costs, "forward": [1, 2, 3]}}))
    assert "found 3 values" in form.issue("costs.forward")
    form.page.get_by_role("button", name="Replace").click()
    form.field("costs.forward").fill("5")
    form.says(READY)

    form.upload("plan.json", form.page.request.get(f"{form.look.origin}/v1/plans/{plan.plan_id}").text())
    form.says(READY)
    assert parse_problem(form.problem()) == plan.problem
    assert form.look.complaints == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "It is not JSON: "),
        ("[1, 2]", "It is JSON but not an object"),
        ('{"a": 1}', "It is JSON but not a problem"),
        ('{"problem": 7}', "It is JSON but not a problem"),
    ],
)
def test_an_unreadable_file_changes_nothing(form: Form, content: str, words: str) -> None:
    before = form.problem()
    form.upload("<b>rubbish</b>.json", content)
    form.page.locator("#note").get_by_text(f"<b>rubbish</b>.json cannot be used. {words}").wait_for()
    assert form.problem() == before


def test_keys_missing_in_a_file_are_errors_not_defaults(form: Form) -> None:
    form.upload("half.json", json.dumps({"microbatches": 8, "costs": {"forward": 1}}))
    form.says("3 errors to correct.")
    assert form.field("pp_degree").input_value() == ""
    form.upload("bare.json", json.dumps({"pp_degree": 4, "microbatches": 8}))
    form.says("3 errors to correct.")
    assert form.cells("costs.forward") == [""]


def test_wrong_types_in_a_file_are_reported_by_the_service(form: Form) -> None:
    wild = {
        "pp_degree": [4],
        "microbatches": {"a": 1},
        "placement": "w",
        "costs": 3,
        "memory": [],
        "units": {"time": 5},
    }
    form.upload("wild.json", json.dumps(wild))
    form.says("6 errors to correct.")
    said = form.page.locator("main").inner_text()
    for words in ("found 'w'", "found [4]", "found {'a': 1}", "found 3;", "found [];", "found 5;"):
        assert words in said, words
    form.field("pp_degree").fill("2")
    form.says("5 errors to correct.")
    assert form.look.complaints == []


def test_a_file_may_be_dropped_anywhere(form: Form) -> None:
    form.page.evaluate(
        """(text) => {
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File([text], "dropped.json"));
          for (const kind of ["dragenter", "dragover", "drop"]) {
            document.body.dispatchEvent(new DragEvent(kind, {dataTransfer, bubbles: true, cancelable: true}));
          }
        }""",
        json.dumps({**PROBLEM, "microbatches": 11}),
    )
    form.page.get_by_text("Loaded dropped.json.").wait_for()
    assert form.field("microbatches").input_value() == "11"
    assert form.page.locator("#drop").is_hidden()


def test_what_if_sliders_change_the_form_only_on_request(form: Form) -> None:
    form.promised()
    form.page.locator("#what-if summary").click()
    slider = form.page.get_by_label("Memory limit", exact=True)
    slider.focus()
    for _ in range(4):
        slider.press("PageDown")
    assert slider.get_attribute("aria-valuetext") == "0.6 × 1F1B"
    form.look.soon(form.page.locator("#bars.compared"))
    own = form.page.locator("#bars .own").inner_text()
    assert "+" in own, "less memory, more time"
    assert "±0" in form.page.locator("#bars li").filter(has_text="GPipe").inner_text()
    form.look.keep("new-search-what-if")
    assert form.problem()["memory"]["limit"] == 16, "the form is as it was"
    form.page.get_by_label("Microbatches", exact=True).press("ArrowRight")
    form.page.get_by_role("button", name="Apply to the form").click()
    form.says(READY)
    assert form.field("limit_fraction").input_value() == "0.6"
    assert form.problem()["microbatches"] == 17
    assert form.problem()["memory"]["limit"] == 9.6


def test_the_form_opens_with_an_earlier_problem(form: Form, service: Service, plan: Plan) -> None:
    form.open(f"?from={plan.plan_id}")
    assert parse_problem(form.problem()) == plan.problem
    assert form.field("limit_fraction").input_value() == "1"
    assert form.note() == f"This is the problem of plan {plan.plan_id[:12]}."
    uneven = {**PROBLEM, "costs": {**PROBLEM["costs"], "forward": [1, 2, 3, 4, 5, 6, 7, 8]}}
    uneven["memory"] = {**PROBLEM["memory"], "limit": [1, 17, 20, 20]}
    found = service.call("/v1/searches", {"problem": uneven, "options": {"effort": "quick", "time_limit": 9}})
    form.page.goto(f"{service.url}/new?from={found['id']}")
    form.says("No plan fits this memory limit.")
    assert form.cells("costs.forward") == list("12345678")
    assert form.cells("memory.limit") == ["1", "17", "20", "20"]
    assert (form.field("effort").input_value(), form.field("time_limit").input_value()) == ("quick", "9")
    form.open(f"?from={'0' * 32}")
    assert "found no search" in form.note()


def test_a_lost_request_can_be_sent_again(form: Form) -> None:
    form.page.route("**/v1/searches", lambda route: route.abort(), times=1)
    form.field("effort").select_option("quick")
    form.field("microbatches").fill("5")
    form.says(READY)
    form.page.locator("#submit").click()
    form.page.get_by_text("The service does not answer. Your input is kept").wait_for()
    form.page.locator("#submit").click()
    form.page.wait_for_url("**/searches/*")
    lost = form.look.complaints.pop()
    assert "ERR_FAILED" in lost


def test_input_survives_the_end_of_a_session(look: Callable[..., Look], service: Service) -> None:
    form = Form(look(service.url, has_clock=True))
    form.open()
    form.field("microbatches").fill("12")
    form.says(READY)
    form.page.context.clear_cookies()
    form.page.locator("#submit").click()
    form.page.get_by_text("You are signed out").first.wait_for()
    form.look.sign_in()
    form.open()
    assert form.field("microbatches").input_value() == "12"
    assert form.note() == "Restored from before you were signed out."


def test_the_problem_can_be_copied_as_curl_or_downloaded(form: Form, tmp_path: Path) -> None:
    form.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    form.field("time_unit").fill("it's")
    form.says(READY)
    form.page.get_by_role("button", name="Copy curl").click()
    form.page.get_by_text("Copied.").wait_for()
    copied = form.page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("curl --json '{")
    assert "it'\\''s" in copied
    assert copied.endswith("/v1/searches")
    with form.page.expect_download() as download:
        form.page.get_by_role("link", name="Download problem.json").click()
    download.value.save_as(tmp_path / "problem.json")
    assert json.loads((tmp_path / "problem.json").read_text()) == form.problem()


def test_without_javascript_the_form_names_the_command(look: Callable[..., Look], service: Service) -> None:
    found = look(service.url, java_script_enabled=False)
    found.page.goto(f"{service.url}/new")
    assert "zbv-service submit problem.json" in found.page.locator("main").inner_text()
    assert found.page.locator("#app").is_hidden()
