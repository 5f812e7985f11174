"""A page over a durable store, on loopback, for looking only. Starlette and uvicorn are loaded by ``serve`` alone."""
