"""The API: every action of the page as a named endpoint, for gradio_client, curl and, on request, MCP."""
