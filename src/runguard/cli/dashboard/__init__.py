"""A read-only web page for a durable store, on loopback. Only ``serve`` loads Starlette and uvicorn."""
