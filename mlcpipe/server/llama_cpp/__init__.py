"""llama-server's own API (llama.cpp's tools/server/README.md), beside those that it shares with OpenAI."""

from mlcpipe.server.llama_cpp import adapters, completion, embedding, facts, infill

ROUTERS = (completion.router, infill.router, facts.router, adapters.router)
EMBEDDING_ROUTERS = (embedding.router,)
