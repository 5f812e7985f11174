"""How well the tokens of a prompt are estimated: recorded prompts whose tokens the provider counted.

    python benchmarks/token_estimate.py RUNS [--json]    # a file, or a folder with *.jsonl and *.jsonl.gz

A prompt is the one before it, whose tokens are known, and what was added since: the answer, its tool calls and their
results. What was added is sized as in ``runguard.adk.runs`` and divided by the bytes per token. "Hold": what is
reserved for the prompt and for all that the model may write, an output token at four times the price of an input
token, against what the call took.
"""

import argparse
import contextlib
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from google.adk.models.llm_request import LlmRequest
from google.genai import types

from runguard.adk.runs import project
from runguard.providers.usage import LIKELY, UPPER, text_size

PART = 12  # bytes of every part beside its text
OUTPUTS = (256, 1_024, 4_096)  # limits of an answer
OUTPUT_PRICE = 4
FEW_BYTES = 40


@dataclass(slots=True)
class Prompt:
    """``before``: tokens of the prompt before it. ``tokens`` and ``output``: what the provider counted."""

    before: int
    added_bytes: int
    tokens: int
    output: int
    is_structured: bool


def prompts_of(run: dict[str, Any]) -> Iterator[Prompt]:
    steps = [step for step in run["steps"] if step.get("agent") != "user" or step["kind"] == "message"]
    if len({step.get("agent") for step in steps if step["kind"] == "model"}) > 1:
        return  # each agent has a history of its own
    before, added, is_structured = 0, 0, False
    for step in steps:
        if step["kind"] == "model":
            tokens = step.get("input_tokens") or 0
            if before and tokens > before and added > FEW_BYTES:
                yield Prompt(before, added, tokens, step.get("output_tokens") or 0, is_structured)
            before, added, is_structured = tokens, 0, False
        size, is_data = size_of(step)
        added, is_structured = added + size, is_structured or is_data


def size_of(step: dict[str, Any]) -> tuple[int, bool]:
    """Bytes, and whether it is an answer with fields."""
    kind, name = step["kind"], len(step.get("tool") or "")
    if kind in ("model", "message"):
        text = step.get("text_chars") or text_size(step.get("text") or "")
        return (text + PART if text else 0), False
    if kind == "tool_call":
        args = step.get("args")
        call = types.FunctionCall(name=step.get("tool"), args=args if isinstance(args, dict) else {"args": args})
        return measured(types.Part(function_call=call)), False
    if step.get("result_chars"):
        return PART + name + int(step["result_chars"]), False
    value = step.get("result", step.get("text"))
    if isinstance(value, str) and value.strip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    response = value if isinstance(value, dict) else {"result": value}
    answer = types.FunctionResponse(name=step.get("tool"), response=response)
    return measured(types.Part(function_response=answer)), isinstance(value, dict | list)


def measured(part: types.Part) -> int:
    return project(LlmRequest(contents=[types.Content(role="user", parts=[part])]), None).size


def figures_of(prompts: list[Prompt], bytes_per_token: float) -> dict[str, Any]:
    added = [(p.added_bytes / bytes_per_token, p.tokens - p.before) for p in prompts]
    errors = sorted(abs(estimate - truth) / truth for estimate, truth in added)
    whole = sorted(
        abs(p.before + estimate - p.tokens) / p.tokens for p, (estimate, _) in zip(prompts, added, strict=True)
    )
    holds = {}
    for most in OUTPUTS:
        held = [p for p in prompts if p.output <= most]
        below = sum(
            p.tokens + OUTPUT_PRICE * p.output > p.before + p.added_bytes / bytes_per_token + OUTPUT_PRICE * most
            for p in held
        )
        holds[most] = below / len(held) if held else 0.0
    return {
        "prompts": len(prompts),
        "added": {"median": median(errors), "p95": errors[int(len(errors) * 0.95)]},
        "in_all": sum(estimate for estimate, _ in added) / sum(truth for _, truth in added),
        "under": sum(estimate < truth for estimate, truth in added) / len(added),
        "whole": {"median": median(whole), "p95": whole[int(len(whole) * 0.95)]},
        "hold_below_cost": holds,
    }


def read(path: Path) -> Iterator[Prompt]:
    for file in sorted(path.glob("*.jsonl*")) if path.is_dir() else [path]:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as lines:
            for line in lines:
                yield from prompts_of(json.loads(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    prompts = list(read(options.runs))
    sets = {"all": prompts, "with structured answers": [p for p in prompts if p.is_structured]}
    found = {
        f"{name}, {each:g} bytes per token": figures_of(chosen, each)
        for name, chosen in sets.items()
        for each in sorted({2, UPPER, LIKELY})
        if chosen
    }
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, row in found.items():
        added, whole, holds = row["added"], row["whole"], row["hold_below_cost"]
        print(
            f"{name} ({row['prompts']} prompts): what was added: error {added['median']:.0%}, p95 {added['p95']:.0%}, "
            f"{row['in_all']:.2f} of the truth in all, too low in {row['under']:.1%}; whole prompt: error "
            f"{whole['median']:.1%}, p95 {whole['p95']:.1%}; hold below the cost at an output of at most "
            + ", ".join(f"{most:,}: {share:.2%}" for most, share in holds.items())
        )


if __name__ == "__main__":
    main()
