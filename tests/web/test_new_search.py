"""The form for a new search in a browser: fields, files, layers, messages, and its estimate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator
from support.layered import LAYERED, NAMES, RECOMPUTED
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.reading import parse_problem

from web.browsing import PROBLEM, Look, Open, Service

READY = "Ready to search."
FULL = {**PROBLEM, "costs": {**PROBLEM["costs"], "forward": [1, 2, 3, 4, 5, 6, 7, 8]}}


class Form:
    """The form in a browser."""

    def __init__(self, look: Look):
        self.look, self.page = look, look.page

    def open(self, query: str = "", verdict: str = READY) -> None:
        self.page.goto(f"{self.look.origin}/new{query}")
        self.says(verdict)

    def field(self, name: str, at: int = 0) -> Locator:
        """A field by its id, or a cell of a table by its quantity."""
        return self.page.locator(f'[id="{name}-{at}"]' if "." in name else f"#{name}")

    def set(self, name: str, text: str, at: int = 0) -> None:
        field = self.field(name, at)
        if field.evaluate("field => field.localName") == "select":
            field.select_option(text)
        else:
            field.fill(text)

    def detail(self, name: str, mode: str) -> None:
        self.page.locator(f'[id="mode-{name}"]').select_option(mode)

    def cells(self, name: str) -> list[str]:
        return [cell.input_value() for cell in self.page.locator(f'input[data-key="{name}"]').all()]

    def says(self, text: str) -> None:
        """Wait for a verdict on the current input."""
        self.look.soon(self.page.locator('#verdict[aria-busy="false"]').filter(has_text=text))

    def issue(self, name: str) -> str:
        """The message at a field, as soon as there is one."""
        found = self.page.locator(f'[id="issue-{name}"]:not(:empty)')
        self.look.soon(found)
        return found.inner_text()

    def problem(self, verdict: str = "") -> dict[str, Any]:
        """The problem that the page shows as JSON, after a verdict."""
        if verdict:
            self.says(verdict)
        found: dict[str, Any] = json.loads(self.page.locator("#json").inner_text())
        return found

    def upload(self, document: Any, name: str = "a.json") -> None:
        content = document if isinstance(document, str) else json.dumps(document)
        self.page.set_input_files(
            "#file", {"name": name, "mimeType": "application/json", "buffer": content.encode()}
        )
        self.page.locator("#note").filter(has_text=name).wait_for()


@pytest.fixture(scope="module")
def shared(look: Open, service: Service) -> Form:
    return Form(look(service.url, has_clock=True))


@pytest.fixture
def form(shared: Form) -> Form:
    """The form as it is at first."""
    if shared.page.url == f"{shared.look.origin}/new":
        shared.set("preset", "equal-stages")
        shared.says(READY)
    else:
        shared.open()
    shared.look.complaints.clear()
    return shared


def test_from_the_form_to_the_live_search_to_the_plan(form: Form, service: Service) -> None:
    page = form.page
    chosen = {
        "preset": "heavy-head",
        "name": "my head",
        "pp_degree": "3",
        "microbatches": "7",
        "effort": "quick",
    }
    for name, text in chosen.items():
        form.set(name, text)
    form.detail("costs.forward", "same")
    asked = form.problem(READY)
    form.field("microbatches").press("Enter")
    page.wait_for_url(f"{service.url}/searches/*")
    assert page.locator("h1").inner_text() == "my head: 3 ranks × 7 microbatches"
    form.look.soon(page.get_by_role("link", name="Open plan"))
    page.get_by_role("link", name="Open plan").click()
    page.wait_for_selector('#chart[data-state="ready"]')
    plan = service.client.plan(page.url.rsplit("/", 1)[1])
    assert plan.problem == parse_problem(asked)
    assert form.look.complaints == []
    assert form.look.strangers() == []


def test_the_estimate_and_its_sliders_change_the_form_only_on_request(form: Form) -> None:
    page = form.page
    form.look.soon(page.locator("#bars:not(.stale) .own"))
    bars = page.locator("#bars li").all_inner_texts()
    names = [bar.split("\n")[0] for bar in bars[1:-1]]
    assert names[0] == "zbv in 0.5 s"
    assert {"ZB-H1", "ZB-V", "V-half", "V-min", "DualPipeV", "Interleaved 1F1B", "GPipe"} < set(names)
    assert "Lower bound:" in bars[-1]
    facts = page.locator("#facts").inner_text()
    assert "384 on 8 stages" in facts
    assert "89.6 ms" in facts

    page.locator("#what-if summary").click()
    slider = page.get_by_label("Memory limit", exact=True)
    for _ in range(4):
        slider.press("PageDown")
    assert slider.get_attribute("aria-valuetext") == "0.6 × 1F1B"
    form.look.soon(page.locator("#bars.compared"))
    assert "+" in page.locator("#bars .own").inner_text(), "less memory, more time"
    assert "±0" in page.locator("#bars li").filter(has_text="GPipe").inner_text()
    assert form.problem()["memory"]["limit"] == 16, "the form is as it was"
    page.get_by_label("Microbatches", exact=True).press("ArrowRight")
    page.get_by_role("button", name="Apply to the form").click()
    problem = form.problem(READY)
    assert form.field("limit_fraction").input_value() == "0.6"
    assert (problem["microbatches"], problem["memory"]["limit"]) == (17, 9.6)


@pytest.mark.parametrize(
    ("name", "text", "pointer"),
    [
        ("costs.backward_weight", "-7", "/problem/costs/backward_weight"),
        ("limit_fraction", "half", "/limit_fraction"),
        ("time_limit", "1e9", "/options/time_limit"),
    ],
)
def test_a_wrong_field_gets_the_services_message(form: Form, name: str, text: str, pointer: str) -> None:
    field = form.field(name)
    before = field.input_value()
    with form.page.expect_response("**/v1/problems/check") as answer:
        field.fill(text)
        form.says("1 error to correct.")
    (issue,) = answer.value.json()["issues"]
    assert (issue["pointer"], issue["detail"]) == (pointer, form.issue(name).removeprefix("⚠︎ ").strip())
    assert field.get_attribute("aria-invalid") == "true"
    assert field.get_attribute("aria-describedby") == f"issue-{name}"
    field.fill(before)
    form.says(READY)
    assert field.get_attribute("aria-invalid") is None


def test_a_wrong_form_is_not_sent_and_links_to_its_errors(form: Form) -> None:
    form.detail("costs.forward", "each")
    form.set("costs.forward", "-1", 5)
    form.set("costs.backward_input", "-2")
    form.field("microbatches").press("Enter")
    summary = form.page.locator("#summary")
    summary.get_by_text("Correct these fields first").wait_for()
    assert form.page.evaluate("document.activeElement.id") == "summary"
    assert summary.get_by_role("link").count() == 2
    summary.get_by_role("link", name="stage 5").press("Enter")
    assert form.page.evaluate("document.activeElement.id") == "costs.forward-5"
    assert form.page.url.endswith("/new")


def test_values_per_stage_are_a_table_that_grows_with_the_ranks(form: Form) -> None:
    form.detail("costs.forward", "each")
    form.set("costs.forward", "2000", 7)
    assert form.problem(READY)["costs"]["forward"] == [1000] * 7 + [2000]
    heads = form.page.locator("#table-costs thead th").all_inner_texts()[2:]
    assert [head.split("\n") for head in heads[3:5]] == [["stage 3", "rank 3"], ["stage 4", "rank 3"]]
    form.set("pp_degree", "12")
    form.page.locator('[id="costs.forward-23"]').wait_for()
    form.set("pp_degree", "4")
    assert form.cells("costs.forward") == ["1000"] * 7 + ["2000"], "hidden values are kept"
    form.set("placement", "single")
    assert form.problem(READY)["costs"]["forward"] == [1000] * 4
    form.set("placement", "v")
    form.detail("costs.forward", "same")
    form.detail("costs.forward", "each")
    assert form.cells("costs.forward") == ["1000"] * 7 + ["2000"]
    form.detail("costs.forward", "same")
    form.set("costs.forward", "1500")
    form.detail("costs.forward", "each")
    assert form.cells("costs.forward") == ["1500"] * 8, "unless the one value is another now"
    form.detail("costs.forward", "chunk")
    form.set("costs.forward", "1250", 1)
    assert form.problem(READY)["costs"]["forward"] == [1500, 1250]
    form.detail("costs.backward", "each")
    assert "backward" not in form.problem(READY)["costs"], "I + W, as with one empty field"
    form.set("costs.backward", "3000")
    form.says("7 errors to correct.")
    assert form.issue("costs.backward").count("found ''") == 1
    form.detail("costs.backward", "same")
    form.detail("costs.p2p", "each")
    assert len(form.cells("costs.p2p")) == 7
    assert all(form.page.locator("#app thead th").all_text_contents()), "names for screen readers"


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
    costs = form.problem(READY)["costs"]
    assert (costs["backward_input"], costs["backward_weight"]) == ([10, 20], [30, 40])
    # Too many are not dropped in silence; they have room once there are more ranks.
    paste("costs.forward", "\t".join(str(value) for value in range(1, 13)))
    assert "found 12 values" in form.issue("costs.forward")
    form.set("pp_degree", "6")
    assert form.problem(READY)["costs"]["forward"] == list(range(1, 13))


def test_a_list_of_numbers_is_split_at_its_separators(form: Form) -> None:
    cases: dict[str, list[list[str]]] = {
        "1,2,3": [["1", "2", "3"]],
        "1000,1000,1000,1000": [["1000"] * 4],
        "1,5;2,5": [["1.5", "2.5"]],
        "-1,5 2,0e3": [["-1.5", "2.0e3"]],
        "1,000\t2,000": [["1,000", "2,000"]],  # thousands or not: the service asks
        "1.5\t2,5": [["1.5", "2,5"]],
        "1\t2\t\t\r\n3\t4\r\n": [["1", "2"], ["3", "4"]],
        "\t7": [["", "7"]],
        "1\n2\n3": [["1", "2", "3"]],
        "": [[]],
    }
    read = "async (all) => all.map((await import('/static/new-search/values.js')).pasted)"
    assert form.page.evaluate(read, [*cases]) == [*cases.values()]


def test_many_values_are_one_field_and_too_large_numbers_are_sent_as_text(form: Form) -> None:
    form.set("pp_degree", "200")
    form.detail("costs.forward", "each")
    assert form.field("costs.forward").evaluate("field => field.localName") == "textarea"
    form.set("costs.forward", " ".join(["1,5"] * 400))
    assert form.problem(READY)["costs"]["forward"] == [1.5] * 400
    for count in (401, 399):
        form.set("costs.forward", "7 " * count)
        assert f"found {count} values" in form.issue("costs.forward")
        form.set("costs.forward", "7 " * 400)
        form.says(READY)
    form.detail("costs.forward", "same")
    form.set("limit_kind", "amount")
    form.set("memory.limit", "1e309")
    assert "found '1e309'" in form.issue("memory.limit"), "JSON has no infinity, and null means no limit"


def test_the_memory_of_w_follows_the_others_until_it_is_edited(form: Form) -> None:
    form.set("memory.forward", "5")
    assert form.field("memory.backward_weight").input_value() == "-4"
    form.detail("memory.backward_input", "chunk")
    form.set("memory.backward_input", "-2.5", 1)
    assert form.problem(READY)["memory"]["backward_weight"] == [-4, -2.5]
    form.set("memory.backward_weight", "-3")
    assert "must be 0, or memory would leak" in form.issue("memory")
    form.set("memory.forward", "6")
    assert form.field("memory.backward_weight").input_value() == "-3", "it is the reader's own now"


def test_a_limit_is_a_fraction_of_1f1bs_memory_or_an_amount_or_none(form: Form) -> None:
    form.set("limit_fraction", "0.6")
    form.look.soon(form.page.get_by_text("That is 9.6 per rank; no plan fits below 0.25."))
    assert form.problem()["memory"]["limit"] == 9.6
    form.set("limit_fraction", "0.2")
    form.says("No plan fits this memory limit. The smallest feasible one is 0.25 × 1F1B.")
    form.set("limit_kind", "amount")
    assert form.cells("memory.limit") == ["3.2"]
    form.detail("memory.limit", "each")
    form.set("memory.limit", "24", 2)
    form.set("memory.limit", "8", 0)
    assert form.problem("No plan fits this memory limit.")["memory"]["limit"] == [8, 3.2, 24, 3.2]
    form.set("limit_kind", "none")
    assert form.problem(READY)["memory"]["limit"] is None
    form.page.locator("#has_memory").uncheck()
    assert "memory" not in form.problem(READY)


def test_a_file_fills_the_form_and_keys_without_a_field_are_sent_unchanged(form: Form, plan: Plan) -> None:
    costs = {**FULL["costs"], "backward_input": [9, 9, 9, 9, 4, 4, 4, 4]}
    memory = {**PROBLEM["memory"], "limit": [16, 17, 20, 20]}
    form.upload({**FULL, "costs": costs, "memory": memory}, "mine.json")
    assert form.problem(READY)["memory"]["limit"] == memory["limit"]
    assert form.cells("memory.limit") == ["16", "17", "20", "20"]
    assert form.page.locator("#note").inner_text() == "Loaded mine.json."
    assert form.cells("costs.forward") == list("12345678")
    assert form.cells("costs.backward_input") == ["9", "4"]

    odd = {**PROBLEM, "colour": "red", "costs": {**costs, "forward": [1, 2, 3]}}
    form.upload({"problem": odd, "options": {"effort": "quick", "speed": 1}})
    form.page.get_by_text("The form has no fields for colour, options.speed, costs.forward").wait_for()
    problem = form.problem("/problem/colour: unknown key; remove it or correct its spelling.")
    assert (problem["colour"], problem["costs"]["forward"]) == ("red", [1, 2, 3])
    assert form.field("effort").input_value() == "quick"
    form.page.get_by_role("button", name="Replace").click()
    form.set("costs.forward", "5")
    assert form.problem("/problem/colour")["costs"]["forward"] == 5

    form.upload(form.page.request.get(f"{form.look.origin}/v1/plans/{plan.plan_id}").text())
    assert parse_problem(form.problem(READY)) == plan.problem
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
    assert form.look.complaints == []


def test_wrong_files_change_nothing_and_wrong_values_are_reported(form: Form) -> None:
    before = form.problem()
    for content, words in (
        ("{", "It is not JSON: "),
        ("[1, 2]", "It is JSON but not an object"),
        ('{"a": 1}', "It is JSON but not a problem"),
    ):
        form.upload(content, "<b>rubbish</b>.json")
        form.page.locator("#note").get_by_text(f"<b>rubbish</b>.json cannot be used. {words}").wait_for()
        assert form.problem() == before
    form.upload({"microbatches": 8, "costs": {"forward": 1}})
    form.says("3 errors to correct.")
    assert form.field("pp_degree").input_value() == "", "what a file lacks has no default"
    wild = {"pp_degree": [4], "microbatches": {"a": 1}, "placement": "w", "costs": 3, "memory": []}
    form.upload({**wild, "units": {"time": 5}})
    form.says("6 errors to correct.")
    said = form.page.locator("main").inner_text()
    for words in ("found 'w'", "found [4]", "found {'a': 1}", "found 3;", "found [];", "found 5;"):
        assert words in said, words
    form.set("pp_degree", "2")
    form.says("5 errors to correct.")
    assert form.look.complaints == []


def test_input_survives_a_lost_request_and_the_end_of_a_session(look: Open, service: Service) -> None:
    form = Form(look(service.url, has_clock=True))
    form.open()
    form.set("microbatches", "12")
    form.set("name", "kept")
    form.says(READY)
    form.page.route("**/v1/searches", lambda route: route.abort(), times=1)
    form.page.locator("#submit").click()
    form.page.get_by_text("The service does not answer. Your input is kept").wait_for()
    form.page.context.clear_cookies()
    form.page.locator("#submit").click()
    form.page.get_by_text("You are signed out").first.wait_for()
    form.look.sign_in()
    form.open()
    assert [form.field(name).input_value() for name in ("microbatches", "name")] == ["12", "kept"]
    assert form.page.locator("#note").inner_text() == "Restored from before you were signed out."


def test_the_problem_can_be_copied_as_curl_or_downloaded(form: Form, tmp_path: Path) -> None:
    form.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    form.set("time_unit", "it's")
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


def test_layers_of_a_file_are_shown_and_keys_of_them_are_sent_unchanged(form: Form) -> None:
    page = form.page
    form.upload(LAYERED)
    form.says(READY)
    assert page.locator("#layers-panel").is_visible()
    assert not page.locator("#costs-panel").is_visible()
    rows = page.locator("#table-layers tbody tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows] == ["embedding", "block × 6", "head"]
    said = page.locator("#layers-said").inner_text()
    assert "Transfers have a latency of 1 µs and a bandwidth of 100 B per µs." in said
    assert "embedding, block.0 stay together" in said
    # Amounts have the unit of the form; those in files from `zbv estimate` are bytes.
    for unit in ("MiB", "bytes"):
        form.set("memory_unit", unit)
        assert f"5 {unit.replace('bytes', 'B')}" in page.locator("#table-layers").inner_text()
    form.set("memory_unit", "MiB")
    for name, text in (("microbatches", "6"), ("placement", "auto"), ("limit_kind", "amount")):
        form.set(name, text)
    form.set("memory.limit", "60")
    form.set("effort", "quick")
    asked = form.problem(READY)
    assert "one stage per rank" in page.locator("#facts").inner_text()
    form.look.soon(page.locator("#bars:not(.stale)", has_text="Histogram cut"))
    assert (asked["microbatches"], asked["placement"], asked["memory"]["limit"]) == (6, "auto", 60)
    for key in ("layers", "costs", "cut"):
        assert asked[key] == LAYERED[key]
    form.set("preset", "equal-stages")
    assert "layers" not in form.problem(READY)
    assert page.locator("#costs-panel").is_visible()


def test_the_cut_of_a_file_is_kept_or_discarded_and_wrong_layers_are_reported(form: Form) -> None:
    page = form.page
    partition = [NAMES[:2], NAMES[2:4], NAMES[4:6], NAMES[6:]]
    of_file = {"partition": partition, "recompute": [False, True, True, False]}
    form.upload({**RECOMPUTED, **of_file, "costs": {"p2p": [1, 2, 6]}, "memory": {}})
    problem = form.problem(READY)
    assert (problem["partition"], problem["costs"]) == (partition, {"p2p": [1, 2, 6]})
    assert "holds 0.2" in page.locator("#table-layers").inner_text()
    page.uncheck("#keep_cut")
    problem = form.problem(READY)
    assert not problem.keys() & of_file.keys()
    assert problem["costs"] == {"p2p": 3}, "transfers that were measured are their mean elsewhere"
    page.check("#keep_cut")
    form.set("pp_degree", "3")
    form.says("/problem/partition")  # which has the stages of two ranks

    wrong = [{**LAYERED["layers"][0], "forward": "<b>a lot</b>"}, *LAYERED["layers"][1:]]
    form.upload({**LAYERED, "layers": wrong})
    form.says("/problem/layers/0/forward")
    assert "<b>a lot</b>" in page.locator("#table-layers").inner_text()
    page.click("#submit")
    page.locator("#summary").filter(has_text="/problem/layers/0/forward").wait_for()
    form.upload({**LAYERED, "layers": [{"name": f"layer {place}"} for place in range(600)], "cut": {}})
    form.says("/problem/layers")
    assert page.locator("#table-layers tbody tr").count() == 513
    assert page.locator("#table-layers tbody tr").last.inner_text() == "and 88 more"
    assert form.look.complaints == []
