"""A gate's result for people and programs: text, Markdown for a pull request, JUnit for a CI server."""

from typing import Final
from xml.etree import ElementTree

from rich.console import Console
from rich.text import Text

from runguard.core.decision import printable
from runguard.gate.checks import FAILED, SKIPPED, Check, GateReport

_COLOURS: Final = {"passed": "green", "failed": "red", "skipped": "yellow"}
_SHOWN: Final = 20


def print_report(out: Console, report: GateReport) -> None:
    for check in report.checks:
        out.print(
            Text.assemble((f"{check.state:<8}", _COLOURS[check.state]), f"{check.name}: {printable(check.summary)}"),
            soft_wrap=True,
        )
        for line in _lines(check, _SHOWN):
            out.print(Text(f"          {line}"), soft_wrap=True)


def markdown(report: GateReport) -> str:
    """Return a table of the checks, and a list of findings."""
    lines = [
        f"### runguard gate: {'passed' if report.ok else 'failed'}",
        "",
        "| check | result | |",
        "|---|---|---|",
        *(f"| {check.name} | {check.state} | {_cell(check.summary)} |" for check in report.checks),
    ]
    for check in report.checks:
        if check.findings:
            lines += ["", f"**{check.name}**", "", *(f"- {_cell(line)}" for line in _lines(check, _SHOWN))]
    return "\n".join(lines) + "\n"


def junit(report: GateReport) -> str:
    """Return JUnit XML: one test case for each check, and one for each run that failed it."""
    suite = ElementTree.Element("testsuite", name="runguard gate")
    cases = failures = skipped = 0
    for check in report.checks:
        case = ElementTree.SubElement(suite, "testcase", classname="runguard.gate", name=check.name, time="0")
        cases += 1
        if check.state == FAILED:
            failures += 1
            failure = ElementTree.SubElement(case, "failure", message=_xml(check.summary))
            failure.text = _xml("\n".join(_lines(check, len(check.findings))))
        elif check.state == SKIPPED:
            skipped += 1
            ElementTree.SubElement(case, "skipped", message=_xml(check.summary))
        else:
            ElementTree.SubElement(case, "system-out").text = _xml(check.summary)
        for finding in check.findings:
            if finding.run:
                cases, failures = cases + 1, failures + 1
                name = _xml(finding.run)
                one = ElementTree.SubElement(
                    suite, "testcase", classname=f"runguard.gate.{check.name.replace(' ', '_')}", name=name, time="0"
                )
                ElementTree.SubElement(one, "failure", message=_xml(finding.message))
    suite.attrib |= {"tests": str(cases), "failures": str(failures), "errors": "0", "skipped": str(skipped)}
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _lines(check: Check, most: int) -> list[str]:
    lines = [
        printable(f"{finding.run}: {finding.message}" if finding.run else finding.message)
        for finding in check.findings[:most]
    ]
    hidden = check.count - len(lines)
    return [*lines, f"and {hidden} more"] if hidden > 0 else lines


def _cell(text: str) -> str:
    """Return text for a table or a list of Markdown: on one line, with nothing that renders as markup."""
    line = " ".join(printable(text).split())
    for mark in "\\`*_[]<>|":
        line = line.replace(mark, f"\\{mark}")
    return line


def _xml(text: str) -> str:
    """Return text without control characters and lone surrogates, which XML cannot hold."""
    clean = "".join(each if each in "\n\t" or each >= " " else " " for each in text)
    return clean.encode("utf-8", "replace").decode().replace("\ufffe", "?").replace("\uffff", "?")
