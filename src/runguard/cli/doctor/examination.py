"""Everything that ``runguard doctor`` looks at, in order."""

from runguard.cli.commands.policies import policy_here
from runguard.cli.doctor.application import Application, load_application, loader_of
from runguard.cli.doctor.installation import adk_line, name_line, python_line
from runguard.cli.doctor.line import Line
from runguard.cli.doctor.self_test import self_test
from runguard.cli.doctor.surroundings import policy_line, price_lines, store_line
from runguard.core.exceptions import PolicyError
from runguard.ledger.urls import check_store
from runguard.policy.settings import Policy


def examine(target: str | None, models: tuple[str, ...], store: str | None) -> list[Line]:
    """``target``: the app to load.

    The live test comes first, before code of the app can change anything, and is told last.
    """
    load = loader_of(target) if target is not None else None
    adk = adk_line()
    live = self_test() if adk.state == "ok" else None
    app = load_application(target, load) if target is not None and load is not None else Application([])
    lines = [python_line(), name_line(), adk, *app.lines]
    try:
        policy = policy_here(store) if app.policy is None else _with_store(app.policy, store)
    except PolicyError as error:
        lines.append(Line("policy", "problem", str(error), "correct it; `runguard check` tells when it is valid"))
    else:
        lines += [
            policy_line(policy, of_app=app.policy is not None),
            store_line(policy),
            *price_lines(policy, (*models, *app.models)),
        ]
    return [*lines, live] if live is not None else lines


def _with_store(policy: Policy, store: str | None) -> Policy:
    if store is None:
        return policy
    check_store(store)
    return policy.model_copy(update={"store": store})
