"""Starts the service. A file of its own: each worker imports this one too, and should import the service once."""

import os

import uvicorn

if __name__ == "__main__":
    uvicorn.run(
        "service:api",
        host="127.0.0.1",
        port=int(os.environ.get("PORT", "8000")),
        workers=int(os.environ.get("WORKERS", "2")),
        timeout_worker_healthcheck=30,  # a worker that still imports is not a dead one
    )
