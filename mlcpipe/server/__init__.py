"""`mlcpipe serve`: HTTP in the forms of OpenAI and Anthropic over a `ServingEngine`."""
